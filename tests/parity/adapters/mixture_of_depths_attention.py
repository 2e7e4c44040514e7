"""Mixture-of-depths attention: the operator of its authors, and the blocks of DepthBench with a norm before or behind."""

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from twoaxis.core.views import Heads
from twoaxis.depth import MixtureOfDepthsAttentionConfig, mixture_of_depths_attention
from twoaxis.depth.base import Mix
from twoaxis.depth.heads import StreamAndHeads
from twoaxis.depth.mixture_of_depths_attention import MixtureOfDepthsAttention
from twoaxis.model import Decoder
from twoaxis.ops import depth_attention, local_attention
from twoaxis.ops.norm import rms_norm
from twoaxis.sequence import AttentionConfig

from ..backbones.llama import lettered_llama
from ..golden import Golden, gradient
from ..trace import streams_and_heads
from ..weights import Weights
from . import Adapter, Mistake


def run_operator(golden: Golden) -> Mapping[str, Tensor]:
    """One attention, with keys and values of as many channels as the larger of both."""
    config = golden.about["config"]
    T, G, K, V, M = (config[name] for name in ("T", "kv_heads", "head_dim", "v_dim", "depth"))
    q, k, v, s, u = leaves = [golden.take(f"input/{n}").requires_grad_() for n in ("q", "k", "v", "depth_k", "depth_v")]
    width = max(K, V)
    # Our scale is that of the width with zeros.
    scale = math.sqrt(width) * (config["scale"] or K**-0.5)
    q, k, v, s, u = (F.pad(x, (0, width - x.shape[-1])) for x in (scale * q, k, v, s, u))
    # Row t g is query g of a group at position t.
    q = q.unflatten(1, (T, -1)).transpose(2, 3).flatten(2, 3)
    s, u = (x.unflatten(1, (T, M)).unbind(2) for x in (s, u))
    score, value = depth_attention.depth_summary(q, s, u)
    beside = (score.transpose(1, 2), value.transpose(1, 2))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    y = local_attention.local_attention(q, k, v, beside=beside)

    def theirs(x: Tensor) -> Tensor:
        return x.unflatten(1, (G, -1)).permute(0, 3, 2, 1, *range(4, x.ndim + 1)).flatten(1, 2)

    # The share of a key with a score of 0 tells the logarithm of the sum over tokens.
    zero = torch.zeros_like(beside[0])
    share = local_attention.local_attention(q, k, 0 * v, beside=(zero, torch.ones_like(q)))[..., 0]
    log_sum = torch.logaddexp(torch.log1p(-share) - torch.log(share), beside[0])
    output = theirs(y[..., :V])
    output.backward(golden.take("input/cotangent"))
    found = {f"grad/{n}": gradient(x) for n, x in zip(("q", "k", "v", "depth_k", "depth_v"), leaves, strict=True)}
    return {**found, "output/o": output, "output/lse": theirs(log_sum) / math.log(2)}


def run_model(golden: Golden) -> Mapping[str, Tensor]:
    """The whole model, with norms before sublayers or behind sums."""
    config = golden.about["config"]
    H, G, K, L = (config[name] for name in ("H", "Hk", "hd", "L"))
    attention = AttentionConfig(n_heads=H, n_kv_heads=G, head_dim=K, qk_norm="before_rope", rope_theta=config["rope_base"])
    model = lettered_llama(config, L, attention, MixtureOfDepthsAttentionConfig(norm=config["norm"]))
    weights = Weights(golden)
    weights.put("embedding.weight", "embed")
    weights.put("norm.gain", "final_norm.weight")
    weights.put("head.weight", "head")
    for b in range(L):
        ours, theirs = f"blocks.{b}", f"blocks.{b}"
        norm = "norm" if config["norm"] == "pre" else "depth"
        weights.put(f"{ours}.attention.{norm}.gain", f"{theirs}.attention_norm.weight")
        weights.put(f"{ours}.attention.mixer.qkv.weight", *(f"{theirs}.w_{x}" for x in "qkv"))
        weights.put(f"{ours}.attention.mixer.output.weight", f"{theirs}.w_out")
        for x in "qk":
            weights.put(f"{ours}.attention.mixer.{x}_gain", f"{theirs}.{x}_norm.weight")
        weights.put(f"{ours}.swiglu.{norm}.gain", f"{theirs}.feed_forward_norm.weight")
        weights.put(f"{ours}.swiglu.mixer.gate_up.weight", f"{theirs}.w1", f"{theirs}.w3")
        weights.put(f"{ours}.swiglu.mixer.down.weight", f"{theirs}.w2")
        if b + 1 < L:
            weights.put(f"{ours}.swiglu.depth.slot.weight", f"{theirs}.kv_proj")
    weights.load(model)
    return {**_run(model, golden), **dict(weights.gradients(model))}


def _run(model: Decoder, golden: Golden) -> dict[str, Tensor]:
    slots = list[Tensor]()

    def seen(_: int, mix: Mix) -> None:
        # The last attention fills no slot here, and nothing reads its own there.
        slots.extend((mix.heads.unrotated[0], mix.heads.v) if mix.heads else mix.next_state.heads[0][-2:])

    streams, found = streams_and_heads(model, golden, seen)
    found |= {f"output/hidden_{index}": stream for index, stream in enumerate(streams)}
    for m in range(len(slots) // 2):
        found |= {f"output/depth_k_{m}": slots[2 * m], f"output/depth_v_{m}": slots[2 * m + 1]}
    return found


def _rotates_slots(patch: pytest.MonkeyPatch) -> None:
    right = MixtureOfDepthsAttention.mix_heads

    def mix_heads(self: MixtureOfDepthsAttention, heads: Heads, context: Any, state: StreamAndHeads, *layout: Any) -> Any:
        return right(self, heads._replace(unrotated=(heads.k, *heads.unrotated[1:])), context, state, *layout)

    patch.setattr(MixtureOfDepthsAttention, "mix_heads", mix_heads)


def _sees_its_own_slot(patch: pytest.MonkeyPatch) -> None:
    right = MixtureOfDepthsAttention._slots

    def mix_heads(self: MixtureOfDepthsAttention, heads: Heads, context: Any, state: StreamAndHeads, *layout: Any) -> Any:
        def slots(self: MixtureOfDepthsAttention, state: StreamAndHeads) -> Any:
            keys, values = right(self, state)
            return (*keys, heads.unrotated[0]), (*values, heads.v)

        with pytest.MonkeyPatch.context() as within:
            within.setattr(MixtureOfDepthsAttention, "_slots", slots)
            return mix(self, heads, context, state, *layout)

    mix = MixtureOfDepthsAttention.mix_heads
    patch.setattr(MixtureOfDepthsAttention, "mix_heads", mix_heads)


def _slots_without_a_norm(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        mixture_of_depths_attention,
        "rms_norm",
        lambda x, gain, eps, *impl: x if gain is None else rms_norm(x, gain, eps, *impl),
    )


def _logarithm_of_base_two(patch: pytest.MonkeyPatch) -> None:
    right = depth_attention.depth_summary

    def depth_summary(*given: Any) -> Any:
        score, value = right(*given)
        return score / math.log(2), value

    patch.setattr(depth_attention, "depth_summary", depth_summary)
    patch.setattr(mixture_of_depths_attention, "depth_summary", depth_summary)


ADAPTER = Adapter(
    claims={r"moda-op(-.*)?": run_operator, r"moda-(prenorm|postnorm)(-.*)?": run_model},
    mistakes=(
        Mistake("scores to the base of two", "moda-op-f64", _logarithm_of_base_two),
        Mistake("scores to the base of two", "moda-prenorm-f64", _logarithm_of_base_two),
        Mistake("rotated slots", "moda-prenorm-f64", _rotates_slots),
        Mistake("rotated slots", "moda-postnorm-f64", _rotates_slots),
        Mistake("the own slot", "moda-prenorm-f64", _sees_its_own_slot),
        Mistake("slots of feed-forwards without the key norm", "moda-postnorm-f64", _slots_without_a_norm),
    ),
)
