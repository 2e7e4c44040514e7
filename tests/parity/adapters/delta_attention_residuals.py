"""Delta Attention Residuals: the authors' Qwen3 decoder, and their layers around the branches of the tiny decoder."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from twoaxis.core.views import QKV
from twoaxis.depth import DeltaAttentionResidualsConfig, delta_attention_residuals
from twoaxis.depth.delta_attention_residuals import DeltaAttentionResiduals, DeltaEnds, StreamAndDeltas
from twoaxis.depth.depth_query import AddedRead, Sources
from twoaxis.model import Decoder
from twoaxis.model.trace import sublayer_list
from twoaxis.sequence import AttentionConfig

from ..backbones.llama import llama_decoder
from ..backbones.tinylm import TinyLM
from ..golden import Golden, gradient
from ..trace import logits_and_gradients, states
from ..weights import Weights
from . import Adapter, Mistake


def run_qwen3(golden: Golden) -> Mapping[str, Tensor]:
    """The whole decoder, with every read and the stream between layers."""
    config = golden.about["config"]
    attention = AttentionConfig(
        n_heads=config["num_attention_heads"],
        n_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        rope_theta=golden.about["rope_theta"],
        qk_norm="before_rope",
    )
    model = llama_decoder(config, attention, _depth(golden))
    weights = Weights(golden)
    _place(weights, model)
    weights.load(model)
    computed = {**logits_and_gradients(model, golden), **dict(weights.gradients(model))}
    for layer in range(config["num_hidden_layers"]):
        computed[f"grad/model.layers.{layer}.input_layernorm.weight"] = _input_norm_gradient(model, layer)
    with torch.no_grad():
        views = [view for index, state in enumerate(states(model, golden)) for view in _reads(model, index, state)]
        streams = [state.stream for state in states(model, golden)]
    computed.update({f"output/mix_{index}": view for index, view in enumerate(views)})
    return {**computed, **{f"output/partial_{layer}": stream for layer, stream in enumerate(streams[::2])}}


def _depth(golden: Golden) -> DeltaAttentionResidualsConfig:
    config = golden.about["config"]
    mode = config.get("attnres_mode", "delta_block" if "deltablock" in golden.name else "delta")
    values: dict[str, Any] = {}
    if mode == "delta_block":
        layers = config.get("num_hidden_layers") or config["blocks"]
        values["block_size"] = math.ceil(layers / config.get("attnres_num_blocks", config.get("num_blocks")))
        values["count"] = "layer"
        # The two repositories name two modes alike.
        released = "asreleased" in golden.name or "deltablock" in golden.name
        values |= {"entries": "as_released"} if released else {"embedding": "first_read"}
    if mode == "delta_v":
        values |= {"value_routing": "separate", "embedding": "never"}
    if config.get("attnres_use_null_source"):
        values["null_source"] = "learned"
    if config.get("gate") == "learnable_alpha":
        values["gate"] = "alpha"
    return DeltaAttentionResidualsConfig(**values)


def _place(weights: Weights, model: Decoder) -> None:
    weights.put("embedding.weight", "model.embed_tokens.weight")
    weights.put("norm.gain", "model.norm.weight")
    for index, sublayer in enumerate(sublayer_list(model)):
        layer, kind = index // 2, ("attention", "swiglu")[index % 2]
        ours, theirs = f"blocks.{layer}.{kind}", f"model.layers.{layer}"
        if kind == "attention":
            weights.put(f"{ours}.norm.gain", f"{theirs}.input_layernorm.weight")
            if sublayer.depth.splits_views:
                for name in ("key_norm", "value_norm"):
                    weights.state[f"{ours}.{name}.gain"] = weights.state[f"{ours}.norm.gain"]
            weights.put(f"{ours}.mixer.qkv.weight", *(f"{theirs}.self_attn.{x}_proj.weight" for x in "qkv"))
            weights.put(f"{ours}.mixer.output.weight", f"{theirs}.self_attn.o_proj.weight")
            for x in "qk":
                weights.put(f"{ours}.mixer.{x}_gain", f"{theirs}.self_attn.{x}_norm.weight")
        else:
            weights.put(f"{ours}.norm.gain", f"{theirs}.post_attention_layernorm.weight")
            weights.put(f"{ours}.mixer.gate_up.weight", f"{theirs}.mlp.gate_proj.weight", f"{theirs}.mlp.up_proj.weight")
            weights.put(f"{ours}.mixer.down.weight", f"{theirs}.mlp.down_proj.weight")
        read = ("attn", "mlp")[index % 2]
        _place_read(weights, f"{ours}.depth.route", sublayer.depth.route, f"{theirs}.{read}")
        if f"param/{theirs}.v_res_proj.weight" in weights.golden and kind == "attention":
            _place_read(weights, f"{ours}.depth.value_route", sublayer.depth.value_route, f"{theirs}.v")


def _place_read(weights: Weights, ours: str, read: Any, theirs: str) -> None:
    """A read of at most one source has no query; the bias of blocks is dead in the authors' code."""
    for name, stored in (("pseudo_query", "res_proj.weight"), ("key_gain", "res_norm.weight"), ("null", "null_source")):
        if getattr(read, name, None) is not None:
            weights.put(f"{ours}.{name}", f"{theirs}_{stored}")
        elif f"param/{theirs}_{stored}" in weights.golden:
            weights.absent(f"{theirs}_{stored}")
    if f"param/{theirs}_res_bias" in weights.golden:
        weights.golden.take(f"param/{theirs}_res_bias")


def _input_norm_gradient(model: Decoder, layer: int) -> Tensor:
    """Separate views have a norm each, where the authors' have one: its gradient is the sum."""
    sublayer = sublayer_list(model)[2 * layer]
    norms = [getattr(sublayer, name) for name in ("norm", "key_norm", "value_norm") if hasattr(sublayer, name)]
    return torch.stack([gradient(norm.gain) for norm in norms]).sum(0)


def _reads(model: Decoder, index: int, state: StreamAndDeltas) -> Iterator[Tensor]:
    if index < len(sublayer_list(model)):
        views, _, _ = sublayer_list(model)[index].depth.read(state)
        yield from (views.q, views.v) if isinstance(views, QKV) else (views,)


def run_tinylm(golden: Golden) -> Mapping[str, Tensor]:
    """The tiny decoder; the authors' layers show the stream only after their feed-forward."""
    model = TinyLM(golden, _depth(golden))
    places = list(_tiny_places(golden, model))
    for module, name, theirs in places:
        stored = golden.take(f"param/{theirs}")
        parameter: Any = getattr(module, name, None)
        if parameter is not None:
            parameter.data.copy_(stored.reshape(parameter.shape))
    computed = model.run()
    for module, name, theirs in places:
        stored, parameter = golden.tensors[f"param/{theirs}"], getattr(module, name, None)
        computed[f"grad/{theirs}"] = (
            torch.zeros_like(stored) if parameter is None else gradient(parameter).reshape(stored.shape)
        )
    found = [state.stream.unsqueeze(-2) for state in computed.pop("states")]
    shown = {f"output/streams_{index}": found[index + index % 2] for index in range(len(found) - 1)}
    return {**computed, **shown, "output/streams_init": found[0]}


def _tiny_places(golden: Golden, model: TinyLM) -> Iterator[tuple[nn.Module | None, str, str]]:
    for index, mixer in enumerate(model.mixers):
        theirs = f"hc.{index // 2}.{('attn', 'mlp')[index % 2]}_res"
        for name, stored in (("pseudo_query", "proj.weight"), ("key_gain", "norm.weight"), ("alpha", "alpha")):
            if f"param/{theirs}_{stored}" in golden:
                yield getattr(mixer, "route", None), name, f"{theirs}_{stored}"


def _replaces_the_stream(patch: pytest.MonkeyPatch) -> None:
    right = AddedRead.forward

    def forward(self: AddedRead, stream: Tensor, sources: Sources) -> tuple[Tensor, Sources]:
        added, passed = right(self, stream, sources)
        return added - stream, passed

    patch.setattr(AddedRead, "forward", forward)


def _no_key_norm(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(delta_attention_residuals, "passing_factor", lambda v, eps, impl: (torch.ones_like(v[..., 0]), v))


def _writes_the_mixture(patch: pytest.MonkeyPatch) -> None:
    right = DeltaAttentionResiduals.write

    def write(self: Any, state: StreamAndDeltas, update: Tensor, context: Any, carry: StreamAndDeltas) -> StreamAndDeltas:
        following = right(self, state, update, context, carry)
        return following._replace(stream=following.stream + self.read(state)[0] - state.stream)

    patch.setattr(DeltaAttentionResiduals, "write", write)


def _entries_are_streams(patch: pytest.MonkeyPatch) -> None:
    right = DeltaAttentionResiduals.write

    def write(self: Any, state: StreamAndDeltas, update: Tensor, context: Any, carry: StreamAndDeltas) -> StreamAndDeltas:
        following = right(self, state, update, context, carry)
        if len(following.values) == len(state.values) or not state.values:
            return following
        return following._replace(values=(*following.values[:-1], following.stream))

    patch.setattr(DeltaAttentionResiduals, "write", write)


def _routes_swapped(patch: pytest.MonkeyPatch) -> None:
    right = DeltaAttentionResiduals.read

    def read(self: Any, *given: Any) -> tuple[Any, StreamAndDeltas, Any]:
        views, carry, cache = right(self, *given)
        return (QKV(views.v, views.v, views.q) if isinstance(views, QKV) else views), carry, cache

    patch.setattr(DeltaAttentionResiduals, "read", read)


def _reads_at_the_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DeltaEnds, "leave", lambda self, state, *_: (2 * state.stream - state.stream.roll(1, -1), None))


ADAPTER = Adapter(
    claims={r"deltares(-.*)?": run_qwen3, r"dar-delta(block)?(-.*)?": run_tinylm},
    mistakes=(
        Mistake("the mixture replaces the stream", "deltares", _replaces_the_stream),
        Mistake("the mixture is written to the stream", "deltares-null", _writes_the_mixture),
        Mistake("entries are streams, not deltas", "deltares-block", _entries_are_streams),
        Mistake("entries are streams, not deltas", "deltares-block-asreleased", _entries_are_streams),
        Mistake("the two routes are swapped", "deltares-v", _routes_swapped),
        Mistake("no norm of the keys", "dar-delta-f64", _no_key_norm),
        Mistake("entries are streams, not deltas", "dar-deltablock-f64", _entries_are_streams),
        Mistake("something else than the stream is left", "dar-delta-alpha-f64", _reads_at_the_end),
    ),
)
