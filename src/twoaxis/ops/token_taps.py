"""Causal convolution with taps of its own for every token, from a product of low rank or one set for each head.

Letters: B batch, T position, C channels, k taps, R rank, H heads, P tokens of history, N = P + T. Tap s is that of the token s
positions back, the reverse of the order in `causal_conv`.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from twoaxis.core.errors import ConfigError
from twoaxis.ops.causal_conv import NO_DOCUMENT, Borders
from twoaxis.ops.precision import Impl, outside_autocast, refuse_second_gradients, runs_plain, statistics_dtype


def low_rank_conv(
    x: Float[Tensor, "B T C"],
    factors: Float[Tensor, "B T R"],
    weight: Float[Tensor, "k R C"],
    *,
    history: Float[Tensor, "B P C"] | None = None,
    documents: Int[Tensor, "B N"] | None = None,
    impl: Impl = "fused",
) -> Float[Tensor, "B T C"]:
    """Convolves every channel with taps that are a linear map of a few numbers of the token; a factor of 1 adds static taps.

    Equation: y_t = sum_(s=0..k-1) (z_t^T W_s) * x_(t-s), over tokens of the document of t, zeros before its start
    Shapes:   sums in the precision of statistics, rounded once
    Cost:     matrix product flops 2*R*k*C per token, and 2*k*C more; saves x, the factors and the weight

    Args:
        x: the new tokens.
        factors: z.
        weight: W, by tap.
        history: the tokens before these, at least the last k - 1 that exist.
        documents: of the history and the new tokens; None when every row is one document.
        impl: `fused` or `reference`.

    Raises:
        ConfigError: documents for other tokens.

    Example:
        >>> x, ones = torch.tensor([[[1.0], [2.0], [3.0]]]), torch.ones(1, 3, 1)
        >>> low_rank_conv(x, ones, torch.tensor([[[1.0]], [[10.0]]])).flatten()
        tensor([ 1., 12., 23.])
    """
    return _convolve(x, factors, weight, history, documents, impl)


def per_head_conv(
    x: Float[Tensor, "B T C"],
    taps: Float[Tensor, "B T H k"],
    static: Float[Tensor, "k C"],
    *,
    history: Float[Tensor, "B P C"] | None = None,
    documents: Int[Tensor, "B N"] | None = None,
    impl: Impl = "fused",
) -> Float[Tensor, "B T C"]:
    """Convolves every channel with the sum of static taps and of those that its head has for the token.

    Equation: y_t = sum_(s=0..k-1) (a_t[head, s] + S_s) * x_(t-s), the channels of a head side by side
    Cost:     flops 3*k*C per token; saves x and both sets of taps

    Args:
        x: the new tokens.
        taps: a, of each head.
        static: S, of each channel.
        history: as in `low_rank_conv`.
        documents: as in `low_rank_conv`.
        impl: `fused` or `reference`.

    Raises:
        ConfigError: documents for other tokens.
    """
    return _convolve(x, taps, static, history, documents, impl)


@outside_autocast
def _convolve(
    x: Tensor, factors: Tensor, weight: Tensor, history: Tensor | None, documents: Tensor | None, impl: Impl
) -> Tensor:
    rows = x if history is None else torch.cat((history, x), dim=1)
    if documents is not None and documents.shape[1] != rows.shape[1]:
        got = f"documents of {documents.shape[1]} tokens for {rows.shape[1]}"
        raise ConfigError(f"token taps: got {got}; give those of the history and of the new tokens")
    if runs_plain(impl):
        return _plain(rows, factors, weight, documents)
    return _TokenTaps.apply(rows, factors, weight, documents)


def _plain(rows: Tensor, factors: Tensor, weight: Tensor, documents: Tensor | None) -> Tensor:
    dtype, kernel, tokens = statistics_dtype(rows), len(weight), factors.shape[1]
    padded = F.pad(rows.to(dtype), (0, 0, kernel - 1, 0))
    known = None if documents is None else F.pad(documents, (kernel - 1, 0), value=NO_DOCUMENT)
    total = torch.zeros((), dtype=dtype, device=rows.device)
    for shift, own in enumerate(weight.to(dtype)):
        # Counted from the end, where rows and factors are aligned.
        stop = padded.shape[1] - shift
        if factors.ndim == 3:
            taps = factors.to(dtype) @ own
        else:
            taps = (factors[..., shift : shift + 1].to(dtype) + own.view(factors.shape[2], -1)).flatten(2)
        part = taps * padded[:, stop - tokens : stop]
        if known is not None:
            part = part * (known[:, stop - tokens : stop] == known[:, known.shape[1] - tokens :]).unsqueeze(-1)
        total = total + part
    return total.to(rows.dtype)


def _first(shift: int, past: int, tokens: int) -> int:
    """The first of the new tokens that has a token so far back; none has in rows shorter than that."""
    return min(max(0, shift - past), tokens)


# Measured, a training step with the plain form: 0.97 of the time, 1.54 of the saved bytes in float32, 2.18 in bfloat16.
class _TokenTaps(torch.autograd.Function):
    """One tap at a time in a buffer that all share; the backward pass makes the taps again, which are k times the input."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, factors: Tensor, weight: Tensor, documents: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, factors, weight, documents)
        dtype, tokens, kernel = statistics_dtype(rows), factors.shape[1], len(weight)
        x, past = rows.to(dtype), rows.shape[1] - tokens
        made = _Taps(factors.to(dtype), weight.to(dtype), documents)
        y, taps = (x.new_empty(x.shape[0], tokens, x.shape[2]) for _ in range(2))
        made.fill(y, 0).mul_(x[:, past:])
        for shift in range(1, kernel):
            first = _first(shift, past, tokens)
            made.fill(taps, shift)
            y[:, first:].addcmul_(taps[:, first:], x[:, past + first - shift : x.shape[1] - shift])
        return y.to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_gradients("convolution with taps of each token")
        rows, factors, weight, documents = ctx.saved_tensors
        dtype, tokens, kernel = statistics_dtype(rows), factors.shape[1], len(weight)
        grad, x, past = grad_outputs[0].to(dtype), rows.to(dtype), rows.shape[1] - tokens
        made = _Taps(factors.to(dtype), weight.to(dtype), documents)
        taps, grad_x = x.new_empty(x.shape[0], tokens, x.shape[2]), torch.zeros_like(x)
        grad_factors, grad_weight = torch.zeros_like(made.factors), torch.zeros_like(made.weight)
        for shift in range(kernel):
            first = _first(shift, past, tokens)
            seen = slice(past + first - shift, x.shape[1] - shift)
            made.fill(taps, shift)
            grad_x[:, seen].addcmul_(taps[:, first:], grad[:, first:])
            taps[:, :first] = 0
            torch.mul(grad[:, first:], x[:, seen], out=taps[:, first:])
            made.back(taps, shift, grad_factors, grad_weight[shift])
        return grad_x.to(rows.dtype), grad_factors.to(factors.dtype), grad_weight.to(weight.dtype), None


class _Taps:
    """The taps of every token, of one shift at a time."""

    def __init__(self, factors: Tensor, weight: Tensor, documents: Tensor | None) -> None:
        self.factors, self.weight = factors.contiguous(), weight
        self.borders = None if documents is None else Borders.find(documents, factors.shape[1], len(weight), dilation=1)

    def fill(self, out: Tensor, shift: int) -> Tensor:
        """Writes the taps into `out` [B T C], 0 where they would cross a border."""
        own = self.weight[shift]
        if self.factors.ndim == 3:
            torch.mm(self.factors.flatten(0, 1), own, out=out.view(-1, out.shape[-1]))
        else:
            heads = self.factors.shape[2]
            torch.add(self.factors[..., shift : shift + 1], own.view(heads, -1), out=out.unflatten(-1, (heads, -1)))
        return self._cut(out, shift)

    def back(self, grad: Tensor, shift: int, grad_factors: Tensor, grad_own: Tensor) -> None:
        """Adds what the gradient of the taps is for the factors, and writes that for the weight."""
        self._cut(grad, shift)
        flat = grad.view(-1, grad.shape[-1])
        if self.factors.ndim == 3:
            torch.mm(self.factors.flatten(0, 1).T, flat, out=grad_own)
            grad_factors.view(len(flat), grad_factors.shape[-1]).addmm_(flat, self.weight[shift].T)
        else:
            grad_factors[..., shift] = grad.unflatten(-1, (self.factors.shape[2], -1)).sum(-1)
            # A product with ones is a sum in one pass.
            torch.mv(flat.T, flat.new_ones(len(flat)), out=grad_own)

    def _cut(self, x: Tensor, shift: int) -> Tensor:
        if shift and self.borders is not None:
            row, token, _, seen = self.borders
            x[row, token] = torch.where(seen[:, -1 - shift], x[row, token], 0.0)
        return x
