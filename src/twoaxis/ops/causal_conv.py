"""Causal depthwise convolution along positions: each channel sums its own last k tokens with weights of its own.

Letters: B batch, T position, C channels, k taps, P tokens of history, S sources, R = P + T.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from twoaxis.core.errors import ConfigError
from twoaxis.ops.precision import Impl, outside_autocast, runs_plain, statistics_dtype
from twoaxis.ops.streams import NUMBERS_IN_CACHE

NO_DOCUMENT = -2
"""The document of tokens before the first one; no token and no padding has it."""


def causal_conv(
    x: Float[Tensor, "B T C"],
    weight: Float[Tensor, "C k"],
    bias: Float[Tensor, " C"] | None = None,
    *,
    history: Float[Tensor, "B P C"] | None = None,
    documents: Int[Tensor, "B R"] | None = None,
    impl: Impl = "fused",
) -> Float[Tensor, "B T C"]:
    """Convolves every channel with its own k taps, of which the last one is for the current token.

    Equation: y_t = b + sum_(s=0..k-1) w_(k-1-s) x_(t-s), over tokens of the document of t, zeros before its start
    Shapes:   sums in the precision of statistics, rounded once
    Cost:     flops 2*k*C per token; saves x and the weight

    Args:
        x: the new tokens.
        weight: the taps of each channel.
        bias: added to each channel.
        history: the tokens before these, at least the last k - 1 that exist; see `next_history`.
        documents: of the history and the new tokens; None when every row is one document.
        impl: `fused` or `reference`.

    Raises:
        ConfigError: as `causal_conv_sum`.

    Example:
        >>> causal_conv(torch.tensor([[[1.0], [2.0], [3.0]]]), torch.tensor([[10.0, 1.0]]))
        tensor([[[ 1.],
                 [12.],
                 [23.]]])
    """
    histories = None if history is None else (history,)
    return causal_conv_sum((x,), weight.unsqueeze(0), bias, histories=histories, documents=documents, impl=impl)


@outside_autocast
def causal_conv_sum(
    sources: Sequence[Float[Tensor, "B T C"]],
    weights: Float[Tensor, "S C k"],
    bias: Float[Tensor, " C"] | None = None,
    *,
    histories: Sequence[Float[Tensor, "B P C"]] | None = None,
    documents: Int[Tensor, "B R"] | None = None,
    impl: Impl = "fused",
) -> Float[Tensor, "B T C"]:
    """The sum over sources of the convolution of each with weights of its own; arguments as of `causal_conv`.

    Raises:
        ConfigError: weights or histories for another number of sources, or documents for other tokens.
    """
    if not sources or weights.shape[0] != len(sources) or (histories and len(histories) != len(sources)):
        got = f"{len(sources)} sources, weights for {weights.shape[0]} and {len(histories or ())} histories"
        raise ConfigError(f"causal_conv: got {got}; give one weight per source, and one history each or none")
    rows = [torch.cat(pair, dim=1) for pair in zip(histories, sources, strict=True)] if histories else list(sources)
    if documents is not None and documents.shape[1] != rows[0].shape[1]:
        got = f"documents of {documents.shape[1]} tokens for {rows[0].shape[1]}"
        raise ConfigError(f"causal_conv: got {got}; give those of the history and of the new tokens")
    tokens = sources[0].shape[1]
    if runs_plain(impl):
        return _plain(rows, weights, bias, documents, tokens)
    return _CausalConv.apply(weights, bias, documents, tokens, *rows)


def next_history(history: Float[Tensor, "B P C"] | None, x: Float[Tensor, "B T C"], kernel: int) -> Float[Tensor, "B _ C"]:
    """The last `kernel - 1` tokens, or all there are, in storage of their own: what the next call starts from."""
    rows = x if history is None else torch.cat((history, x), dim=1)
    return rows[:, max(0, rows.shape[1] - kernel + 1) :].clone()


def _plain(rows: Sequence[Tensor], weights: Tensor, bias: Tensor | None, documents: Tensor | None, tokens: int) -> Tensor:
    dtype, kernel = statistics_dtype(rows[0]), weights.shape[-1]
    padded = [F.pad(x.to(dtype), (0, 0, kernel - 1, 0)) for x in rows]
    known = None if documents is None else F.pad(documents, (kernel - 1, 0), value=NO_DOCUMENT)
    total = torch.zeros((), dtype=dtype, device=weights.device) if bias is None else bias.to(dtype)
    for shift in range(kernel):
        # Counted from the end, where all rows stand together.
        stop = padded[0].shape[1] - shift
        tap = weights[..., kernel - 1 - shift].to(dtype)
        part = sum(w * x[:, stop - tokens : stop] for w, x in zip(tap, padded, strict=True))
        if known is not None:
            part = part * (known[:, stop - tokens : stop] == known[:, -tokens:]).unsqueeze(-1)
        total = total + part
    return total.to(rows[0].dtype)


def _pieces(batch: int, tokens: int, channels: int, device: torch.device) -> Iterator[tuple[slice, int, int]]:
    """Yields (rows, first token, token after the last) of pieces that a processor keeps at hand; the whole on a GPU."""
    if device.type != "cpu":
        yield slice(0, batch), 0, tokens
        return
    at_once = max(1, torch.get_num_threads() * NUMBERS_IN_CACHE // channels)
    rows, step = max(1, at_once // tokens), min(tokens, at_once)
    for row in range(0, batch, rows):
        for start in range(0, tokens, step):
            yield slice(row, row + rows), start, min(start + step, tokens)


class _Taps:
    """Walks over the pieces of a convolution and the taps that each piece has."""

    def __init__(self, weights: Tensor, documents: Tensor | None, tokens: int, row: Tensor) -> None:
        self.dtype = statistics_dtype(row)
        self.batch, length, self.channels = row.shape
        self.tokens, self.past = tokens, length - tokens
        self.documents = documents
        # The current token first.
        self.weights = weights.permute(2, 0, 1).flip(0).to(self.dtype).contiguous()

    def __iter__(self) -> Iterator[tuple[int, tuple[slice, slice], tuple[slice, slice], Tensor | None]]:
        """Yields every tap of every piece.

        Returns:
            How many tokens back the tap reaches, the outputs that have such a token, where these tokens are among the rows,
            and where both are of one document (None: everywhere).
        """
        for rows, start, stop in _pieces(self.batch, self.tokens, self.channels, self.weights.device):
            for shift in range(len(self.weights)):
                first = max(start, shift - self.past)
                if first >= stop:
                    break
                now, then = (
                    slice(self.past + first, self.past + stop),
                    slice(self.past + first - shift, self.past + stop - shift),
                )
                same = None
                if self.documents is not None and shift:
                    same = (self.documents[rows, now] == self.documents[rows, then]).to(self.dtype).unsqueeze(-1)
                yield shift, (rows, slice(first, stop)), (rows, then), same


class _CausalConv(torch.autograd.Function):
    """One buffer for the result; every tap is one pass over shifted rows, never a copy of them."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, bias: Tensor | None, documents: Tensor | None, tokens: int, *rows: Tensor) -> Tensor:
        ctx.save_for_backward(weights, bias, documents, *rows)
        ctx.tokens = tokens
        taps = _Taps(weights, documents, tokens, rows[0])
        y = torch.empty(taps.batch, tokens, taps.channels, dtype=taps.dtype, device=weights.device)
        for shift, outputs, inputs, same in taps:
            # Where documents cut a tap, all sources are summed first and cut once.
            total = y[outputs] if same is None else torch.empty_like(y[outputs])
            for j, (weight, x) in enumerate(zip(taps.weights[shift], rows, strict=True)):
                if j == 0 and (shift == 0 or same is not None):
                    torch.mul(x[inputs], weight, out=total)
                else:
                    total.addcmul_(x[inputs], weight)
            if same is not None:
                y[outputs].addcmul_(total, same)
        if bias is not None:
            y += bias
        return y.to(rows[0].dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        weights, bias, documents, *rows = ctx.saved_tensors
        taps = _Taps(weights, documents, ctx.tokens, rows[0])
        grad = grad_outputs[0].to(taps.dtype).contiguous()
        grad_weights = torch.zeros_like(taps.weights)
        # Without a history the first tap of a piece reaches all of its tokens, so nothing has to be zero before.
        make = torch.zeros_like if taps.past else torch.empty_like
        grad_rows = [make(x, dtype=taps.dtype) for x in rows]
        for shift, outputs, inputs, same in taps:
            g = grad[outputs] if same is None else grad[outputs] * same
            buffer = torch.empty_like(g)
            for weight, x, grad_x, grad_w in zip(taps.weights[shift], rows, grad_rows, grad_weights[shift], strict=True):
                if shift or taps.past:
                    grad_x[inputs].addcmul_(g, weight)
                else:
                    torch.mul(g, weight, out=grad_x[inputs])
                grad_w += torch.mul(g, x[inputs], out=buffer).flatten(0, 1).sum(0)
        return (
            grad_weights.flip(0).permute(1, 2, 0).to(weights.dtype),
            None if bias is None else grad.sum((0, 1)).to(bias.dtype),
            None,
            None,
            *(grad_x.to(x.dtype) for grad_x, x in zip(grad_rows, rows, strict=True)),
        )
