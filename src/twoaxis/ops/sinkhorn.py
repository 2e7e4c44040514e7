"""Sinkhorn normalisation: square matrices with sums of one along both axes, one matrix for each token.

Letters: n streams. Axis 0 is the source, axis 1 the destination, and the tokens come last, so that each of the many short
steps runs over contiguous tokens.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from twoaxis.core.errors import ConfigError, problem
from twoaxis.ops.gpu import sinkhorn_operator
from twoaxis.ops.precision import Impl, outside_autocast, refuse_second_gradients, runs_plain, statistics_dtype

Start = Literal["exp", "exp_minus_max", "softmax", "log"]
Order = Literal["sources_first", "destinations_first"]


@dataclass(frozen=True)
class Sinkhorn:
    """Options of the rounds; implementations differ in all of them, which shows with few rounds.

    Attributes:
        rounds: pairs of normalisations.
        order: the sum that each round divides by first. `destinations_first` makes the weights into every destination sum to
            exactly one at the end, `sources_first` those out of every source.
        start: `exp` of the logits, which overflows in float32 above 88; `exp_minus_max` shifts them by their maximum along the
            axis of the first sum, `softmax` is the first sum of the first round, and `log` runs all rounds on logarithms.
        start_eps: added to every entry of the start.
        sum_eps: added to every sum.

    Raises:
        ConfigError: fewer than one round, or an eps that is negative or on logarithms.
    """

    rounds: int = 20
    order: Order = "destinations_first"
    start: Start = "exp"
    start_eps: float = 0.0
    sum_eps: float = 0.0

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ConfigError(problem("rounds", self.rounds, ">= 1", "use 20, as published"))
        for name, eps in (("start_eps", self.start_eps), ("sum_eps", self.sum_eps)):
            if eps < 0 or (eps and self.start == "log"):
                allowed = "0 with start='log'" if self.start == "log" else ">= 0"
                raise ConfigError(problem(name, eps, allowed, "set it to 0, or use another start"))

    @property
    def first_axis(self) -> int:
        """The axis of the first sum."""
        return int(self.order == "destinations_first")

    @property
    def axes(self) -> list[int]:
        """The axis of every sum after the start, in order."""
        axes = [self.first_axis, 1 - self.first_axis] * self.rounds
        return axes[1:] if self.start == "softmax" else axes


@outside_autocast
def sinkhorn(logits: Float[Tensor, "n n *each"], options: Sinkhorn, impl: Impl = "fused") -> Float[Tensor, "n n *each"]:
    """Returns the nearly doubly stochastic matrix of each token, in the precision of statistics.

    Equation: M = exp(logits), then in each round M <- M / (sum of M over one axis), and over the other
    Source:   mHC, arXiv:2512.24880, section 4.2; Sinkhorn and Knopp, 1967
    Deviates: starts, orders and eps of other implementations are options
    Engines:  on a GPU kernels, also under `torch.compile`: 16 or 32 bits, n at most 4, every start but `log`; on a CPU
              kernels in C, in compiled graphs only with gradients: float32, n at most 8, the same starts. Everything else
              runs in torch's engine
    Cost:     flops 4*n^2 per round and token; saves the logits and runs the rounds again in the backward pass, which then
              inverts each of them by its sums instead of saving 2*rounds matrices

    Example:
        >>> sinkhorn(torch.tensor([[5.0, 0.0], [0.0, 5.0]]), Sinkhorn()).sum(1)
        tensor([1., 1.])
    """
    if impl == "fused" and sinkhorn_operator.serves(logits, options.start):
        chosen = options.rounds, options.first_axis, options.start, options.start_eps, options.sum_eps
        return sinkhorn_operator.normalise(logits, *chosen)
    if runs_plain(impl):
        return _plain(logits.to(statistics_dtype(logits)), options)
    return _Sinkhorn.apply(logits, options)


def _plain(logits: Tensor, options: Sinkhorn) -> Tensor:
    if options.start == "log":
        return _rounds_on_logarithms(logits, options)[-1].exp()
    matrix = _start(logits, options) + options.start_eps
    for axis in options.axes:
        matrix = matrix / (matrix.sum(axis, keepdim=True) + options.sum_eps)
    return matrix


def _start(logits: Tensor, options: Sinkhorn) -> Tensor:
    if options.start == "softmax":
        return torch.softmax(logits, dim=options.first_axis)
    if options.start == "exp_minus_max":
        logits = logits - logits.amax(options.first_axis, keepdim=True)
    return logits.exp()


# Measured, a training step with the plain form: 1.10 of the time, 1.21 of the saved bytes in float32, 1.40 in bfloat16.
class _Sinkhorn(torch.autograd.Function):
    """With G the gradient by log M, dividing by a sum is G <- G - M sum(G), and undone by multiplying with that sum."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, options: Sinkhorn) -> Tensor:
        ctx.save_for_backward(logits)
        ctx.options = options
        wide = logits.to(statistics_dtype(logits))
        return _plain(wide, options) if options.start == "log" else _rounds(wide, options)[0]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        refuse_second_gradients("sinkhorn")
        (logits,) = ctx.saved_tensors
        options: Sinkhorn = ctx.options
        wide = logits.to(statistics_dtype(logits))
        # With tokens first in memory, every step would be slow.
        grad = grad_outputs[0].contiguous()
        if options.start == "log":
            by_logits = _back_on_logarithms(grad, wide, options)
        else:
            matrix, sums = _rounds(wide, options)
            by_log = grad * matrix
            for axis, total in zip(reversed(options.axes), reversed(sums), strict=True):
                by_log.addcmul_(by_log.sum(axis, keepdim=True), matrix, value=-1)
                matrix.mul_(total)
            by_logits = _back_through_start(by_log, matrix, wide, options)
        return by_logits.to(logits.dtype), None


def _rounds(logits: Tensor, options: Sinkhorn) -> tuple[Tensor, list[Tensor]]:
    matrix = _start(logits, options)
    if options.start_eps:
        matrix.add_(options.start_eps)
    sums = []
    for axis in options.axes:
        total = matrix.sum(axis, keepdim=True)
        if options.sum_eps:
            total.add_(options.sum_eps)
        matrix.div_(total)
        sums.append(total)
    return matrix, sums


def _rounds_on_logarithms(logarithms: Tensor, options: Sinkhorn) -> list[Tensor]:
    rounds = []
    for axis in options.axes:
        logarithms = torch.log_softmax(logarithms, dim=axis)
        rounds.append(logarithms)
    return rounds


def _back_on_logarithms(grad: Tensor, logits: Tensor, options: Sinkhorn) -> Tensor:
    rounds = _rounds_on_logarithms(logits, options)
    by_log = grad * rounds[-1].exp()
    for axis, logarithms in zip(reversed(options.axes), reversed(rounds), strict=True):
        by_log = torch.ops.aten._log_softmax_backward_data(by_log, logarithms, axis, by_log.dtype)
    return by_log


def _back_through_start(by_log: Tensor, matrix: Tensor, logits: Tensor, options: Sinkhorn) -> Tensor:
    axis = options.first_axis
    if options.start_eps:
        by_log.mul_(_start(logits, options)).div_(matrix)
    if options.start == "softmax":
        start = matrix - options.start_eps
        by_log.addcmul_(by_log.sum(axis, keepdim=True), start, value=-1)
    if options.start == "exp_minus_max" and (options.start_eps or options.sum_eps):
        # Without an eps the first sum cancels the shift.
        shift = logits.amax(axis, keepdim=True)
        largest = (logits == shift).to(by_log.dtype)
        by_log -= largest / largest.sum(axis, keepdim=True) * by_log.sum(axis, keepdim=True)
    return by_log
