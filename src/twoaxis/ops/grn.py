"""Generalised residual: sums of sources along depth, weighted per feature and per token, for several readers in one sweep.

Letters: B batch, T position, D width, S sources, C ways (results), N = B T tokens. Sources are a sequence of separate
tensors. Weights per token and feature are never materialised: they would be C times as large as the sources.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from twoaxis.core.errors import ConfigError
from twoaxis.ops.cpu import cpu_only
from twoaxis.ops.norm import inverse_rms
from twoaxis.ops.precision import Impl, outside_autocast, refuse_second_gradients, runs_plain, statistics_dtype

Activation = Literal["relu", "gelu", "silu", "identity"]

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "identity": lambda z: z,
}
"""All of them map 0 to 0."""


@outside_autocast
def grn(
    sources: Sequence[Float[Tensor, "B T D"]],
    bias: Float[Tensor, "C S D"],
    score_weight: Float[Tensor, "C R D"],
    activation: Activation,
    score_gain: Float[Tensor, " D"] | None = None,
    eps: float = 0.0,
    impl: Impl = "fused",
) -> tuple[Float[Tensor, "B T D"], ...]:
    """Returns one sum of the sources for each way, with weights b per feature and s per token.

    Equation: y_c = sum_j (b_cj + s_cj) * v_j,  s_cj = sigma(w_cj^T v_j);  with a gain: s_cj = sigma(w_cj^T RMSNorm(v_j))
    Source:   DeepCrossAttention, arXiv:2502.06785v2, GRN-v3
    Shapes:   R = S, or R = 1 for one w for all sources; each y_c in the dtype of the sources, rounded once
    Engines:  on a CPU kernels in C, in float32. Everything else runs in torch's engine
    Cost:     matrix product flops 2*D and 4*D more per source, way and token; saves the sources and C numbers per source and
              token, one more with a gain

    Raises:
        ConfigError: no source, or weights for another number of sources.

    Example:
        >>> v = torch.ones(1, 1, 2), torch.full((1, 1, 2), 10.0)
        >>> grn(v, torch.ones(1, 2, 2), torch.tensor([[[0.5, 0.0]]]), "relu")
        (tensor([[[61.5000, 61.5000]]]),)
    """
    S = len(sources)
    if not sources or bias.shape[1] != S or score_weight.shape[1] not in (1, S):
        counts = f"{S} sources, biases for {bias.shape[1]} and score weights for {score_weight.shape[1]}"
        raise ConfigError(f"grn: got {counts}; give one bias per source, and one score weight per source or in all")
    if runs_plain(impl):
        return _plain(sources, bias, score_weight, activation, score_gain, eps)
    return _GRN.apply(bias, score_weight, score_gain, activation, eps, *sources)


def _plain(
    sources: Sequence[Tensor],
    bias: Tensor,
    score_weight: Tensor,
    activation: Activation,
    score_gain: Tensor | None,
    eps: float,
) -> tuple[Tensor, ...]:
    scores = grn_scores(sources, score_weight, activation, score_gain, eps)
    dtype = scores.dtype
    totals = [torch.zeros((), dtype=dtype, device=bias.device)] * bias.shape[0]
    for j, v in enumerate(sources):
        wide = v.to(dtype)
        totals = [total + (bias[c, j].to(dtype) + scores[c, j].unsqueeze(-1)) * wide for c, total in enumerate(totals)]
    return tuple(total.to(sources[0].dtype) for total in totals)


@outside_autocast
def grn_scores(
    sources: Sequence[Float[Tensor, "B T D"]],
    score_weight: Float[Tensor, "C R D"],
    activation: Activation,
    score_gain: Float[Tensor, " D"] | None = None,
    eps: float = 0.0,
) -> Float[Tensor, "C S B T"]:
    """The scores s of `grn` for each way and source, for audits and for the reference engine."""
    dtype = statistics_dtype(sources[0])
    weight = _effective(score_weight, score_gain, dtype)
    found = []
    for j, v in enumerate(sources):
        wide = v.to(dtype)
        z = wide @ weight[:, j % weight.shape[1]].T
        if score_gain is not None:
            z = z * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        found.append(ACTIVATIONS[activation](z).movedim(-1, 0))
    return torch.stack(found, dim=1)


def _effective(score_weight: Tensor, score_gain: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The weight of a score with the gain in it, without the inverse rms."""
    weight = score_weight.to(dtype)
    return weight if score_gain is None else weight * score_gain.to(dtype)


# Measured, a training step with the plain form: 1.02 of the time, 1.85 of the saved bytes in float32, 3.83 in bfloat16.
class _GRN(torch.autograd.Function):
    """One buffer per way in the forward pass, one sweep over the sources in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        bias: Tensor,
        score_weight: Tensor,
        score_gain: Tensor | None,
        activation: Activation,
        eps: float,
        *sources: Tensor,
    ) -> tuple[Tensor, ...]:
        dtype, shape = statistics_dtype(sources[0]), sources[0].shape
        weight = _effective(score_weight, score_gain, dtype)
        ctx.activation, ctx.in_c = activation, cpu_only.serves_grn(sources, bias, score_weight)
        if ctx.in_c:
            results, z, inverse = cpu_only.grn(sources, bias, weight, activation, None if score_gain is None else eps)
            ctx.save_for_backward(bias, score_weight, score_gain, z, inverse, *sources)
            return tuple(results)
        wide_bias = bias.to(dtype)
        rows = [v.reshape(-1, shape[-1]) for v in sources]
        C, S, N = bias.shape[0], len(sources), rows[0].shape[0]
        z = weight.new_empty(S, C, N)
        inverse = weight.new_empty(S if score_gain is not None else 0, N)
        buffer = weight.new_empty(N, shape[-1])
        totals: list[Tensor] = []
        for j, x in enumerate(rows):
            torch.mm(weight[:, j % weight.shape[1]], x.to(dtype).T, out=z[j])
            if score_gain is not None:
                inverse[j] = inverse_rms(x, eps)
                z[j].mul_(inverse[j])
            s = ACTIVATIONS[activation](z[j]).unsqueeze(-1)
            for c in range(C):
                torch.add(wide_bias[c, j], s[c], out=buffer)
                if j == 0:
                    totals.append(x * buffer)
                else:
                    totals[c].addcmul_(x, buffer)
        ctx.save_for_backward(bias, score_weight, score_gain, z, inverse, *sources)
        return tuple(total.view(shape).to(sources[0].dtype) for total in totals)

    @staticmethod
    @outside_autocast
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """With g_c the gradient of y_c: db_cj = sum g_c v_j, ds_cj = g_c^T v_j, dv_j = sum_c (b_cj + s_cj) g_c + dz_cj w_cj."""
        refuse_second_gradients("grn")
        bias, score_weight, score_gain, z, inverse, *sources = ctx.saved_tensors
        dtype, D = z.dtype, bias.shape[-1]
        weight, wide_bias = _effective(score_weight, score_gain, dtype), bias.to(dtype)
        if ctx.in_c:
            given = sources, bias, weight, z, inverse, ctx.activation, ctx.needs_input_grad[5:]
            grad_bias, grad_weight, grad_sources = cpu_only.grn_backward(grad_outputs, *given)
            return _through_gain(bias, score_weight, score_gain, grad_bias, grad_weight, grad_sources)
        grads = [grad.reshape(-1, D).to(dtype) for grad in grad_outputs]
        grad_bias, grad_weight = torch.empty_like(wide_bias), torch.zeros_like(weight)
        grad_s, buffer = torch.empty_like(z[0]), torch.empty_like(grads[0])
        grad_sources: list[Tensor | None] = []
        for j, (v, needed) in enumerate(zip(sources, ctx.needs_input_grad[5:], strict=True)):
            x, row = v.reshape(-1, D), j % weight.shape[1]
            for c, grad in enumerate(grads):
                torch.mul(grad, x, out=buffer)
                torch.sum(buffer, 0, out=grad_bias[c, j])
                torch.sum(buffer, 1, out=grad_s[c])
            grad_z = grad_s * _slope(ctx.activation, z[j])
            along = None
            if score_gain is not None:
                # The part of the gradient that flows through the inverse rms.
                along = (grad_z * z[j]).sum(0).mul_(inverse[j].square()).div_(-D).unsqueeze(-1)
                grad_z = grad_z * inverse[j]
            grad_weight[:, row] += torch.mm(grad_z, x.to(dtype))
            if not needed:
                grad_sources.append(None)
                continue
            s = ACTIVATIONS[ctx.activation](z[j]).unsqueeze(-1)
            grad_x = torch.mm(grad_z.T, weight[:, row])
            for c, grad in enumerate(grads):
                grad_x.addcmul_(grad, torch.add(wide_bias[c, j], s[c], out=buffer))
            if along is not None:
                grad_x.addcmul_(x, along)
            grad_sources.append(grad_x.view(v.shape).to(v.dtype))
        return _through_gain(bias, score_weight, score_gain, grad_bias, grad_weight, grad_sources)


def _through_gain(
    bias: Tensor,
    score_weight: Tensor,
    score_gain: Tensor | None,
    grad_bias: Tensor,
    grad_weight: Tensor,
    grad_sources: Sequence[Tensor | None],
) -> tuple[Tensor | None, ...]:
    """All gradients of the operator, from that of the weight with the gain in it."""
    grad_gain = None
    if score_gain is not None:
        grad_gain = (grad_weight * score_weight).sum((0, 1)).to(score_gain.dtype)
        grad_weight = grad_weight * score_gain
    return grad_bias.to(bias.dtype), grad_weight.to(score_weight.dtype), grad_gain, None, None, *grad_sources


def _slope(activation: Activation, z: Tensor) -> Tensor:
    """The derivative of the activation; that of relu is 0 at 0, as everywhere in PyTorch."""
    if activation == "relu":
        return (z > 0).to(z.dtype)
    if activation == "gelu":
        return 0.5 * (1 + torch.erf(z / math.sqrt(2))) + z * torch.exp(-z.square() / 2) / math.sqrt(2 * math.pi)
    if activation == "silu":
        gate = torch.sigmoid(z)
        return gate * (1 + z * (1 - gate))
    return torch.ones_like(z)
