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
from twoaxis.ops.cpu import library
from twoaxis.ops.gpu import depth_read_operator, norm_operator
from twoaxis.ops.mix import by_head, head_sums, spread, sum_of_products
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
              padded to powers of two; on a CPU kernels in C, in compiled graphs only with gradients: float32, at most 63
              sources. They use no atomics, so runs repeat to the bit. Everything else runs in plain PyTorch, and rows that
              are not contiguous or begin at no multiple of 16 bytes are copied
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
    if impl == "fused" and factors_are_alike(sources, inverse_rms) and (len(sources) > 1 or normalised):
        on_cpu = depth_read_operator.serves_on_cpu(sources, inverse_rms, query, n_heads, stream, scale)
        if on_cpu or depth_read_operator.serves(sources, n_heads):
            return PassingRead(*depth_read_operator.read(*given, passes=passes))
    return PassingRead(_in_torch(*given), tuple(sources))


def factors_are_alike(sources: Sequence[Tensor], inverse_rms: Sequence[Tensor]) -> bool:
    """Whether all inverse rms have gradients of their own, or none; in kernels they are alike."""
    through = [v.requires_grad and not r.requires_grad for v, r in zip(sources, inverse_rms, strict=True)]
    return not (any(through) and any(r.requires_grad for r in inverse_rms))


def _in_torch(
    sources: Sequence[Tensor],
    inverse_rms: Sequence[Tensor],
    query: Tensor,
    n_heads: int,
    stream: Tensor | None,
    scale: Tensor | None,
    normalised: bool,
) -> Tensor:
    """Computes the read in plain PyTorch."""
    if len(sources) == 1 and not normalised:
        # One source has weight 1 with any query.
        mixed = sources[0]
    else:
        weights = torch.softmax(depth_scores(sources, inverse_rms, query, n_heads), dim=0)
        if normalised:
            factors = [with_gradient(r, v) for v, r in zip(sources, inverse_rms, strict=True)]
            weights = weights * torch.stack(factors).unsqueeze(-1)
        mixed = weighted_sum(sources, weights)
    mixed = mixed if scale is None else scale.to(statistics_dtype(mixed)) * mixed
    return (mixed if stream is None else stream + mixed).to(sources[0].dtype)


@outside_autocast
def depth_weights(
    sources: Sequence[Float[Tensor, "B T D"]],
    inverse_rms: Sequence[Float[Tensor, "B T"]],
    query: Float[Tensor, "*each D"],
    n_heads: int = 1,
) -> Float[Tensor, "S B T *H"]:
    """The softmax weights of a depth read, for telemetry; an axis of heads if there are many."""
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
    """Returns the inverse rms of v with all its derivatives, for any eps.

    Equation: r(v + dv) = r (1 + r^2 d mean(v^2))^(-1/2)
    """
    if inverse_rms.requires_grad or not torch.is_grad_enabled():
        return inverse_rms
    # A derivative in forward mode would count twice.
    r, square = inverse_rms.detach(), v.to(inverse_rms.dtype).square().mean(-1)
    return r * torch.rsqrt(1 + r.square() * (square - square.detach()))


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
    if impl == "fused" and (library.operator_served(v) or depth_read_operator.serves([v], 1)):
        return norm_operator.source_factor(v, eps, passes)
    if runs_plain(impl):
        return (torch.rsqrt(v.to(statistics_dtype(v)).square().mean(-1) + eps),)
    return (_SourceFactor.apply(v, eps),)


@outside_autocast
def softmax_mix(values: Sequence[Float[Tensor, "B T D"]], logits: Float[Tensor, "S B T H"]) -> Float[Tensor, "B T D"]:
    """Mixes values with a softmax over depth of given logits: a depth read with given scores.

    Equation: h = concat_h(sum_i softmax_i(logits_ih) v_i[head h])
    Cost:     flops 2*D per source and token; saves the values and H numbers per source and token

    Raises:
        ConfigError: no value, or logits for another number of them.
    """
    if not values or logits.shape[0] != len(values):
        raise ConfigError(f"softmax_mix: got {len(values)} values and logits for {logits.shape[0]}; give one per value")
    return weighted_sum(values, torch.softmax(logits, dim=0)).to(values[0].dtype)


def weighted_sum(values: Sequence[Float[Tensor, "B T D"]], weights: Float[Tensor, "S B T H"]) -> Float[Tensor, "B T D"]:
    """Sums the values times their weights, per head, in the precision of the weights."""
    n_heads = weights.shape[-1]
    total = sum_of_products(map(spread, weights.unbind()), (by_head(v, n_heads) for v in values))
    return total.reshape(values[0].shape)


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


# Measured, a training step with the plain form: 1.07 of the time, 1.00 of the saved bytes in float32, 1.19 in bfloat16.
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
