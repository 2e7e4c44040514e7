"""Per-layer embeddings: the layers of Gemma 4, whose norms before and behind the branches are here."""

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twoaxis.checkpoints.layouts import LAYOUTS
from twoaxis.checkpoints.layouts.state_map import DepthPaths, StateMap
from twoaxis.core.layout import TokenLayout
from twoaxis.core.position import LayerStack
from twoaxis.depth import PerLayerEmbeddingConfig, per_layer_embedding
from twoaxis.depth.per_layer_embedding import PerLayerEmbedding

from ..golden import Golden, gradient
from . import Adapter, Mistake

PREFIX = "model.language_model."
"""What a published name has before that of the fixture."""


class _Layers(nn.Module):
    """The layers of the fixture around our mixers."""

    def __init__(self, golden: Golden) -> None:
        super().__init__()
        about = golden.about["config"]
        self.golden, self.n_heads, self.eps = golden, about["H"], about["rms_norm_eps"]
        depth = PerLayerEmbeddingConfig(d_embedding=about["ple_dim"])
        stack = depth.prepare(LayerStack(about["d"], self.eps, (2,) * about["layers"], vocab_size=about["V"]))
        mixers, ends = depth.build(stack)
        self.mixers, self.ends = nn.ModuleList(mixers).double(), ends.double()
        self.paths = DepthPaths(depth, stack, tuple(f"mixers.{index}" for index in range(2 * about["layers"])))
        # The embedding, the branches and their norms.
        self.body = {
            name[6:]: golden.take(name).requires_grad_()
            for name in golden.tensors
            if name.startswith("param/") and "per_layer" not in name
        }

    @property
    def table(self) -> StateMap:
        mixers = LAYOUTS["gemma4"].mixers
        assert mixers is not None
        return mixers(self.paths)

    def forward(self) -> dict[str, Tensor]:
        golden, found, ids = self.golden, {}, self.golden.take("input/input_ids")
        embeddings = F.embedding(ids, self.body["embed_tokens.weight"])
        embeddings = embeddings * golden.take("buffer/embed_tokens.embed_scale")
        layout = TokenLayout.contiguous(ids.shape[1]).of(ids)
        ends: Any = self.ends
        state = ends.enter(embeddings, layout)[0]
        for index, module in enumerate(self.mixers):
            mixer: Any = module
            view, carry, _ = mixer.read(state, layout)
            state = mixer.write(state, self.branch(index, view), view, carry)
            if index % 2:
                found[f"output/hidden_{index // 2}"] = state.stream
        closing: list[Any] = list(self.mixers)[1::2]
        found["output/per_layer_inputs"] = torch.stack([mixer.vector(embeddings, ids) for mixer in closing], dim=2)
        found["output/inputs_embeds"] = embeddings
        found["output/final"] = self.norm(ends.leave(state)[0], "norm")
        logits = found["output/logits"] = found["output/final"] @ golden.take("input/head").T
        logits.backward(golden.take("input/cotangent"))
        return found

    def branch(self, index: int, x: Tensor) -> Tensor:
        """A branch between its two norms."""
        layer, names = f"layers.{index // 2}", (("input", "post_attention"), ("pre_feedforward", "post_feedforward"))[index % 2]
        before, behind = (f"{layer}.{name}_layernorm" for name in names)
        return self.norm((self.mlp if index % 2 else self.attention)(layer, self.norm(x, before)), behind)

    def mlp(self, layer: str, u: Tensor) -> Tensor:
        return F.gelu(u @ self.body[f"{layer}.mlp.w1"].T) @ self.body[f"{layer}.mlp.w2"].T

    def attention(self, layer: str, u: Tensor) -> Tensor:
        q, k, v = (
            (u @ self.body[f"{layer}.self_attn.a.w{x}"].T).unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for x in "qkv"
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return y @ self.body[f"{layer}.self_attn.a.wo"].T

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.body[f"{name}.weight"]


def run(golden: Golden) -> Mapping[str, Tensor]:
    """All layers: the vectors of every layer, the stream after it, logits, every gradient, through the published layout."""
    model = _Layers(golden)
    table = model.table
    theirs = {name: name.removeprefix(PREFIX) for name in table.parts}
    scalars = {name for name in theirs.values() if name.endswith("layer_scalar")}
    given = {name: golden.take(("buffer/" if own in scalars else "param/") + own) for name, own in theirs.items()}
    table.load(model, given)
    assert all(torch.equal(value, given[name]) for name, value in table.save(model).items()), "saved otherwise than loaded"
    for name in golden.tensors:
        if "rotary_emb" in name:
            # The branches of the fixture have no positions.
            golden.take(name)
    scale = golden.take("buffer/embed_tokens_per_layer.embed_scale")
    torch.testing.assert_close(scale, torch.tensor(math.sqrt(golden.about["config"]["ple_dim"]), dtype=torch.float64))
    computed = model()
    found = table.split({name: gradient(model.get_parameter(name)) for name in table.names()})
    ours = {f"grad/{theirs[name]}": value for name, value in found.items() if theirs[name] not in scalars}
    return {**computed, **ours, **{f"grad/{name}": gradient(value) for name, value in model.body.items()}}


def _context_alone(patch: pytest.MonkeyPatch) -> None:
    right = per_layer_embedding.F.embedding

    def zeros(ids: Tensor, table: Tensor) -> Tensor:
        return right(ids, table) * (table.shape[1] > 5)

    patch.setattr(per_layer_embedding.F, "embedding", zeros)


def _other_gelu(patch: pytest.MonkeyPatch) -> None:
    right = per_layer_embedding.F.gelu
    patch.setattr(per_layer_embedding.F, "gelu", lambda x, approximate="none": right(x))


def _sum_instead_of_mean(patch: pytest.MonkeyPatch) -> None:
    right = PerLayerEmbedding.vector
    patch.setattr(PerLayerEmbedding, "vector", lambda self, e, ids: right(self, e, ids) * math.sqrt(2))


def _gated_by_the_embedding(patch: pytest.MonkeyPatch) -> None:
    right = PerLayerEmbedding._injected

    def injected(self: PerLayerEmbedding, stream: Tensor, embedding: Tensor, ids: Tensor) -> Tensor:
        return stream + right(self, embedding, embedding, ids) - embedding

    patch.setattr(PerLayerEmbedding, "_injected", injected)


def _vector_of_the_stream(patch: pytest.MonkeyPatch) -> None:
    right = PerLayerEmbedding._injected
    patch.setattr(PerLayerEmbedding, "_injected", lambda self, stream, embedding, ids: right(self, stream, stream, ids))


def _scale_of_the_added_term_alone(patch: pytest.MonkeyPatch) -> None:
    right = PerLayerEmbedding._injected

    def injected(self: PerLayerEmbedding, stream: Tensor, embedding: Tensor, ids: Tensor) -> Tensor:
        return right(self, stream, embedding, ids) + stream * (1 - self.scale)  # type: ignore[operator]

    patch.setattr(PerLayerEmbedding, "_injected", injected)


FIXTURE = "gemma4-ple-f64"

ADAPTER = Adapter(
    claims={r"gemma4-ple(-.*)?": run},
    mistakes=(
        Mistake("no rows of the table", FIXTURE, _context_alone),
        Mistake("the exact GELU", FIXTURE, _other_gelu),
        Mistake("the sum of both terms", FIXTURE, _sum_instead_of_mean),
        Mistake("a gate of the embedding", FIXTURE, _gated_by_the_embedding),
        Mistake("a vector of the stream", FIXTURE, _vector_of_the_stream),
        Mistake("the scalar on the added term alone", FIXTURE, _scale_of_the_added_term_alone),
    ),
)
