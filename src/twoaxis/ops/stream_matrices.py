"""Matrices of bounded gain that mix parallel streams, computed from a few scores of each token.

Letters: n streams, K factors, m = n - 1. Axis 0 is the source, axis 1 the destination, and the tokens come last.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from twoaxis.core.cost import Cost
from twoaxis.core.errors import ConfigError, problem
from twoaxis.ops.precision import Impl, outside_autocast, statistics_dtype
from twoaxis.ops.sinkhorn import Sinkhorn, sinkhorn

Residual = Literal[
    "sinkhorn", "identity", "permutations", "kronecker", "spectral", "source_softmax", "destination_softmax", "orthogonal"
]

BY_ENTRY = ("sinkhorn", "source_softmax", "destination_softmax")
"""Matrices with a score for every entry, so that each stream can score its own row."""

BOUNDS: dict[Residual, str] = {
    "sinkhorn": "Sinkhorn",
    "permutations": "softmax over permutations",
    "kronecker": "softmax of factors",
    "spectral": "spectral norm 1",
    "source_softmax": "softmax over sources",
    "destination_softmax": "softmax over destinations",
    "orthogonal": "unit quaternions",
}
"""What bounds each matrix, in words."""


@dataclass(frozen=True)
class StreamMatrix:
    """One of these matrices for n streams.

    Attributes:
        kind: which one.
        n: streams.
        sinkhorn: options of the rounds of `sinkhorn`.

    Raises:
        ConfigError: a number of streams for which it does not exist.
    """

    kind: Residual
    n: int
    sinkhorn: Sinkhorn

    def __post_init__(self) -> None:
        allowed = ""
        if self.kind == "permutations" and self.n > MOST_PERMUTED:
            allowed = f"at most {MOST_PERMUTED} with residual='permutations', which has n! of them"
        elif self.kind == "kronecker" and self.n & (self.n - 1):
            allowed = "a power of 2 with residual='kronecker'"
        elif self.kind == "orthogonal" and self.n != 4:
            allowed = "4 with residual='orthogonal', the parts of a quaternion"
        if allowed:
            raise ConfigError(problem("n_streams", self.n, allowed, "use 4, or residual='sinkhorn'"))

    @property
    def groups(self) -> tuple[int, ...]:
        """The scores of a token, in groups that share a scale; none for the identity."""
        if self.kind == "identity":
            return ()
        if self.kind == "spectral":
            angles = (self.n - 1) * (self.n - 2) // 2
            return (angles, angles, self.n - 1) if angles else (self.n - 1,)
        counts = {"permutations": math.factorial(self.n), "kronecker": 2 * (self.n.bit_length() - 1), "orthogonal": 8}
        return (counts.get(self.kind, self.n * self.n),)

    @property
    def turns(self) -> bool:
        """Whether it has rotations, whose angles have learned bounds."""
        return len(self.groups) == 3

    def of(self, logits: Tensor, angle_bounds: Float[Tensor, " 2"] | None, impl: Impl) -> Float[Tensor, "n n *each"]:
        """Returns the matrix of each token.

        Args:
            logits: [scores *each] in the order of the groups; by entry, also as [n n *each].
            angle_bounds: where there are rotations, of the angles of both.
            impl: engine of Sinkhorn.
        """
        logits = logits.to(statistics_dtype(logits))
        if self.kind in BY_ENTRY:
            entries = logits if logits.shape[0] == self.n else logits.unflatten(0, (self.n, self.n))
            if self.kind == "sinkhorn":
                return sinkhorn(entries, self.sinkhorn, impl)
            return one_softmax(entries, ("source_softmax", "destination_softmax").index(self.kind))
        if self.kind == "permutations":
            return permutation_mean(logits, self.n)
        if self.kind == "kronecker":
            return kronecker_product(logits)
        if self.kind == "orthogonal":
            one = torch.eye(1, 4, dtype=logits.dtype, device=logits.device).repeat(1, 2)
            return quaternion_rotation(logits + one.view(8, *[1] * (logits.ndim - 1)))
        *angles, values = logits.split(self.groups)
        bounds = () if angle_bounds is None else angle_bounds.to(logits.dtype).split(1)
        return spectral_matrix([b * torch.tanh(some) for b, some in zip(bounds, angles, strict=True)], values)

    def cost(self, tokens: int) -> Cost:
        """The operations that make the matrices of this many tokens from their logits."""
        n, m, rows = self.n, self.n - 1, sum(self.groups)
        products = {
            "permutations": 2 * n * n * rows,
            "spectral": 4 * m * m * (m * (m - 1) // 2 + n) * self.turns,
            "orthogonal": 512,
        }
        elementwise = {
            "sinkhorn": 4 * n * n * self.sinkhorn.rounds,
            "kronecker": 3 * rows + sum(4**k for k in range(2, rows // 2 + 1)),
            "spectral": 2 * rows + 10 * m * m + n * m + 2 * n * n * m,
            "orthogonal": 48,
        }
        return Cost(
            matmul_flops=tokens * products.get(self.kind, 0),
            elementwise_flops=tokens * elementwise.get(self.kind, 3 * rows),
        )


MOST_PERMUTED = 4
"""Streams with few permutations: 24 of 4, but 120 of 5."""

_ORDERS = {n: tuple(permutations(range(n))) for n in range(1, MOST_PERMUTED + 1)}
_PERMUTATIONS = {
    n: [[float(order[j] == i) for order in orders] for j in range(n) for i in range(n)] for n, orders in _ORDERS.items()
}
"""The entries [source, destination] of all permutation matrices, by the number of streams; one column is one permutation."""

_LEFT = ((0, -1, -2, -3), (1, 0, -3, 2), (2, 3, 0, -1), (3, -2, 1, 0))
_RIGHT = ((0, -1, -2, -3), (1, 0, 3, -2), (2, -3, 0, 1), (3, 2, -1, 0))
"""The matrices of multiplying a quaternion from the left and from the right: the part in each entry, with its sign."""


def _part(entry: int, part: int) -> float:
    return float(abs(entry) == part) * (-1 if entry < 0 else 1)


_ROTATIONS = [
    [sum(_part(_LEFT[j][k], p) * _part(_RIGHT[k][i], q) for k in range(4)) for p in range(4) for q in range(4)]
    for j in range(4)
    for i in range(4)
]
"""The entries of every product of a left and a right matrix of unit quaternions; one column is one pair."""


@outside_autocast
def one_softmax(logits: Float[Tensor, "n n *each"], axis: int) -> Float[Tensor, "n n *each"]:
    """Returns matrices with sums of one along one axis.

    Over sources (0), every new stream is a convex mean of the old ones, so equal streams stay equal; over destinations (1),
    the sum of the streams stays as it is. The norm of any product of them is at most sqrt(n).

    Source: osHC, "One Marginal Is Enough", OpenReview 1BC0eYN2uS; a reconstruction, since no code of it is public
    """
    return torch.softmax(logits.to(statistics_dtype(logits)), dim=axis)


@outside_autocast
def permutation_mean(logits: Float[Tensor, "P *each"], n: int) -> Float[Tensor, "n n *each"]:
    """Returns the mean of all n! permutation matrices by a softmax, which is exactly doubly stochastic.

    Equation: R = sum_r softmax(logits)_r P_r, with P_r[j, perm_r(j)] = 1 and permutations in lexicographic order
    Source:   mHC-lite, arXiv:2601.05732; FFTYYY/mhc-lite at ea19775
    Cost:     matrix product flops 2*n^2*n! per token; saves the softmax

    Example:
        >>> permutation_mean(torch.tensor([0.0, 30.0]), 2)
        tensor([[9.3576e-14, 1.0000e+00],
                [1.0000e+00, 9.3576e-14]])
    """
    weights = torch.softmax(logits.to(statistics_dtype(logits)), dim=0)
    return _linear(_PERMUTATIONS[n], weights).unflatten(0, (n, n))


@outside_autocast
def kronecker_product(logits: Float[Tensor, "twoK *each"]) -> Float[Tensor, "n n *each"]:
    """Returns the Kronecker product of K doubly stochastic 2 x 2 matrices, with n = 2^K.

    Equation: R = U_0 (x) ... (x) U_(K-1), the first most significant, U_k = [[p, 1 - p], [1 - p, p]],
              p = the first of softmax(logits_2k, logits_2k+1)
    Source:   KromHC, arXiv:2601.21579; wz1119/KromHC at 7b15834
    Cost:     saves the factors and the products of the first of them

    Example:
        >>> kronecker_product(torch.tensor([0.0, -30.0, -30.0, 0.0]))[0]
        tensor([9.3576e-14, 1.0000e+00, 8.7565e-27, 9.3576e-14])
    """
    wide = logits.to(statistics_dtype(logits))
    chances = torch.softmax(wide.unflatten(0, (-1, 2)), dim=1)
    factors = torch.stack((chances, chances.flip(1)), dim=1)
    product = factors[0]
    for factor in factors[1:]:
        pairs = product[:, None, :, None] * factor[None, :, None, :]
        product = pairs.flatten(2, 3).flatten(0, 1)
    return product


@outside_autocast
def spectral_matrix(
    rotations: Sequence[Float[Tensor, "k *each"]], values: Float[Tensor, "m *each"]
) -> Float[Tensor, "n n *each"]:
    """Returns matrices with all sums one and spectral norm one, whose entries may be negative.

    Equation: R = 1 1^T / n + H U diag(tanh(values)) V^T H^T, with orthonormal columns H orthogonal to 1 (Helmert's),
              U = (I + A)^-1 (I - A), A skew, and the first rotations above its diagonal, row by row; V likewise
    Source:   sHC, arXiv:2603.20896; 6zHAOyi/s2HC at 80ebd01, litgpt/hyper_conn/shc.py
    Deviates: with n = 4 the inverse is written out instead of solved for
    Cost:     matrix product flops 4*m^2*(k + n) per token, k = m*(m - 1)/2

    Args:
        rotations: of U and of V; empty for two streams.
        values: of which the hyperbolic tangents are the singular values beside the one of the mean.

    Example:
        >>> spectral_matrix((), torch.tensor([0.0]))
        tensor([[0.5000, 0.5000],
                [0.5000, 0.5000]])
    """
    values = values.to(statistics_dtype(values))
    m, each = values.shape[0], values.shape[1:]
    columns = _helmert(m + 1)
    if rotations:
        left, right = (_linear(columns, cayley(angles, m).to(values.dtype)) for angles in rotations)
    else:
        left = right = values.new_tensor(columns).view(m + 1, m, *[1] * len(each))
    scaled = left * torch.tanh(values)
    return (scaled.unsqueeze(1) * right.unsqueeze(0)).sum(2) + 1 / (m + 1)


@outside_autocast
def cayley(angles: Float[Tensor, "k *each"], m: int) -> Float[Tensor, "m m *each"]:
    """Returns the orthogonal matrices (I + A)^-1 (I - A), A skew with these numbers above its diagonal, row by row.

    Example:
        >>> cayley(torch.tensor([1.0]), 2)
        tensor([[ 0., -1.],
                [ 1.,  0.]])
    """
    skew = _linear(_skew(m), angles.to(statistics_dtype(angles))).unflatten(0, (m, m))
    identity = torch.eye(m, dtype=skew.dtype, device=skew.device).view(m, m, *[1] * (skew.ndim - 2))
    if m != 3:
        # Always regular, so no check, which would wait for the device.
        inverse, _ = torch.linalg.solve_ex((identity + skew).movedim((0, 1), (-2, -1)), identity.view(m, m))
        return 2 * inverse.movedim((-2, -1), (0, 1)) - identity
    axis = torch.stack((skew[2, 1], skew[0, 2], skew[1, 0]))
    square = axis.square().sum(0)
    turned = 2 * (axis.unsqueeze(1) * axis.unsqueeze(0) - skew) + (1 - square) * identity
    return turned / (1 + square)


@outside_autocast
def quaternion_rotation(parts: Float[Tensor, "8 *each"]) -> Float[Tensor, "4 4 *each"]:
    """Returns rotations of four streams: the products of a left and a right multiplication by unit quaternions.

    Equation: R = L(p) R(q), p and q the first and last four parts divided by their norms
    Source:   oHC, arXiv:2609.02672; a reconstruction, since no code of it is public
    Cost:     matrix product flops 512 per token

    Example:
        >>> quaternion_rotation(torch.tensor([2.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0]))
        tensor([[ 0., -1.,  0.,  0.],
                [ 1.,  0.,  0.,  0.],
                [ 0.,  0.,  0.,  1.],
                [ 0.,  0., -1.,  0.]])
    """
    pair = parts.to(statistics_dtype(parts)).unflatten(0, (2, 4))
    size = torch.linalg.vector_norm(pair, dim=1, keepdim=True).clamp_min(torch.finfo(pair.dtype).tiny)
    left, right = (pair / size).unbind()
    products = (left.unsqueeze(1) * right.unsqueeze(0)).flatten(0, 1)
    return _linear(_ROTATIONS, products).unflatten(0, (4, 4))


def _linear(table: Sequence[Sequence[float]], x: Tensor) -> Tensor:
    """The product of a table of constants with the first axis."""
    product = x.new_tensor(table) @ x.flatten(1) if x.ndim > 1 else x.new_tensor(table) @ x
    return product.view(len(table), *x.shape[1:])


def _helmert(n: int) -> list[list[float]]:
    """Rows of n - 1 orthonormal columns that sum to zero."""
    sizes = [(column * (column + 1)) ** -0.5 for column in range(1, n)]
    return [[size * ((row < i) - i * (row == i)) for i, size in enumerate(sizes, start=1)] for row in range(n)]


def _skew(m: int) -> list[list[float]]:
    """The entries of a skew matrix by the numbers above its diagonal."""
    pairs = [(i, j) for i in range(m) for j in range(i + 1, m)]
    return [[float((i, j) == pair) - float((j, i) == pair) for pair in pairs] for i in range(m) for j in range(m)]
