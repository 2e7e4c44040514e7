"""The depth read: a softmax-weighted sum of sources along depth, scored by one query.

Letters: B batch, T position, D width, H heads, S depth sources, R key width. Sources are a sequence of separate tensors: a
stack would copy the whole history at every read, and autograd would keep every copy.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from twoaxis.core.errors import ConfigError
from twoaxis.ops.gpu import depth_read_operator, norm_operator
from twoaxis.ops.mix import (
    by_head,
    head_sums,
    mixtures,
    products,
    query_gradients,
    raw_scores,
    source_gradients,
    spread,
)
from twoaxis.ops.norm import inverse_rms as rms_factor
from twoaxis.ops.precision import Impl, outside_autocast, runs_plain, statistics_dtype

Values = Literal["raw", "normalised"]
"""Whether a read mixes the sources themselves, or divided by their rms as in the scores."""


@outside_autocast
def depth_read(
    sources: Sequence[Float[Tensor, "B T D"]],
    inverse_rms: Sequence[Float[Tensor, "B T"]],
    query: Float[Tensor, "*each D"],
    impl: Impl = "fused",
    *,
    n_heads: int = 1,
    stream: Float[Tensor, "B T D"] | None = None,
    scale: Float[Tensor, "1"] | None = None,
    values: Values = "raw",
) -> Float[Tensor, "B T D"]:
    """Mixes the sources of each token with softmax weights over depth, per head, and may add the result to a stream.

    Equation: s_ih = r_i * sum_{c in head h} q_c v_ic,  a = softmax_i(s),  m = concat_h(sum_i a_ih v_i[head h]),
              h = m | stream + scale * m,  r_i = 1 / sqrt(mean(v_i^2) + eps);  values="normalised": r_i v_i instead of v_i
    Source:   Attention Residuals, arXiv:2603.15031, eq. 2-4 (one head); Multi-Head Attention Residuals, arXiv:2607.27230: the
              norm is over the whole width; q is the product of pseudo-query and key gain, the same for all tokens or one each;
              normalised values: transformers 5.24 models/inkling2, Inkling2BlockAttentionResidual
    Deviates: the inverse rms of a source is given, since it is the same at every read of that source. One with a gradient
              (`source_factor`) receives it; one without is a statistic, and the source receives what flows through it
    Engines:  on a GPU kernels, also under `torch.compile`: 16 or 32 bits, at most 63 sources and 8192 numbers per row, heads
              padded to powers of two; they use no atomics, so runs repeat to the bit. Everything else runs in torch's engine,
              and rows that are not contiguous or begin at no multiple of 16 bytes are copied
    Cost:     flops 4*D per source and token, H more for normalised values; saves the sources themselves and 1 + 2*H numbers
              per source and token

    Raises:
        ConfigError: no source, or sources of different shape, dtype or device.
    """
    return _read(sources, inverse_rms, query, impl, n_heads, stream, scale, values == "normalised", passes=False).mixed


class PassingRead(NamedTuple):
    """A depth read, and its sources for the readers after it.

    The sources are the ones that were read. Only when the next reader takes them from here do the gradients of both meet in one
    buffer on a GPU: the kernel adds its own to what arrives, where autograd would add one more array per source and read.
    """

    mixed: Float[Tensor, "B T D"]
    sources: tuple[Float[Tensor, "B T D"], ...]


@outside_autocast
def passing_read(
    sources: Sequence[Float[Tensor, "B T D"]],
    inverse_rms: Sequence[Float[Tensor, "B T"]],
    query: Float[Tensor, "*each D"],
    impl: Impl = "fused",
    *,
    n_heads: int = 1,
    stream: Float[Tensor, "B T D"] | None = None,
    scale: Float[Tensor, "1"] | None = None,
    values: Values = "raw",
) -> PassingRead:
    """Computes `depth_read`, and passes its sources on to the next reader.

    Raises:
        ConfigError: no source, or sources of different shape, dtype or device.
    """
    return _read(sources, inverse_rms, query, impl, n_heads, stream, scale, values == "normalised", passes=True)


def _read(
    sources: Sequence[Tensor],
    inverse_rms: Sequence[Tensor],
    query: Tensor,
    impl: Impl,
    n_heads: int,
    stream: Tensor | None,
    scale: Tensor | None,
    normalised: bool,
    passes: bool,
) -> PassingRead:
    """Computes the read with kernels where they serve it, else in torch, which leaves the sources as they are."""
    _check(sources, inverse_rms)
    given = sources, inverse_rms, query, n_heads, stream, scale, normalised
    chooses = len(sources) > 1 or normalised
    if impl == "fused" and chooses and depth_read_operator.serves(sources, n_heads):
        return PassingRead(*depth_read_operator.read(*given, passes=passes))
    return PassingRead(_in_torch(*given, impl), tuple(sources))


def _in_torch(
    sources: Sequence[Tensor],
    inverse_rms: Sequence[Tensor],
    query: Tensor,
    n_heads: int,
    stream: Tensor | None,
    scale: Tensor | None,
    normalised: bool,
    impl: Impl,
) -> Tensor:
    """Computes the read in its plain form or in torch's engine."""
    if runs_plain(impl):
        weights = depth_weights(sources, inverse_rms, query, n_heads)
        weights = weights.unsqueeze(-1) if n_heads == 1 else weights
        if normalised:
            factors = [with_gradient(r, v).unsqueeze(-1) for v, r in zip(sources, inverse_rms, strict=True)]
            weights = weights * torch.stack(factors)
        mixed = torch.zeros((), dtype=weights.dtype, device=weights.device)
        for w, v in zip(weights, sources, strict=True):
            mixed = mixed + spread(w) * by_head(v, n_heads)
        mixed = mixed.reshape(sources[0].shape)
        mixed = mixed if scale is None else scale * mixed
        return (mixed if stream is None else stream + mixed).to(sources[0].dtype)
    if len(sources) == 1 and not normalised:
        # One source has weight 1 with any query.
        mixed = sources[0]
        if scale is not None:
            return torch.addcmul(torch.zeros_like(mixed) if stream is None else stream, scale.to(mixed.dtype), mixed)
        return mixed if stream is None else stream + mixed
    return _DepthRead.apply(query, stream, scale, n_heads, normalised, *sources, *inverse_rms)


@outside_autocast
def depth_weights(
    sources: Sequence[Float[Tensor, "B T D"]],
    inverse_rms: Sequence[Float[Tensor, "B T"]],
    query: Float[Tensor, "*each D"],
    n_heads: int = 1,
) -> Float[Tensor, "S B T *H"]:
    """The softmax weights of a depth read, for telemetry and for the reference engine; an axis of heads if there are many."""
    weights = torch.softmax(depth_scores(sources, inverse_rms, query, n_heads), dim=0)
    return weights.squeeze(-1) if n_heads == 1 else weights


@outside_autocast
def depth_scores(
    keys: Sequence[Float[Tensor, "B T R"]],
    inverse_rms: Sequence[Float[Tensor, "B T"]],
    query: Float[Tensor, "*each R"],
    n_heads: int = 1,
) -> Float[Tensor, "S B T H"]:
    """The scores of a depth read, in plain form: the normalised keys times the query, per head."""
    query = query.to(statistics_dtype(keys[0]))
    factors = (with_gradient(r, k).unsqueeze(-1) for k, r in zip(keys, inverse_rms, strict=True))
    return torch.stack([head_sums(k * query, n_heads) * r for k, r in zip(keys, factors, strict=True)])


def with_gradient(inverse_rms: Float[Tensor, "B T"], v: Float[Tensor, "B T D"]) -> Float[Tensor, "B T"]:
    """Returns the inverse rms of v with its gradient, dr = -r^3/2 d mean(v^2), for any eps."""
    if inverse_rms.requires_grad or not torch.is_grad_enabled():
        return inverse_rms
    square = v.to(inverse_rms.dtype).square().mean(-1)
    return inverse_rms - inverse_rms.pow(3) / 2 * (square - square.detach())


@outside_autocast
def source_factor(v: Float[Tensor, "B T D"], eps: float, impl: Impl = "fused") -> Float[Tensor, "B T"]:
    """The inverse rms of a source with a gradient of its own, so that all its reads together pass through it once.

    Equation: r = 1 / sqrt(mean(v^2) + eps)
    Cost:     flops 2*D per token; saves v and r
    """
    return _factor(v, eps, impl, passes=False)[0]


@outside_autocast
def passing_factor(
    v: Float[Tensor, "B T D"], eps: float, impl: Impl = "fused"
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T D"]]:
    """Computes `source_factor`, and passes the source on to its readers, as `passing_read` does."""
    factor, *passed = _factor(v, eps, impl, passes=True)
    return factor, passed[0] if passed else v


def _factor(v: Tensor, eps: float, impl: Impl, passes: bool) -> tuple[Tensor, ...]:
    """The factor and, where a kernel passes it on, the source."""
    if impl == "fused" and depth_read_operator.serves([v], 1):
        return norm_operator.source_factor(v, eps, passes)
    if runs_plain(impl):
        return (torch.rsqrt(v.to(statistics_dtype(v)).square().mean(-1) + eps),)
    return (_SourceFactor.apply(v, eps),)


@outside_autocast
def softmax_mix(
    values: Sequence[Float[Tensor, "B T D"]], logits: Float[Tensor, "S B T H"], impl: Impl = "fused"
) -> Float[Tensor, "B T D"]:
    """Mixes values with a softmax over depth of given logits: a depth read with given scores.

    Equation: h = concat_h(sum_i softmax_i(logits_ih) v_i[head h])
    Cost:     flops 2*D per source and token; saves the values and H numbers per source and token

    Raises:
        ConfigError: no value, or logits for another number of them.
    """
    if not values or logits.shape[0] != len(values):
        raise ConfigError(f"softmax_mix: got {len(values)} values and logits for {logits.shape[0]}; give one per value")
    if runs_plain(impl):
        weights, n_heads = torch.softmax(logits, dim=0), logits.shape[-1]
        mixed = torch.zeros((), dtype=weights.dtype, device=weights.device)
        for w, v in zip(weights, values, strict=True):
            mixed = mixed + spread(w) * by_head(v, n_heads)
        return mixed.reshape(values[0].shape).to(values[0].dtype)
    return _SoftmaxMix.apply(logits, *values)


def _check(sources: Sequence[Tensor], inverse_rms: Sequence[Tensor]) -> None:
    if not sources or len(sources) != len(inverse_rms):
        raise ConfigError(
            f"depth_read: got {len(sources)} sources and {len(inverse_rms)} inverse rms; give one of each per source"
        )
    first = sources[0]
    for index, v in enumerate(sources):
        if v.shape != first.shape or v.dtype != first.dtype or v.device != first.device:
            raise ConfigError(
                f"depth_read: source {index} is {tuple(v.shape)} {v.dtype} on {v.device}: must be like source 0, "
                f"{tuple(first.shape)} {first.dtype} on {first.device}; pass sources of one shape, dtype and device"
            )


class _SourceFactor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, v: Tensor, eps: float) -> Tensor:
        factor = rms_factor(v, eps)
        ctx.save_for_backward(v, factor)
        return factor

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        v, factor = ctx.saved_tensors
        along = (grad_outputs[0] * factor.pow(3)).div_(-v.shape[-1])
        return (v * along.unsqueeze(-1)).to(v.dtype), None


class _DepthRead(torch.autograd.Function):
    """Saves the sources, the weights and the raw scores: linear in the number of sources."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, stream: Tensor | None, scale: Tensor | None, n_heads: int, normalised: bool, *tensors: Tensor
    ) -> Tensor:
        n = len(tensors) // 2
        sources, inverse_rms = tensors[:n], tensors[n:]
        scores = raw_scores(sources, query.to(statistics_dtype(sources[0])).unsqueeze(0), n_heads)
        factors = _factors(inverse_rms)
        weights = torch.softmax(scores * factors, dim=0)
        (mixed,) = mixtures(sources, weights * factors if normalised else weights)
        if stream is not None:
            mixed = mixed.add_(stream) if scale is None else mixed.mul_(scale).add_(stream)
        elif scale is not None:
            mixed.mul_(scale)
        ctx.scaled, ctx.normalised = scale is not None, normalised
        ctx.save_for_backward(query, scores, weights, *tensors, *(() if scale is None else (scale,)))
        return mixed.to(sources[0].dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        query, scores, weights, *tensors = ctx.saved_tensors
        scale = tensors.pop() if ctx.scaled else None
        n = len(tensors) // 2
        sources, inverse_rms = tensors[:n], tensors[n:]
        grad = grad_outputs[0].to(weights.dtype)
        queries, factors = query.to(weights.dtype).unsqueeze(0), _factors(inverse_rms)
        by_weight = products(sources, [grad], weights.shape[-1])
        # A factor scales its source in the mixture too where values are normalised.
        by_value = (weights * by_weight).sum((1, -1)) if ctx.normalised else None
        if ctx.normalised:
            by_weight = by_weight.mul_(factors)
        # The mean of the weights' gradients is grad^T m, which needs no m.
        mean = (weights * by_weight).sum(0)
        grad_scale = None if scale is None else mean.sum().reshape(scale.shape).to(scale.dtype)
        by_logit = by_weight.sub_(mean).mul_(weights)
        weights = weights * factors if ctx.normalised else weights
        if scale is not None:
            weights, by_logit = weights * scale, by_logit.mul_(scale)
        by_factor = (by_logit * scores).sum((1, -1))
        if by_value is not None:
            by_factor = by_factor + (by_value if scale is None else by_value * scale)
        by_score = by_logit.mul_(factors)
        own = any(ctx.needs_input_grad[5 + n :])
        # The gradient through inverse rms that have none of their own.
        along = None if own else by_factor * torch.stack(list(inverse_rms)).pow(3) / -sources[0].shape[-1]
        grad_sources = source_gradients(sources, [grad], weights, queries, by_score, along)
        grad_query = query_gradients(sources, by_score, query.ndim > 1).squeeze(0).to(query.dtype)
        grad_stream = grad_outputs[0] if ctx.needs_input_grad[1] else None
        return grad_query, grad_stream, grad_scale, None, None, *grad_sources, *(by_factor if own else (None,) * n)


class _SoftmaxMix(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, *values: Tensor) -> Tensor:
        weights = torch.softmax(logits, dim=0)
        ctx.save_for_backward(weights, *values)
        return mixtures(values, weights.unsqueeze(1))[0].to(values[0].dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, ...]:
        weights, *values = ctx.saved_tensors
        grad = grad_outputs[0].to(weights.dtype)
        by_weight = products(values, [grad], weights.shape[-1]).squeeze(1)
        mean = (weights * by_weight).sum(0)
        return by_weight.sub_(mean).mul_(weights), *source_gradients(values, [grad], weights.unsqueeze(1))


def _factors(inverse_rms: Sequence[Tensor]) -> Tensor:
    """[S 1 B T 1]."""
    return torch.stack(list(inverse_rms)).unsqueeze(1).unsqueeze(-1)
