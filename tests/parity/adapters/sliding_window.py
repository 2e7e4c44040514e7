"""Sliding-window attention: flash-linear-attention's layer, Hugging Face's Mistral, and gpt-oss's attention with sinks."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from twoaxis.checkpoints.layouts import state_map
from twoaxis.core.layout import TokenLayout
from twoaxis.core.position import LayerStack
from twoaxis.model import Decoder
from twoaxis.ops import local_attention
from twoaxis.ops.rope import RotationTable
from twoaxis.sequence import AttentionConfig, ShortSWAConfig, heads

from ..backbones.llama import llama_decoder
from ..golden import Golden, gradient
from ..trace import logits_and_gradients, states
from ..weights import Weights
from . import Adapter, Mistake


def run_layer(golden: Golden) -> Mapping[str, Tensor]:
    """One layer: output and gradients with the window, output without it."""
    config = golden.about["config"]
    site = LayerStack(config["d"], 1e-6, (1,)).sites[0]
    head_dim = golden.tensors["param/q_proj.weight"].shape[0] // config["H"]
    sizes = {"n_heads": config["H"], "n_kv_heads": config["kv"], "head_dim": head_dim, "rope_theta": config["rope_theta"]}
    weights = Weights(golden)
    weights.put("qkv.weight", "q_proj.weight", "k_proj.weight", "v_proj.weight")
    weights.put("output.weight", "o_proj.weight")
    layer = ShortSWAConfig(window=config["window_size"], **sizes).build(site)
    weights.load(layer)
    full = AttentionConfig(**sizes).build(site)
    weights.load(full)
    x = golden.take("input/x").requires_grad_()
    layout = TokenLayout.contiguous(x.shape[1])
    y, _ = layer(x, layout)
    y.backward(golden.take("input/cotangent"))
    whole, _ = full(x, layout)
    return {
        "output/y": y,
        "output/y_full_attention_same_weights": whole,
        "grad/x": gradient(x),
        **dict(weights.gradients(layer)),
    }


def run_sink(golden: Golden) -> Mapping[str, Tensor]:
    """One layer with biases and a sink for each head, also with sinks far below all scores."""
    config = golden.about["config"]
    layer = AttentionConfig(
        n_heads=config["H"],
        n_kv_heads=config["KV"],
        head_dim=config["head_dim"],
        window=config["sliding_window"],
        rope_theta=config["rope_theta"],
        bias="all" if config["biases"] else "none",
        sink="learned",
    ).build(LayerStack(config["d"], 1e-6, (1,)).sites[0])
    weights = Weights(golden)
    for kind, qkv, output in (("weight", "qkv.weight", "output.weight"), ("bias", "qkv_bias", "output_bias")):
        if kind == "weight" or config["biases"]:
            weights.put(qkv, *(f"{x}_proj.{kind}" for x in "qkv"))
            weights.put(output, f"o_proj.{kind}")
    weights.put("sink", "sinks")
    weights.load(layer)
    x = golden.take("input/x").requires_grad_()
    layout = TokenLayout.contiguous(x.shape[1])
    y, _ = layer(x, layout)
    y.backward(golden.take("input/cotangent"))
    gradients = dict(weights.gradients(layer))
    with torch.no_grad():
        layer.get_parameter("sink").fill_(-1e4)
        without, _ = layer(x, layout)
    return {"output/y": y, "output/y_sinks_minus_1e4": without, "grad/x": gradient(x), **gradients}


def run_mistral(golden: Golden) -> Mapping[str, Tensor]:
    """A decoder in which every attention has a window, also decoded with the cache in the recorded chunks."""
    config = golden.about["config"]
    attention = AttentionConfig(
        n_heads=config["num_attention_heads"],
        n_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        window=config["sliding_window"],
        rope_theta=config["rope_theta"],
    )
    model = llama_decoder(config, attention)
    weights = Weights(golden)
    weights.follow(state_map("llama", model.config))
    weights.load(model)
    computed = logits_and_gradients(model, golden)
    hidden = [state for index, state in enumerate(states(model, golden)) if index % 2 == 0]
    # The last entry of Hugging Face's hidden states is taken after the final norm.
    hidden[-1] = computed["hidden"]
    for sizes in golden.about["cached_decode_max_abs_diff_by_chunking"]:
        _decode(model, golden, [int(size) for size in sizes.strip("[]").split(",")])
    return {**computed, **{f"output/hidden_{index}": h for index, h in enumerate(hidden)}, **dict(weights.gradients(model))}


@torch.no_grad()
def _decode(model: Decoder, golden: Golden, sizes: list[int]) -> None:
    cache, parts = model.new_cache(), []
    for tokens in golden.take("input/input_ids").split(sizes, dim=1):
        logits, cache = model(tokens, cache=cache)
        parts.append(logits)
    decoded = torch.cat(parts, dim=1)
    message = f"{golden.name}: output/logits decoded in {sizes} differ"
    torch.testing.assert_close(decoded, golden.tensors["output/logits"], rtol=1e-9, atol=1e-9, msg=message)
    assert {cache[0].mixer.keys.length for cache in cache.sublayers} == {golden.about["cached_kv_length_after_decode"]}


def _window_besides_the_query(patch: pytest.MonkeyPatch) -> None:
    def wider(*args: Tensor, window: int | None = None, **options: object) -> Tensor:
        return local_attention.local_attention(*args, window=None if window is None else window + 1, **options)  # type: ignore[arg-type]

    patch.setattr(heads, "local_attention", wider)


def _other_rotation_base(patch: pytest.MonkeyPatch) -> None:
    right = heads.layout_rotation

    def other_base(layout: TokenLayout, table: RotationTable, dtype: torch.dtype) -> object:
        return right(layout, table._replace(theta=table.theta / 2), dtype)

    patch.setattr(heads, "layout_rotation", other_base)


def _sink_with_a_value(patch: pytest.MonkeyPatch) -> None:
    right = local_attention._sink_key

    def with_ones(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        key, value = right(k, v)
        return key, torch.cat((torch.ones_like(value[..., :1, :]), value[..., 1:, :]), dim=-2)

    patch.setattr(local_attention, "_sink_key", with_ones)


ADAPTER = Adapter(
    claims={r"swa-fla-layer.*": run_layer, r"swa-mistral.*": run_mistral, r"swa-sink-gptoss.*": run_sink},
    mistakes=(
        Mistake("a sink with a value", "swa-sink-gptoss", _sink_with_a_value),
        Mistake("a window of w tokens besides the query", "swa-sink-gptoss", _window_besides_the_query),
        Mistake("a window of w tokens besides the query", "swa-fla-layer", _window_besides_the_query),
        Mistake("a window of w tokens besides the query", "swa-mistral", _window_besides_the_query),
        Mistake("another base of the rotation angles", "swa-fla-layer", _other_rotation_base),
        Mistake("another base of the rotation angles", "swa-mistral", _other_rotation_base),
    ),
)
