"""The C kernels of operators that have none on a GPU.

Letters: B batch, T position, C channels, ways or columns, k taps, S sources, N rows (tokens), D width, H heads, G kv-heads,
K key width, F hidden width, n streams of m fractions, P = n m pieces of E numbers.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from twoaxis.ops import kernels
from twoaxis.ops.cpu import library

MOST_NUMBERS = 2**24
"""Of the scratch that sums over rows take."""

ACTIVATIONS = ("relu", "gelu", "silu", "identity")


def serves_conv(rows: Sequence[Tensor], weights: Tensor, bias: Tensor | None, documents: Tensor | None = None) -> bool:
    """Whether the kernels convolve these rows: at most `MOST_TENSORS` taps in all, and nothing is broadcast."""
    x, S = rows[0], len(rows)
    fits = (
        x.ndim == 3 == weights.ndim and weights.shape[:2] == (S, x.shape[-1]) and S * weights.shape[-1] <= library.MOST_TENSORS
    )
    fits = fits and all(one.shape == x.shape for one in rows) and (bias is None or bias.shape == x.shape[-1:])
    fits = fits and (documents is None or (documents.shape == x.shape[:2] and documents.device.type == "cpu"))
    return fits and library.served(*rows, weights, bias)


def _conv_sizes(rows: Sequence[Tensor], weights: Tensor, tokens: int, dilation: int) -> tuple[int, ...]:
    B, R, C = rows[0].shape
    return len(rows), B, tokens, R, C, weights.shape[-1], dilation


def causal_conv(
    rows: Sequence[Tensor], weights: Tensor, bias: Tensor | None, documents: Tensor | None, tokens: int, dilation: int
) -> Tensor:
    """Computes `causal_conv_sum` of sources with their histories."""
    B, _, C = rows[0].shape
    result = rows[0].new_empty(B, tokens, C)
    taps, sizes = weights.transpose(1, 2).contiguous(), _conv_sizes(rows, weights, tokens, dilation)
    rows, known = library.rows(rows), _whole(documents)
    library.call("causal_conv", rows, taps, None if bias is None else kernels.ready(bias), known, result, *sizes)
    return result


def causal_conv_backward(
    grad: Tensor,
    rows: Sequence[Tensor],
    weights: Tensor,
    bias: Tensor | None,
    documents: Tensor | None,
    dilation: int,
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor | None, list[Tensor | None]]:
    """The gradients of the weights, the bias, and of the rows that want one."""
    S, C, k = weights.shape
    results = [kernels.empty(x) if want else None for x, want in zip(rows, wanted, strict=True)]
    taps, grad_taps = weights.transpose(1, 2).contiguous(), weights.new_empty(S, k, C)
    grad_bias = None if bias is None else kernels.empty(bias)
    scratch = library.scratch(S * k * C), library.scratch(C)
    sizes = _conv_sizes(rows, weights, grad.shape[1], dilation)
    given = kernels.ready(grad), library.rows(rows), taps, _whole(documents)
    library.call("causal_conv_backward", *given, results, grad_taps, grad_bias, *scratch, *sizes)
    return grad_taps.transpose(1, 2).contiguous(), grad_bias, results


def _whole(documents: Tensor | None) -> Tensor | None:
    return None if documents is None else documents.to(torch.int64).contiguous()


def serves_grn(sources: Sequence[Tensor], bias: Tensor, weights: Tensor) -> bool:
    """Whether the kernels compute the sums of these sources: nothing is broadcast, and sums over rows fit 64 MiB."""
    (C, R, D), S = weights.shape, len(sources)
    fits = bias.shape == (C, S, D) and all(v.shape == (*sources[0].shape[:-1], D) for v in sources)
    return fits and library.PARTS * C * (S + R) * D <= MOST_NUMBERS and library.served(*sources, bias, weights)


def grn(
    sources: Sequence[Tensor], bias: Tensor, weights: Tensor, activation: str, eps: float | None
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Computes `grn`: the sums, the scores before their activation [S C N], and the inverse rms [S N], or without eps none."""
    v, S, (C, R, D) = sources[0], len(sources), weights.shape
    N = library.n_rows(v)
    results, z = [kernels.empty(v) for _ in range(C)], v.new_empty(S, C, N)
    inverse = v.new_empty(0 if eps is None else S, N)
    given = library.rows(sources), kernels.ready(bias), kernels.ready(weights)
    factors = None if eps is None else inverse
    library.call("grn", *given, results, z, factors, float(eps or 0), ACTIVATIONS.index(activation), S, C, R, N, D)
    return results, z, inverse


def grn_backward(
    grads: Sequence[Tensor],
    sources: Sequence[Tensor],
    bias: Tensor,
    weights: Tensor,
    z: Tensor,
    inverse: Tensor,
    activation: str,
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """The gradients of bias and weights, and of the sources that want one."""
    S, (C, R, D) = len(sources), weights.shape
    results = [kernels.empty(x) if want else None for x, want in zip(sources, wanted, strict=True)]
    grad_bias, grad_weights = kernels.empty(bias), kernels.empty(weights)
    given = library.rows(grads), library.rows(sources), kernels.ready(bias), kernels.ready(weights)
    scratch = library.scratch(C * S * D), library.scratch(C * R * D)
    sizes = ACTIVATIONS.index(activation), S, C, R, z.shape[-1], D
    factors = inverse if len(inverse) else None
    library.call("grn_backward", *given, z, factors, results, grad_bias, grad_weights, *scratch, *sizes)
    return grad_bias, grad_weights, results


def serves_attention(q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> bool:
    """Whether the kernels attend to these keys and values: nothing is broadcast."""
    k = keys[0]
    fits = len(keys) <= library.MOST_TENSORS and q.ndim == k.ndim == 4 and q.numel() > 0 and q.shape[2] % k.shape[2] == 0
    fits = fits and k.shape == (*q.shape[:2], k.shape[2], q.shape[3]) and all(x.shape == k.shape for x in (*keys, *values))
    return fits and library.served(q, *keys, *values)


def _attention_sizes(q: Tensor, keys: Sequence[Tensor]) -> tuple[int, ...]:
    (B, T, H, K), G = q.shape, keys[0].shape[2]
    return len(keys), B * T, H, G, K


def depth_attention(q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Computes `depth_summary`: the mixture, the scores [S B T H], and the log totals [B T H]."""
    mixed, scores = kernels.empty(q), q.new_empty(len(keys), *q.shape[:-1])
    log_totals = q.new_empty(q.shape[:-1])
    given = kernels.ready(q), library.rows(keys), library.rows(values)
    library.call("depth_attention", *given, mixed, scores, log_totals, *_attention_sizes(q, keys))
    return mixed, scores, log_totals


def depth_attention_backward(
    grad: Tensor,
    by_total: Tensor | None,
    q: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    scores: Tensor,
    log_totals: Tensor,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """The gradients of the query, the keys and the values."""
    grad_q, grad_keys, grad_values = kernels.empty(q), [kernels.empty(x) for x in keys], [kernels.empty(x) for x in values]
    given = kernels.ready(q), library.rows(keys), library.rows(values)
    arrived = kernels.ready(grad), None if by_total is None else kernels.ready(by_total)
    found = grad_q, grad_keys, grad_values
    library.call("depth_attention_backward", *arrived, *given, scores, log_totals, *found, *_attention_sizes(q, keys))
    return found


def serves_hyper_read(streams: Sequence[Tensor], parameters: Sequence[Tensor], m: int) -> bool:
    """Whether the kernels read these streams with these static weights, scale, maps and offset: nothing is broadcast."""
    static, scale, maps, offset = parameters
    (P, C), E, x = static.shape, maps.shape[1], streams[0]
    fits = max(P, C) <= library.MOST_TENSORS and len(streams) * m == P and m <= C and x.shape[-1] == m * E
    fits = fits and len(maps) == C and scale.shape == offset.shape == (C,) and all(one.shape == x.shape for one in streams)
    return fits and library.PARTS * C * (P + E) <= MOST_NUMBERS and library.served(*streams, *parameters)


def hyper_read(
    streams: Sequence[Tensor], parameters: Sequence[Tensor], m: int, eps: float, smallest: float, centred: bool, bounded: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes `hyper_read` from static weights, scale, maps and offset.

    Returns:
        The view, all weights and scores [P C N], and the inverse deviations and, if centred, means [1 or 2, P, N].
    """
    sizes = _, _, C, N, _ = _hyper_read_sizes(streams, parameters, m)
    view, P = kernels.empty(streams[0]), len(streams) * m
    weights, scores = (view.new_empty(P, C, N) for _ in range(2))
    statistics = view.new_empty(1 + centred, P, N)
    made = view, weights, scores, statistics[0], statistics[1] if centred else None
    given = library.rows(streams), *library.rows(parameters)
    library.call("hyper_read", *given, *made, float(eps), float(smallest), centred, bounded, *sizes)
    return view, weights, scores, statistics


def hyper_read_backward(
    grads: tuple[Tensor, Tensor, Sequence[Tensor]],
    streams: Sequence[Tensor],
    parameters: Sequence[Tensor],
    scores: Tensor,
    statistics: Tensor,
    m: int,
    bounded: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    """The gradients of parameters and streams, from those of the view, of the other columns, and of later users of streams."""
    view, rest, passed = grads
    static, _, maps, _ = parameters
    sizes, (P, C) = _hyper_read_sizes(streams, parameters, m), static.shape
    results, grad_small, grad_maps = [kernels.empty(x) for x in streams], static.new_empty(P + 2, C), kernels.empty(maps)
    given = kernels.ready(view), kernels.ready(rest), library.rows(passed), library.rows(streams), *library.rows(parameters)
    saved = scores, statistics[0], statistics[1] if len(statistics) > 1 else None
    scratch = library.scratch(grad_small.numel()), library.scratch(maps.numel()), library.scratch(P * maps.shape[-1])
    library.call("hyper_read_backward", *given, *saved, results, grad_small, grad_maps, *scratch, bounded, *sizes)
    return grad_small[:P], grad_small[P], grad_maps, grad_small[P + 1], results


def _hyper_read_sizes(streams: Sequence[Tensor], parameters: Sequence[Tensor], m: int) -> tuple[int, int, int, int, int]:
    C, E = parameters[2].shape
    return len(streams), m, C, streams[0].numel() // max(1, m * E), E


def silu_gate(x: Tensor) -> Tensor:
    """Computes `silu_gate`."""
    result = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
    library.call("silu_gate", kernels.ready(x), result, library.n_rows(result), result.shape[-1])
    return result


def silu_gate_backward(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of gate and value."""
    result = kernels.empty(x)
    library.call("silu_gate_backward", kernels.ready(grad), kernels.ready(x), result, library.n_rows(grad), grad.shape[-1])
    return result


def serves_rotation(x: Tensor, cosines: Tensor, sines: Tensor) -> bool:
    """Whether the kernels rotate these heads by fixed angles."""
    if x.ndim != 4:
        return False
    (B, T, _, K), turns = x.shape, cosines.shape
    fits = K % 2 == 0 and turns in ((1, T, 1, K), (B, T, 1, K)) and sines.shape == turns
    fixed = not (cosines.requires_grad or sines.requires_grad) and cosines.is_contiguous() and sines.is_contiguous()
    return fits and fixed and library.served(x, cosines, sines)


def rotate(x: Tensor, cosines: Tensor, sines: Tensor, backward: bool) -> Tensor:
    """Computes `rotate`, or the gradient of what is rotated."""
    x = kernels.materialised(x)
    (B, T, H, K), result = x.shape, kernels.empty(x)
    # Heads that are cut from a joint product need no copy.
    by_sequence, by_row, by_head, by_channel = x.stride()
    stride = by_row if T > 1 else by_sequence
    if by_channel != 1 or (H > 1 and by_head != K) or (B > 1 and by_sequence != T * stride):
        x, stride = x.contiguous(), H * K
    library.call("rotate", x, cosines, sines, result, backward, B * T, H, K, stride, max(1, library.n_rows(cosines)))
    return result


def rms_norm(x: Tensor, gain: Tensor | None, eps: float, scale: float) -> tuple[Tensor, Tensor]:
    """Computes `rms_norm`: the result, and the factor of each row."""
    result, factors = kernels.empty(x), x.new_empty(*x.shape[:-1], 1)
    given = kernels.ready(x), None if gain is None else kernels.ready(gain)
    library.call("rms_norm", *given, result, factors, float(eps), float(scale), library.n_rows(x), x.shape[-1])
    return result, factors


def rms_norm_backward(
    grad: Tensor, x: Tensor, gain: Tensor | None, factors: Tensor, scale: float
) -> tuple[Tensor, Tensor | None]:
    """The gradients of the input and of the gain."""
    result, grad_gain = kernels.empty(x), None if gain is None else kernels.empty(gain)
    given = kernels.ready(grad), kernels.ready(x), None if gain is None else kernels.ready(gain), factors
    scratch, sizes = library.scratch(2 * x.shape[-1]), (library.n_rows(x), x.shape[-1])
    library.call("rms_norm_backward", *given, result, grad_gain, scratch, float(scale), *sizes)
    return result, grad_gain
