"""Canon layers: the authors' Llama with a convolution at the places of its `canon_set`."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from twoaxis.core.layout import TokenLayout
from twoaxis.feed_forward import SwiGLUConfig
from twoaxis.local import CanonConfig, conv
from twoaxis.model import Decoder, DecoderConfig
from twoaxis.ops.causal_conv import causal_conv
from twoaxis.sequence import AttentionConfig, heads

from ..backbones.llama import place_llama
from ..golden import Golden
from ..trace import logits_and_gradients, states
from ..weights import Weights
from . import Adapter, Mistake

PLACES = {
    "A": ("attention", "input_local", "canonA"),
    "B": ("attention", "projected_local", "self_attn.canonB"),
    "C": ("swiglu", "input_local", "canonC"),
    "D": ("swiglu", "projected_local", "mlp.canonD"),
}
"""The sublayer and our place in it, and the authors' name, of each of their places."""


def run_canon(golden: Golden) -> Mapping[str, Tensor]:
    """The whole decoder, forward, backward, and decoded in chunks that the reference code gets wrong."""
    config = golden.about["config"]
    model = _decoder(config)
    weights = Weights(golden)
    place_llama(weights, model.config)
    for layer in range(config["num_hidden_layers"]):
        ours, theirs = f"blocks.{layer}", f"model.layers.{layer}"
        weights.put(f"{ours}.attention.mixer.qkv.weight", *(f"{theirs}.self_attn.{x}_proj.weight" for x in "qkv"))
        for place in config["canon_set"]:
            sublayer, name, authors = PLACES[place]
            weights.put(f"{ours}.{sublayer}.mixer.{name}.weight", f"{theirs}.{authors}.weight")
    weights.load(model)
    computed = logits_and_gradients(model, golden)
    hidden = list(states(model, golden))[::2]
    # The last of their hidden states is taken after the final norm.
    hidden[-1] = computed["hidden"]
    _decode(model, golden)
    return {**computed, **{f"output/hidden_{index}": h for index, h in enumerate(hidden)}, **dict(weights.gradients(model))}


def _decoder(config: Mapping[str, Any]) -> Decoder:
    canon = CanonConfig(
        kernel=config.get("canon_kernel", 4),
        form="residual" if config.get("canon_residual", True) else "plain",
        activation="silu" if config.get("canon_activation") else "none",
    )
    at: dict[str, dict[str, Any]] = {"attention": {}, "swiglu": {}}
    for place in config["canon_set"]:
        sublayer, name, _ = PLACES[place]
        at[sublayer][name] = canon
    attention = AttentionConfig(
        n_heads=config["num_attention_heads"],
        n_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        rope_theta=config.get("rope_theta", 10_000.0),
        rope_dim=config["rope_dim"],
        qk_norm="before_rope" if config["qk_norm"] else "none",
        qk_norm_over="all_heads",
        **at["attention"],
    )
    return Decoder(
        DecoderConfig(
            vocab_size=config["vocab_size"],
            d_model=config["hidden_size"],
            n_layers=config["num_hidden_layers"],
            norm_eps=config["rms_norm_eps"],
            tie_embeddings=False,
            blocks=((attention, SwiGLUConfig(d_ff=config["intermediate_size"], **at["swiglu"])),),
        )
    )


@torch.no_grad()
def _decode(model: Decoder, golden: Golden) -> None:
    expected = golden.tensors["output/logits"]
    tokens = expected.shape[1]
    halves = (tokens - tokens // 2, tokens // 2)
    for sizes in ((1,) * tokens, halves, (min(2, tokens - 1), *(1,) * (tokens > 2), max(1, tokens - 3))):
        cache, parts = model.new_cache(), []
        for tokens in golden.take("input/input_ids").split(sizes, dim=1):
            logits, cache = model(tokens, cache=cache)
            parts.append(logits)
        message = f"{golden.name}: output/logits decoded in {sizes} differ"
        torch.testing.assert_close(torch.cat(parts, dim=1), expected, rtol=1e-9, atol=1e-9, msg=message)


def oldest_tap_last(patch: pytest.MonkeyPatch) -> None:
    def flipped(x: Tensor, weight: Tensor, *args: Any, **options: Any) -> Tensor:
        return causal_conv(x, weight.flip(-1), *args, **options)

    patch.setattr(conv, "causal_conv", flipped)


def _after_the_rotation(patch: pytest.MonkeyPatch) -> None:
    right = heads.SoftmaxAttention._mix_projected

    def late(self: heads.SoftmaxAttention, whole: Tensor, context: Tensor, layout: TokenLayout, cache: Any) -> Any:
        q_k, v = whole.split((self.config.n_heads + self.config.kv_heads, self.config.kv_heads), dim=2)
        q_k, v, cache = right(self, torch.cat((self._rotate(q_k, layout), v), dim=2), context, layout, cache)
        # The rotation that follows is undone beforehand.
        positions = TokenLayout(-layout.positions)
        return self._rotate(q_k, positions), v, cache

    patch.setattr(heads.SoftmaxAttention, "_mix_projected", late)


ADAPTER = Adapter(
    claims={r"canon-.*": run_canon},
    mistakes=(
        Mistake("taps from the newest to the oldest token", "canon-abcd", oldest_tap_last),
        Mistake("taps from the newest to the oldest token", "canon-ac", oldest_tap_last),
        Mistake("place B behind the rotation", "canon-b-act-nores", _after_the_rotation),
        Mistake("place B behind the rotation", "canon-abcd", _after_the_rotation),
    ),
)
