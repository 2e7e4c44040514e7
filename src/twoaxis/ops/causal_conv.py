"""Causal depthwise convolution along positions, and the token before each token, across calls and within documents.

Letters: B batch, T position, C channels, k taps, d dilation, P tokens of history, S sources, R = P + T, n outputs at borders.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from twoaxis.core.errors import ConfigError
from twoaxis.ops.cpu import cpu_only
from twoaxis.ops.precision import Impl, outside_autocast, refuse_second_gradients, runs_plain, statistics_dtype


def previous_token(
    x: Float[Tensor, "B T C"], history: Float[Tensor, "B P C"] | None = None, documents: Int[Tensor, "B R"] | None = None
) -> Float[Tensor, "B T C"]:
    """Returns for each token the one before it in its own document, and zeros before the first.

    Args:
        x: the new tokens.
        history: the tokens before these, of which the last is used.
        documents: of the history and the new tokens; None when every row is one document.

    Example:
        >>> previous_token(torch.tensor([[[1.0], [2.0], [3.0]]])).flatten()
        tensor([0., 1., 2.])
    """
    if not x.shape[1]:
        # Without a last token to leave out, there would be one too many.
        return x
    if history is None or not history.shape[1]:
        before = F.pad(x[:, :-1], (0, 0, 1, 0))
    else:
        before = torch.cat((history[:, -1:], x[:, :-1]), dim=1)
    if documents is None:
        return before
    # The first token has none before it; with its own document there, zeros stay zeros.
    known = torch.cat((documents[:, :1], documents), dim=1)[:, -x.shape[1] - 1 :]
    return before * (known[:, 1:] == known[:, :-1]).unsqueeze(-1)


NO_DOCUMENT = -2
"""The document of positions before the first token; no token and no padding has it."""


def causal_conv(
    x: Float[Tensor, "B T C"],
    weight: Float[Tensor, "C k"],
    bias: Float[Tensor, " C"] | None = None,
    *,
    history: Float[Tensor, "B P C"] | None = None,
    documents: Int[Tensor, "B R"] | None = None,
    dilation: int = 1,
    impl: Impl = "fused",
) -> Float[Tensor, "B T C"]:
    """Convolves every channel with its own k taps, of which the last one is for the current token.

    Equation: y_t = b + sum_(s=0..k-1) w_(k-1-s) x_(t-ds), over tokens of the document of t, zeros before its start
    Shapes:   sums in the precision of statistics, rounded once
    Engines:  on a CPU kernels in C: float32, at most 64 taps in all. Everything else runs in torch's engine
    Cost:     flops 2*k*C per token; saves x and the weight

    Args:
        x: the new tokens.
        weight: the taps of each channel.
        bias: added to each channel.
        history: the tokens before these, at least the last d (k - 1) that exist; see `next_history`.
        documents: of the history and the new tokens; None when every row is one document.
        dilation: tokens from one tap to the next, d.
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
    taps = weight.unsqueeze(0)
    return causal_conv_sum((x,), taps, bias, histories=histories, documents=documents, dilation=dilation, impl=impl)


@outside_autocast
def causal_conv_sum(
    sources: Sequence[Float[Tensor, "B T C"]],
    weights: Float[Tensor, "S C k"],
    bias: Float[Tensor, " C"] | None = None,
    *,
    histories: Sequence[Float[Tensor, "B P C"]] | None = None,
    documents: Int[Tensor, "B R"] | None = None,
    dilation: int = 1,
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
        return _plain(rows, weights, bias, documents, tokens, dilation)
    return _CausalConv.apply(weights, bias, documents, tokens, dilation, *rows)


def next_history(history: Float[Tensor, "B P C"] | None, x: Float[Tensor, "B T C"], kernel: int) -> Float[Tensor, "B _ C"]:
    """Returns the history of the next call: the last `kernel - 1` tokens or all there are, copied."""
    rows = x if history is None else torch.cat((history, x), dim=1)
    return rows[:, max(0, rows.shape[1] - kernel + 1) :].clone()


def _plain(
    rows: Sequence[Tensor], weights: Tensor, bias: Tensor | None, documents: Tensor | None, tokens: int, dilation: int
) -> Tensor:
    dtype, kernel = statistics_dtype(rows[0]), weights.shape[-1]
    reach = dilation * (kernel - 1)
    padded = [F.pad(x.to(dtype), (0, 0, reach, 0)) for x in rows]
    known = None if documents is None else F.pad(documents, (reach, 0), value=NO_DOCUMENT)
    total = torch.zeros((), dtype=dtype, device=weights.device) if bias is None else bias.to(dtype)
    for shift in range(kernel):
        # Counted from the end, where all rows are aligned.
        stop = padded[0].shape[1] - dilation * shift
        tap = weights[..., kernel - 1 - shift].to(dtype)
        part = sum(w * x[:, stop - tokens : stop] for w, x in zip(tap, padded, strict=True))
        if known is not None:
            part = part * (known[:, stop - tokens : stop] == known[:, known.shape[1] - tokens :]).unsqueeze(-1)
        total = total + part
    return total.to(rows[0].dtype)


class Borders(NamedTuple):
    """The outputs at which a tap would cross the start of a document, and the taps that do not.

    Attributes:
        row: of each such output, n of them.
        token: its index among the new tokens.
        source: [n k] index of the token of each tap among all tokens, the oldest first.
        seen: [n k 1] whether that token is of the same document.
    """

    row: Tensor
    token: Tensor
    source: Tensor
    seen: Tensor

    @staticmethod
    def find(documents: Int[Tensor, "B R"], tokens: int, kernel: int, dilation: int) -> "Borders | None":
        """Finds them; None where no tap crosses a border."""
        cut = torch.zeros_like(documents, dtype=torch.bool)
        for shift in range(dilation, min(dilation * kernel, documents.shape[1]), dilation):
            cut[:, shift:] |= documents[:, shift:] != documents[:, :-shift]
        past = documents.shape[1] - tokens
        row, token = cut[:, past:].nonzero(as_tuple=True)
        if not len(row):
            return None
        source = (token + past).unsqueeze(-1) - dilation * torch.arange(kernel - 1, -1, -1, device=row.device)
        own = documents[row, token + past].unsqueeze(-1)
        seen = (source >= 0) & (documents[row.unsqueeze(-1), source.clamp(min=0)] == own)
        return Borders(row, token, source.clamp(min=0), seen.unsqueeze(-1))

    def gather(self, x: Float[Tensor, "B R C"]) -> Float[Tensor, "n k C"]:
        """The inputs of the taps, zeros outside the document."""
        return torch.where(self.seen, x[self.row.unsqueeze(-1), self.source], 0.0)


# Measured, a training step with the plain form: 1.02 of the time, 1.28 of the saved bytes in float32, 1.53 in bfloat16.
class _CausalConv(torch.autograd.Function):
    """Depthwise convolution with the channels last, which runs at memory bandwidth; outputs at borders are recomputed."""

    @staticmethod
    def forward(
        ctx: Any, weights: Tensor, bias: Tensor | None, documents: Tensor | None, tokens: int, dilation: int, *rows: Tensor
    ) -> Tensor:
        ctx.save_for_backward(weights, bias, documents, *rows)
        ctx.tokens, ctx.dilation, ctx.in_c = tokens, dilation, cpu_only.serves_conv(rows, weights, bias, documents)
        if ctx.in_c:
            return cpu_only.causal_conv(rows, weights, bias, documents, tokens, dilation)
        dtype, past = statistics_dtype(rows[0]), rows[0].shape[1] - tokens
        taps = weights.to(dtype)
        y, *others = (_slide(x.to(dtype), own, dilation) for x, own in zip(rows, taps, strict=True))
        for other in others:
            y += other
        y = y[:, past : past + tokens]
        borders = None if documents is None else Borders.find(documents, tokens, taps.shape[-1], dilation)
        if borders is not None:
            parts = (borders.gather(x.to(dtype)) * own.T for x, own in zip(rows, taps, strict=True))
            y[borders.row, borders.token] = sum(parts, torch.zeros((), dtype=dtype, device=y.device)).sum(1)
        if bias is not None:
            y += bias
        return y.to(rows[0].dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_gradients("causal_conv")
        weights, bias, documents, *rows = ctx.saved_tensors
        if ctx.in_c:
            given = grad_outputs[0], rows, weights, bias, documents, ctx.dilation, ctx.needs_input_grad[5:]
            grad_weights, grad_bias, grad_rows = cpu_only.causal_conv_backward(*given)
            return grad_weights, grad_bias, None, None, None, *grad_rows
        dtype, tokens, dilation, kernel = statistics_dtype(rows[0]), ctx.tokens, ctx.dilation, weights.shape[-1]
        grad, taps = grad_outputs[0].to(dtype), weights.to(dtype)
        grad_bias = None if bias is None else grad.sum((0, 1)).to(bias.dtype)
        borders = None if documents is None else Borders.find(documents, tokens, kernel, dilation)
        at_borders = None
        if borders is not None:
            at_borders = grad[borders.row, borders.token].unsqueeze(1)
            grad = grad.index_put((borders.row, borders.token), grad.new_zeros(()))
        grad_rows, grad_taps = [], []
        for x, own in zip(rows, taps, strict=True):
            wide = x.to(dtype)
            grad_x, grad_tap = _grad_input(grad, own, x.shape[1], dilation), _grad_taps(grad, wide, kernel, dilation)
            if borders is not None and at_borders is not None:
                back = torch.where(borders.seen, at_borders * own.T, 0.0)
                grad_x.index_put_((borders.row.unsqueeze(-1), borders.source), back, accumulate=True)
                grad_tap += (at_borders * borders.gather(wide)).sum(0).T
            grad_rows.append(grad_x.to(x.dtype))
            grad_taps.append(grad_tap)
        return torch.stack(grad_taps).to(weights.dtype), grad_bias, None, None, None, *grad_rows


@outside_autocast
def _slide(x: Float[Tensor, "B R C"], taps: Float[Tensor, "C k"], dilation: int) -> Float[Tensor, "B _ C"]:
    """Returns the R + d (k - 1) outputs of the full convolution; the first R end at each token in turn."""
    C, kernel = taps.shape
    if not x.shape[1]:
        # The engine takes no rows without tokens.
        return x.new_zeros(x.shape[0], dilation * (kernel - 1), C)
    if dilation > 1:
        # Ten times as fast as a dilated convolution: tokens d apart become neighbours in channels of their own.
        length = x.shape[1]
        folded = F.pad(x, (0, 0, 0, -length % dilation)).unflatten(1, (-1, dilation)).flatten(2)
        y = _slide(folded, taps.repeat(dilation, 1), 1).unflatten(2, (dilation, C)).flatten(1, 2)
        return y[:, : length + dilation * (kernel - 1)]
    y = F.conv2d(x.transpose(1, 2).unsqueeze(2), taps.view(C, 1, 1, kernel), groups=C, padding=(0, kernel - 1))
    if y.is_meta:
        # The meta device puts channels first, real kernels put them last.
        y = torch.empty_like(y, memory_format=torch.channels_last)
    return y.squeeze(2).transpose(1, 2)


def _grad_input(grad: Float[Tensor, "B T C"], taps: Float[Tensor, "C k"], length: int, dilation: int) -> Float[Tensor, "B R C"]:
    """The gradient of a token sums over its k outputs, from its own on."""
    kernel, tokens = taps.shape[1], grad.shape[1]
    reached = _slide(grad, taps.flip(1), dilation)[:, max(0, tokens + dilation * (kernel - 1) - length) :]
    return F.pad(reached, (0, 0, length - reached.shape[1], 0)) if reached.shape[1] < length else reached


def _grad_taps(grad: Float[Tensor, "B T C"], x: Float[Tensor, "B R C"], kernel: int, dilation: int) -> Float[Tensor, "C k"]:
    past = x.shape[1] - grad.shape[1]
    found = grad.new_zeros(kernel, grad.shape[2])
    # One buffer for all taps: allocating costs more than the product.
    product = torch.empty_like(grad, memory_format=torch.contiguous_format)
    flat, ones = product.view(-1, grad.shape[2]), grad.new_ones(grad.shape[0] * grad.shape[1])
    for shift in range(0, min(dilation * kernel, x.shape[1]), dilation):
        first = max(0, shift - past)
        product[:, :first] = 0
        torch.mul(grad[:, first:], x[:, past + first - shift : x.shape[1] - shift], out=product[:, first:])
        # A product with ones is a sum in one pass; `mv`, unlike `@`, keeps its precision under autocast.
        found[kernel - 1 - shift // dilation] = torch.mv(flat.T, ones)
    return found.T.contiguous()
