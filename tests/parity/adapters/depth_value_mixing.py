"""Depth value mixing: the Llama of Depth-Attention, whose values a softmax over depth mixes."""

from collections.abc import Mapping
from typing import Any

import pytest
from torch import Tensor

from twoaxis.core.views import Heads
from twoaxis.depth import DepthValueMixingConfig
from twoaxis.depth.base import Mix
from twoaxis.depth.depth_value_mixing import DepthValueMixing
from twoaxis.depth.heads import StreamAndHeads
from twoaxis.model import Decoder
from twoaxis.ops.precision import statistics_dtype
from twoaxis.sequence import AttentionConfig
from twoaxis.sequence.heads import SoftmaxAttention

from ..backbones.llama import lettered_llama
from ..golden import Golden
from ..trace import streams_and_heads
from ..weights import Weights
from . import Adapter, Mistake


def run(golden: Golden) -> Mapping[str, Tensor]:
    """The whole model."""
    config = golden.about["config"]
    attention = AttentionConfig(
        n_heads=config["heads"],
        n_kv_heads=config["kv_heads"],
        head_dim=config["head_dim"],
        qk_norm="key_after_rope",
        rope_theta=config["rope_base"],
    )
    depth = DepthValueMixingConfig(stride=config["stride"], recent_window=config["recent_window"])
    L = config["layers"]
    assert {str(layer): [*depth.sources(layer)] for layer in range(L)} == config["sources"]
    model = lettered_llama(config, L, attention, depth)
    weights = Weights(golden)
    weights.put("embedding.weight", "embed")
    weights.put("norm.gain", "norm.weight")
    weights.put("head.weight", "head")
    for layer in range(L):
        ours, theirs = f"blocks.{layer}", f"layers.{layer}"
        weights.put(f"{ours}.attention.norm.gain", f"{theirs}.input_layernorm.weight")
        weights.put(f"{ours}.attention.mixer.qkv.weight", *(f"{theirs}.{x}_proj" for x in "qkv"))
        weights.put(f"{ours}.attention.mixer.output.weight", f"{theirs}.o_proj")
        for x in "qk":
            weights.put(f"{ours}.attention.mixer.{x}_gain", f"{theirs}.{x}_norm.weight")
        weights.put(f"{ours}.swiglu.norm.gain", f"{theirs}.post_attention_layernorm.weight")
        weights.put(f"{ours}.swiglu.mixer.gate_up.weight", f"{theirs}.gate", f"{theirs}.up")
        weights.put(f"{ours}.swiglu.mixer.down.weight", f"{theirs}.down")
    weights.load(model)
    return {**_run(model, golden), **dict(weights.gradients(model))}


def _run(model: Decoder, golden: Golden) -> dict[str, Tensor]:
    mixed = dict[str, Tensor]()

    def seen(index: int, mix: Mix) -> None:
        mixed[f"output/mixed_v_{index // 2}"] = mix.mixed.v.transpose(1, 2)

    (_, *behind), found = streams_and_heads(model, golden, seen)
    return {**mixed, **found, **{f"output/hidden_{layer}": stream for layer, stream in enumerate(behind)}}


def _stores_own_values(patch: pytest.MonkeyPatch) -> None:
    right = DepthValueMixing.mix_heads

    def mix_heads(self: DepthValueMixing, heads: Heads, context: Any, state: StreamAndHeads, *layout: Any) -> Any:
        mixed, after = right(self, heads, context, state, *layout)
        kept = tuple(heads.v if x is mixed.v else x for x in after.heads[self.chain])
        return mixed, after.with_chain(self.chain, kept)

    patch.setattr(DepthValueMixing, "mix_heads", mix_heads)


def _norms_keys_before_rotation(patch: pytest.MonkeyPatch) -> None:
    right = SoftmaxAttention.__init__

    def build(self: SoftmaxAttention, config: Any, site: Any) -> None:
        right(self, config.replace(qk_norm="before_rope"), site)

    patch.setattr(SoftmaxAttention, "__init__", build)


def _query_of_the_first_head(patch: pytest.MonkeyPatch) -> None:
    def query(self: DepthValueMixing, heads: Heads) -> Tensor:
        return heads.q.unflatten(2, (heads.k.shape[2], -1))[:, :, :, 0].to(statistics_dtype(heads.q))

    patch.setattr(DepthValueMixing, "_query", query)


ADAPTER = Adapter(
    claims={r"depth-attention(-.*)?": run},
    mistakes=(
        Mistake("stores values as they were before the mixing", "depth-attention-f64", _stores_own_values),
        Mistake("stores values as they were before the mixing", "depth-attention-stride1-f64", _stores_own_values),
        Mistake("normalises keys before their rotation", "depth-attention-f64", _norms_keys_before_rotation),
        Mistake("the query of one head for the group", "depth-attention-f64", _query_of_the_first_head),
    ),
)
