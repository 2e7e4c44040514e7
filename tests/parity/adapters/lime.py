"""LIMe: the authors' Llama with a static router."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from twoaxis.core.views import Heads
from twoaxis.depth import LimeConfig
from twoaxis.depth.lime import Lime
from twoaxis.sequence import AttentionConfig

from ..backbones.llama import llama_decoder, llama_gradients, place_llama, run_llama
from ..golden import Golden, gradient
from ..weights import Weights
from . import Adapter, Mistake


def run(golden: Golden) -> Mapping[str, Tensor]:
    """The whole model; keys and values come from one matrix whose rows go channel by channel, then head by head."""
    config = golden.about["config"]
    H, G, K = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    model = llama_decoder(config, AttentionConfig(n_heads=H, n_kv_heads=G, head_dim=K), LimeConfig())
    weights = Weights(golden)
    place_llama(weights, model.config)
    for layer in range(config["num_hidden_layers"]):
        theirs = f"param/model.layers.{layer}.self_attn"
        query, pairs = golden.take(f"{theirs}.q_proj.weight"), golden.take(f"{theirs}.kv_proj_weight")
        # Rows (channel of key then value, head) become (key or value, head, channel).
        rows = pairs.reshape(2, K, G, -1).transpose(1, 2).reshape(2 * G * K, -1)
        weights.state[f"blocks.{layer}.attention.mixer.qkv.weight"] = torch.cat((query, rows))
        if layer:
            router = golden.take(f"{theirs}.lime_router.static_weights")
            earlier, own = router.split((layer * G, G), dim=1)
            weights.state[f"blocks.{layer}.attention.depth.earlier"] = earlier
            weights.state[f"blocks.{layer}.attention.depth.own"] = own
    weights.load(model)
    computed = {**run_llama(model, golden), **llama_gradients(weights, model)}
    computed[f"output/hidden_{config['num_hidden_layers']}"] = computed["left"]
    for layer in range(config["num_hidden_layers"]):
        theirs, ours = f"grad/model.layers.{layer}.self_attn", f"blocks.{layer}.attention"
        found = gradient(model.get_parameter(f"{ours}.mixer.qkv.weight"))
        computed[f"{theirs}.q_proj.weight"] = found[: H * K]
        computed[f"{theirs}.kv_proj_weight"] = found[H * K :].reshape(2, G, K, -1).transpose(1, 2).reshape(2 * G * K, -1)
        if layer:
            parts = [gradient(model.get_parameter(f"{ours}.depth.{name}")) for name in ("earlier", "own")]
            computed[f"{theirs}.lime_router.static_weights"] = torch.cat(parts, dim=1)
    return computed


def _routes_what_was_routed(patch: pytest.MonkeyPatch) -> None:
    right = Lime.mix_heads

    def mix_heads(self: Lime, heads: Heads, context: Tensor, state: object, layout: object = None) -> object:
        mixed, after = right(self, heads, context, state)  # type: ignore[arg-type]
        routed = torch.cat((mixed.k, mixed.v), dim=-1)
        return mixed, after._replace(heads=((*after.heads[self.chain][:-1], routed),))

    patch.setattr(Lime, "mix_heads", mix_heads)


ADAPTER = Adapter(
    claims={r"lime-static-llama(-.*)?": run},
    mistakes=(Mistake("routes what was routed before", "lime-static-llama-f64", _routes_what_was_routed),),
)
