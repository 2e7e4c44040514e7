"""Value residual: the authors' Llama, with and without values of its own, and the decoder of x-transformers."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twoaxis.core.position import HeadShape, LayerStack, SublayerInfo
from twoaxis.core.views import Heads
from twoaxis.depth import DepthMixer, ValueResidualConfig
from twoaxis.depth.value_residual import ValueResidual
from twoaxis.sequence import AttentionConfig

from ..backbones.llama import llama_decoder, llama_gradients, place_llama, run_llama
from ..golden import Golden, gradient
from ..weights import Weights
from . import Adapter, Mistake

LAYER_NORM_EPS = 1e-5


def run_resformer(golden: Golden) -> Mapping[str, Tensor]:
    """Half of the first layer's values and half of the own ones."""
    return _llama(golden, ValueResidualConfig(variant="constant"))


def run_svformer(golden: Golden) -> Mapping[str, Tensor]:
    """One set of values for all layers."""
    return _llama(golden, ValueResidualConfig(variant="svformer"))


def _llama(golden: Golden, depth: ValueResidualConfig) -> Mapping[str, Tensor]:
    config = golden.about["config"]
    attention = AttentionConfig(n_heads=config["num_attention_heads"], n_kv_heads=config["num_key_value_heads"])
    model = llama_decoder(config, attention, depth)
    weights = Weights(golden)
    place_llama(weights, model.config)
    for layer in range(config["num_hidden_layers"]):
        theirs = f"model.layers.{layer}.self_attn"
        names = "qkv" if depth.variant != "svformer" or layer == 0 else "qk"
        weights.put(f"blocks.{layer}.attention.mixer.qkv.weight", *(f"{theirs}.{x}_proj.weight" for x in names))
    weights.load(model)
    return {**run_llama(model, golden), **llama_gradients(weights, model)}


class _XTransformers(nn.Module):
    """The decoder of x-transformers: unit-offset layer norms, no positions, GELU; our value residual inside it."""

    def __init__(self, golden: Golden, depth: ValueResidualConfig) -> None:
        super().__init__()
        config = golden.about["config"]
        self.golden, self.heads, self.depth = golden, config["heads"], config["depth"]
        self.weights = {name[6:]: golden.take(name).requires_grad_() for name in golden.tensors if name.startswith("param/")}
        shape = HeadShape(self.heads, self.heads, config["dim_head"])
        slots = (SublayerInfo("attention", heads=shape), SublayerInfo("gelu")) * self.depth
        stack = depth.prepare(LayerStack(config["dim"], LAYER_NORM_EPS, (2,) * self.depth, slots))
        mixers, ends = depth.build(stack)
        self.mixers, self.ends = nn.ModuleList(mixers).double(), ends

    def forward(self) -> dict[str, Tensor]:
        golden, found = self.golden, {}
        embeddings = F.embedding(golden.take("input/input_ids"), self.weights["token_emb.emb.weight"])
        embeddings.retain_grad()
        ends: Any = self.ends
        state = ends.enter(embeddings)[0]
        found["output/embeddings"] = embeddings
        for index, mixer in enumerate(self.mixers):
            found[f"output/layer_hidden_{index}"] = state.stream
            assert isinstance(mixer, DepthMixer)
            x: Any
            x, carry, _ = mixer.read(state)
            name = f"attn_layers.layers.{index}"
            u = self._norm(x, f"{name}.0.0.gamma")
            if index % 2:
                update = F.gelu(u @ self.weights[f"{name}.1.ff.0.0.weight"].T) @ self.weights[f"{name}.1.ff.2.weight"].T
            else:
                parts = [(u @ self.weights[f"{name}.1.to_{x}.weight"].T).unflatten(-1, (self.heads, -1)) for x in "qkv"]
                found[f"output/values_premix_{index // 2}"] = parts[2].transpose(1, 2)
                heads, state = mixer.mix_heads(Heads(parts[0], parts[1], parts[2]), u, state)
                q, k, v = (part.transpose(1, 2) for part in heads[:3])
                y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
                update = y.transpose(1, 2).flatten(2) @ self.weights[f"{name}.1.to_out.weight"].T
            state = mixer.write(state, update, u, carry)
        left = found[f"output/layer_hidden_{2 * self.depth}"] = ends.leave(state)[0]
        logits = self._norm(left, "attn_layers.final_norm.gamma") @ self.weights["to_logits.weight"].T
        logits.backward(golden.take("input/cotangent"))
        return {**found, "output/logits": logits, "grad/input_embeddings": gradient(embeddings)}

    def _norm(self, x: Tensor, gamma: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], eps=LAYER_NORM_EPS) * (1 + self.weights[gamma])


def run_half(golden: Golden) -> Mapping[str, Tensor]:
    """Fixed halves."""
    return _x_transformers(golden, ValueResidualConfig(variant="constant"))


def run_gated(golden: Golden) -> Mapping[str, Tensor]:
    """A gate per token and head."""
    return _x_transformers(golden, ValueResidualConfig(variant="gated"))


def _x_transformers(golden: Golden, depth: ValueResidualConfig) -> Mapping[str, Tensor]:
    model = _XTransformers(golden, depth)
    gates: dict[str, nn.Parameter] = {}
    for index in range(2, 2 * model.depth, 2):
        mixer: Any = model.mixers[index]
        if depth.variant == "gated":
            theirs = f"attn_layers.layers.{index}.1.to_value_residual_mix.0"
            gates |= {f"{theirs}.weight": mixer.gate_weight, f"{theirs}.bias": mixer.gate_bias}
    with torch.no_grad():
        for name, parameter in gates.items():
            parameter.copy_(model.weights[name])
    computed = model()
    return {**computed, **{f"grad/{name}": gradient(gates.get(name, weight)) for name, weight in model.weights.items()}}


def _previous_layer_instead_of_the_first(patch: pytest.MonkeyPatch) -> None:
    right = ValueResidual.mix_heads

    def mix_heads(self: ValueResidual, heads: Heads, context: Any, state: Any, layout: Any = None) -> Any:
        mixed, after = right(self, heads, context, state, layout)
        latest = (*after.heads[: self.chain], (heads.v.flatten(2),), *after.heads[self.chain + 1 :])
        return mixed, after._replace(heads=latest)

    patch.setattr(ValueResidual, "mix_heads", mix_heads)


ADAPTER = Adapter(
    claims={
        r"valueres-resformer-llama(-.*)?": run_resformer,
        r"valueres-svformer-llama(-.*)?": run_svformer,
        r"valueres-half-xt(-.*)?": run_half,
        r"valueres-learned-xt(-.*)?": run_gated,
    },
    mistakes=(
        Mistake("the previous layer's values", "valueres-resformer-llama-f64", _previous_layer_instead_of_the_first),
        Mistake("the previous layer's values", "valueres-svformer-llama-f64", _previous_layer_instead_of_the_first),
        Mistake("the previous layer's values", "valueres-half-xt-f64", _previous_layer_instead_of_the_first),
        Mistake("the previous layer's values", "valueres-learned-xt-f64", _previous_layer_instead_of_the_first),
    ),
)
