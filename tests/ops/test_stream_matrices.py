import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from twoaxis.core.errors import ConfigError
from twoaxis.ops import stream_matrices
from twoaxis.ops.sinkhorn import Sinkhorn
from twoaxis.ops.stream_matrices import StreamMatrix, cayley, kronecker_product, permutation_mean, quaternion_rotation

from .compare import normal

KINDS: list[tuple[Any, int]] = [
    ("permutations", 2),
    ("permutations", 3),
    ("permutations", 4),
    ("kronecker", 2),
    ("kronecker", 4),
    ("kronecker", 8),
    ("spectral", 2),
    ("spectral", 3),
    ("spectral", 4),
    ("spectral", 5),
    ("source_softmax", 3),
    ("destination_softmax", 3),
    ("orthogonal", 4),
]
EACH = pytest.mark.parametrize(("kind", "n"), KINDS)


def of(kind: Any, n: int) -> tuple[StreamMatrix, Callable[[Tensor], Tensor]]:
    """A matrix, and what makes it from logits; rotations have angles of at most 0.5 and 2."""
    matrix = StreamMatrix(kind, n, Sinkhorn())
    bounds = torch.tensor([0.5, 2.0], dtype=torch.float64) if matrix.turns else None
    return matrix, lambda logits: matrix.of(logits, bounds, "fused")


def drawn(kind: Any, n: int, tokens: int, seed: int = 0) -> Tensor:
    """[tokens n n], of large logits."""
    matrix, make = of(kind, n)
    return make(2 * normal(sum(matrix.groups), tokens, seed=seed)).movedim(-1, 0)


@EACH
def test_gradcheck(kind: Any, n: int) -> None:
    matrix, make = of(kind, n)
    assert torch.autograd.gradcheck(make, normal(sum(matrix.groups), 2).requires_grad_(), atol=1e-7)


@EACH
def test_every_score_matters(kind: Any, n: int) -> None:
    matrix, make = of(kind, n)
    logits = normal(sum(matrix.groups), 3).requires_grad_()
    found = make(logits)
    (gradient,) = torch.autograd.grad((found * normal(*found.shape, seed=1)).sum(), logits)
    assert (gradient != 0).all()


@EACH
def test_half_precision_makes_matrices_of_statistics(kind: Any, n: int) -> None:
    matrix, _ = of(kind, n)
    bounds = torch.ones(2, dtype=torch.bfloat16) if matrix.turns else None
    logits = normal(sum(matrix.groups), 2, 3).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = matrix.of(logits, bounds, "fused")
    assert found.dtype == torch.float32 and found.shape == (n, n, 2, 3)
    exact = matrix.of(logits.double(), None if bounds is None else bounds.double(), "fused")
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("kind", "n"), [one for one in KINDS if one[0] in ("permutations", "kronecker", "spectral")])
def test_both_sums_are_one_and_so_is_the_norm(kind: Any, n: int) -> None:
    matrices = drawn(kind, n, 50)
    ones = torch.ones(50, n, dtype=torch.float64)
    for axis in (1, 2):
        torch.testing.assert_close(matrices.sum(axis), ones, rtol=0, atol=1e-12)
    norms = torch.linalg.matrix_norm(matrices, 2)
    torch.testing.assert_close(norms, torch.ones_like(norms), rtol=0, atol=1e-12)
    assert bool((matrices < 0).any()) == (kind == "spectral" and n > 2)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_each_score_of_permutations_is_of_its_own(n: int) -> None:
    for row, order in enumerate(itertools.permutations(range(n))):
        logits = torch.full((len(list(itertools.permutations(range(n)))),), -80.0, dtype=torch.float64)
        logits[row] = 0.0
        expected = torch.eye(n, dtype=torch.float64)[list(order)]
        torch.testing.assert_close(permutation_mean(logits, n), expected, rtol=0, atol=1e-15)


def test_the_first_factor_swaps_halves_and_the_last_one_neighbours() -> None:
    swap, keep = [-80.0, 0.0], [0.0, -80.0]
    first, last = (kronecker_product(torch.tensor(pair[0] + pair[1])) for pair in ((swap, keep), (keep, swap)))
    for found, to in ((first, [2, 3, 0, 1]), (last, [1, 0, 3, 2])):
        torch.testing.assert_close(found, torch.eye(4)[to], rtol=0, atol=1e-30)


@pytest.mark.parametrize("m", [2, 3, 4])
def test_rotations_are_those_of_the_solved_equation(m: int) -> None:
    angles = normal(m * (m - 1) // 2, 7)
    A = torch.zeros(7, m, m, dtype=torch.float64)
    for place, (i, j) in enumerate(itertools.combinations(range(m), 2)):
        A[:, i, j], A[:, j, i] = angles[place], -angles[place]
    one = torch.eye(m, dtype=torch.float64)
    torch.testing.assert_close(cayley(angles, m).movedim(-1, 0), torch.linalg.solve(one + A, one - A), rtol=0, atol=1e-13)


@pytest.mark.parametrize("kind", ["source_softmax", "destination_softmax"])
def test_one_sum_is_one_and_products_stay_small(kind: Any) -> None:
    n, matrices = 4, drawn(kind, 4, 64)
    axis = 1 if kind == "source_softmax" else 2
    ones = torch.ones(64, n, dtype=torch.float64)
    torch.testing.assert_close(matrices.sum(axis), ones, rtol=0, atol=1e-12)
    assert (matrices.sum(3 - axis) - 1).abs().amax(-1).min() > 1e-3
    product = torch.eye(n, dtype=torch.float64)
    for matrix in matrices:
        product = product @ matrix
        assert torch.linalg.matrix_norm(product, 2) <= n**0.5 + 1e-12


def test_orthogonal_matrices_are_rotations_whatever_the_norm_of_the_scores() -> None:
    matrices, one = drawn("orthogonal", 4, 50), torch.eye(4, dtype=torch.float64)
    torch.testing.assert_close(matrices.mT @ matrices, one.expand(50, 4, 4), rtol=0, atol=1e-12)
    determinants = torch.linalg.det(matrices)
    torch.testing.assert_close(determinants, torch.ones_like(determinants), rtol=0, atol=1e-12)
    parts = normal(8, 5)
    scaled = torch.cat((3.0 * parts[:4], 0.01 * parts[4:]))
    torch.testing.assert_close(quaternion_rotation(scaled), quaternion_rotation(parts), rtol=0, atol=1e-14)
    unmixed = StreamMatrix("orthogonal", 4, Sinkhorn()).of(torch.zeros(8, 2), None, "fused")
    assert torch.equal(unmixed, torch.eye(4).unsqueeze(-1).expand(4, 4, 2))


@pytest.mark.parametrize(
    ("kind", "n", "words"),
    [
        ("permutations", 5, "n_streams=5: must be at most 4"),
        ("kronecker", 6, "n_streams=6: must be a power of 2"),
        ("orthogonal", 3, "n_streams=3: must be 4"),
    ],
)
def test_numbers_of_streams_that_cannot_be(kind: Any, n: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        StreamMatrix(kind, n, Sinkhorn())


def test_constants_are_exact() -> None:
    """Sums that tables of constants decide, in float64 to the last place."""
    helmert = torch.tensor(stream_matrices._helmert(5), dtype=torch.float64)  # pyright: ignore[reportPrivateUsage]
    torch.testing.assert_close(helmert.T @ helmert, torch.eye(4, dtype=torch.float64), rtol=0, atol=1e-15)
    torch.testing.assert_close(helmert.sum(0), torch.zeros(4, dtype=torch.float64), rtol=0, atol=1e-15)
