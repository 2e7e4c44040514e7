"""PaTH attention: the reference operator and the layer of flash-linear-attention."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from twoaxis.core.layout import TokenLayout
from twoaxis.core.position import LayerStack
from twoaxis.ops import reflected_attention as operator
from twoaxis.ops.reflected_attention import path_attention
from twoaxis.sequence import PathAttentionConfig
from twoaxis.sequence import path_attention as mixer

from ..golden import Golden, gradient
from ..weights import Weights
from . import Adapter, Mistake

NORM_EPS = 1e-5
"""Of the norms of queries and keys, as the fixture says."""


def run_op(golden: Golden) -> Mapping[str, Tensor]:
    """The operator with and without a forget gate; stored gradients are those with it. Their heads come after positions."""
    names = ("q", "k", "v", "w", "beta", "g")
    leaves = [golden.take(f"input/{name}").requires_grad_() for name in names]
    q, k, v, w, beta, forget_log = (x.transpose(1, 2) for x in leaves)
    y, _ = path_attention(q, k, v, w, beta, forget_log=forget_log)
    without, _ = path_attention(q, k, v, w, beta)
    y.transpose(1, 2).backward(golden.take("input/cotangent"))
    return {
        "output/o": y.transpose(1, 2),
        "output/o_no_gate": without.transpose(1, 2),
        **{f"grad/{name}": gradient(leaf) for name, leaf in zip(names, leaves, strict=True)},
    }


def run_layer(golden: Golden) -> Mapping[str, Tensor]:
    """One layer, also decoded token by token, which the reference's cached path computes without the norms."""
    config = golden.about["config"]
    low_rank, forgets = config["use_low_rank_w"], config["use_forget_gate"]
    weights = Weights(golden)
    weights.put("qkv.weight", *(f"{x}_proj.weight" for x in "qkv"))
    weights.put("output.weight", "o_proj.weight")
    for ours, theirs in (("w_down", "w_proj.0"), ("w_up", "w_proj.1")) if low_rank else (("w_up", "w_proj"),):
        weights.put(f"{ours}.weight", f"{theirs}.weight")
    weights.put("taps", "w_conv1d.weight")
    for ours, theirs in (("gates", "weight"), ("gate_bias", "bias")):
        weights.put(ours, *(f"{name}.{theirs}" for name in ("bt_proj", *["g_proj"] * forgets)))
    if config["use_qk_norm"]:
        weights.put("q_gain", "maybe_q_norm.weight")
        weights.put("k_gain", "maybe_k_norm.weight")
    layer = PathAttentionConfig(
        n_heads=config["num_heads"],
        n_kv_heads=config["num_kv_heads"],
        w_map="low_rank" if low_rank else "full",
        w_rank=golden.tensors["param/w_proj.0.weight"].shape[0] if low_rank else 32,
        w_kernel=config["conv_size"],
        qk_norm="per_head" if config["use_qk_norm"] else "none",
        forget_gate="inside_scale" if forgets else "none",
    ).build(LayerStack(config["d"], NORM_EPS, (1,)).sites[0])
    weights.load(layer)
    x = golden.take("input/x").requires_grad_()
    y, _ = layer(x, TokenLayout.contiguous(x.shape[1]))
    y.backward(golden.take("input/cotangent"))
    _decode(golden, layer, x.detach())
    return {"output/y": y, "grad/x": gradient(x), **dict(weights.gradients(layer))}


@torch.no_grad()
def _decode(golden: Golden, layer: Any, x: Tensor) -> None:
    cache, parts = layer.new_cache(), []
    for start, token in enumerate(x.split(1, dim=1)):
        y, cache = layer(token, TokenLayout.contiguous(1, start=start), cache)
        parts.append(y)
    message = f"{golden.name}: output/y decoded token by token differs"
    torch.testing.assert_close(torch.cat(parts, dim=1), golden.tensors["output/y"], rtol=1e-11, atol=1e-11, msg=message)


def _half_strength(patch: pytest.MonkeyPatch) -> None:
    right = operator._Block.of

    def halved(q: Tensor, k: Tensor, w: Tensor, beta: Tensor, forget_log: Tensor | None) -> Any:
        return right(q, k, w, beta / 2, forget_log)

    patch.setattr(operator._Block, "of", halved)


def _gate_outside_the_scale(patch: pytest.MonkeyPatch) -> None:
    right = operator._forgotten

    def unscaled(forget_log: Tensor) -> Any:
        return right(forget_log * 8**0.5)

    patch.setattr(operator, "_forgotten", unscaled)


def _reflected_by_its_own_token(patch: pytest.MonkeyPatch) -> None:
    """Every key is moved along its own direction as well."""
    right = operator._Block.of

    def moved(q: Tensor, k: Tensor, w: Tensor, beta: Tensor, forget_log: Tensor | None) -> Any:
        own = k - beta.unsqueeze(-1) * (k * w).sum(-1, keepdim=True) * w
        return right(q, own, w, beta, forget_log)

    patch.setattr(operator._Block, "of", moved)


def _directions_of_any_length(patch: pytest.MonkeyPatch) -> None:
    right = mixer.rms_norm

    def longer(x: Tensor, gain: Tensor, eps: float, *rest: Any) -> Tensor:
        return right(x, gain, eps, *rest) * (1.1 if eps < NORM_EPS else 1.0)

    patch.setattr(mixer, "rms_norm", longer)


ADAPTER = Adapter(
    claims={r"path-attn-op.*": run_op, r"path-attn-layer.*": run_layer},
    mistakes=(
        Mistake("strengths in (0, 1)", "path-attn-op", _half_strength),
        Mistake("a forget gate outside the scale", "path-attn-op", _gate_outside_the_scale),
        Mistake("keys that their own token reflects", "path-attn-op", _reflected_by_its_own_token),
        Mistake("directions of another length", "path-attn-layer", _directions_of_any_length),
    ),
)
