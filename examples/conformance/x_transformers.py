"""The conformance checks on the depth reads of x-transformers 2.31.10: what they get wrong, and the same mended.

pip install twoaxis x-transformers==2.31.10
twoaxis check examples/conformance/x_transformers.py --quick --html page.html
"""

from typing import Any

import torch
from torch import Tensor, nn
from x_transformers.x_transformers import (
    AttentionResidual,
    DynamicLIMe,
    HyperConnection,
    MVSplitResidualUpdate,
    OrthogonalResidualUpdate,
    sinkhorn,
)

from twoaxis.testing import ForeignDepth

STREAMS = 4


class Streams(ForeignDepth):
    """num_residual_streams: the residual matrix is all ones, has no gradient, and makes the streams grow."""

    starts_as = "up_to_norm"

    def __init__(self, d_model: int, sublayers: int) -> None:
        super().__init__(d_model, sublayers)
        layers = (HyperConnection(d_model, layer_index=index, num_residual_streams=STREAMS) for index in range(sublayers))
        self.layers = nn.ModuleList(layers)

    def enter(self, embeddings: Tensor) -> Tensor:
        return embeddings.repeat_interleave(STREAMS, dim=0)

    def read(self, index: int, state: Tensor) -> tuple[Tensor, Any]:
        view, streams, gates = self.layers[index].prepare(state)
        return view, (streams, gates)

    def write(self, index: int, state: Tensor, update: Tensor, carry: Any) -> Tensor:
        streams, gates = carry
        return self.layers[index](update, streams, **gates)

    def leave(self, state: Tensor) -> Tensor:
        return state.unflatten(0, (-1, STREAMS)).sum(1)


class StreamsMended(Streams):
    """The same, mended: rows and columns of the matrix sum to one, write gates are one, statistics are in float32."""

    def __init__(self, d_model: int, sublayers: int) -> None:
        super().__init__(d_model, sublayers)
        for layer in self.layers:
            for name in ("dynamic_alpha_scale", "dynamic_beta_scale"):
                setattr(layer, name, nn.Parameter(getattr(layer, name).detach().reshape(1)))

    def read(self, index: int, state: Tensor) -> tuple[Tensor, Any]:
        layer: Any = self.layers[index]
        with torch.autocast(state.device.type, enabled=False):
            wide = torch.promote_types(state.dtype, torch.float32)
            streams = state.unflatten(0, (-1, STREAMS)).movedim(1, 2).to(wide)
            weight, read_map, write_map = (
                p.to(wide) for p in (layer.norm.weight, layer.dynamic_alpha_fn, layer.dynamic_beta_fn)
            )
            normed = nn.functional.layer_norm(streams, streams.shape[-1:], weight)
            weights = normed @ read_map * layer.dynamic_alpha_scale.to(wide) + layer.static_alpha.to(wide)
            # Source by destination, whole; in float64 where the model is.
            mix = sinkhorn_of(weights[..., 1:], layer.sinkhorn_iters)
            gates = 2 * (normed @ write_map * layer.dynamic_beta_scale.to(wide) + layer.static_beta.to(wide) - 1).sigmoid()
            view = (weights[..., :1].sigmoid() * streams).sum(-2)
            return view.to(state.dtype), (mix.mT @ streams, {"beta": gates})

    def write(self, index: int, state: Tensor, update: Tensor, carry: Any) -> Tensor:
        with torch.autocast(state.device.type, enabled=False):
            return super().write(index, state, update.to(carry[0].dtype), carry).to(state.dtype)


def sinkhorn_of(weights: Tensor, rounds: int) -> Tensor:
    """The library's Sinkhorn rounds, and in float64 ours, since it rounds to float32."""
    if weights.dtype != torch.float64:
        return sinkhorn(weights, rounds)
    weights = weights.softmax(-2)
    for _ in range(rounds):
        weights = weights / weights.sum(-1, keepdim=True)
        weights = weights / weights.sum(-2, keepdim=True)
    return weights


class _Update(ForeignDepth):
    """One stream, to which every sublayer adds its output in a way of its own."""

    kind: Any

    def __init__(self, d_model: int, sublayers: int) -> None:
        super().__init__(d_model, sublayers)
        self.layers = nn.ModuleList(self.kind(d_model) for _ in range(sublayers))

    def write(self, index: int, state: Tensor, update: Tensor, carry: Any) -> Tensor:
        return self.layers[index](update, state)


class Orthogonal(_Update):
    """orthog_residual: the projection sums over all positions, later ones included."""

    kind = OrthogonalResidualUpdate


class OrthogonalMended(Orthogonal):
    """The same, mended: every token is projected by itself."""

    def write(self, index: int, state: Tensor, update: Tensor, carry: Any) -> Tensor:
        tokens = state.flatten(0, 1).unsqueeze(1)
        return self.layers[index](update.flatten(0, 1).unsqueeze(1), tokens).view_as(state)


class MeanSplit(_Update):
    """mv_split_residual: the mean is taken over all positions, later ones included."""

    kind = MVSplitResidualUpdate


class MeanSplitMended(MeanSplit):
    """The same, mended: the mean is that of the tokens so far, in float32; to decode, it would need a cache."""

    def write(self, index: int, state: Tensor, update: Tensor, carry: Any) -> Tensor:
        layer: Any = self.layers[index]
        mean, old = _mean_so_far(update), _mean_so_far(state)
        return state + (update - mean) * layer.beta + (mean - old) * layer.alpha


def _mean_so_far(x: Tensor) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    tokens = torch.arange(1, x.shape[1] + 1, dtype=wide.dtype).unsqueeze(1)
    return (wide.cumsum(1) / tokens).to(x.dtype)


class Attention(ForeignDepth):
    """attn_aggregated_residuals: statistics in half precision; the first sublayer has one source, and so no gradient."""

    starts_as = "none"

    def __init__(self, d_model: int, sublayers: int) -> None:
        super().__init__(d_model, sublayers)
        self.layers = nn.ModuleList(self.layer(d_model, index) for index in range(sublayers))

    def layer(self, d_model: int, index: int) -> nn.Module:
        return AttentionResidual(d_model, lora_rank=4)

    def enter(self, embeddings: Tensor) -> tuple[Tensor, ...]:
        return (embeddings,)

    def read(self, index: int, state: tuple[Tensor, ...]) -> tuple[Tensor, None]:
        return self.layers[index](state[-1], list(state)), None

    def write(self, index: int, state: tuple[Tensor, ...], update: Tensor, carry: None) -> tuple[Tensor, ...]:
        return (*state, state[-1] + update)

    def leave(self, state: tuple[Tensor, ...]) -> Tensor:
        return state[-1]


class _First(nn.Module):
    def forward(self, x: Tensor, sources: list[Tensor]) -> Tensor:
        return x


class AttentionMended(Attention):
    """The same, mended: computed in float32; the first sublayer reads the embeddings as they are."""

    def layer(self, d_model: int, index: int) -> nn.Module:
        return super().layer(d_model, index) if index else _First()

    def read(self, index: int, state: tuple[Tensor, ...]) -> tuple[Tensor, None]:
        wide = torch.promote_types(state[-1].dtype, torch.float32)
        values = {name: value.to(wide) for name, value in self.layers[index].named_parameters()}
        sources = [source.to(wide) for source in state]
        with torch.autocast(state[-1].device.type, enabled=False):
            view = torch.func.functional_call(self.layers[index], values, (sources[-1], sources))
        return view.to(state[-1].dtype), None


class LIMe(Attention):
    """integrate_layers: statistics in half precision; the first sublayer has one source, and so no gradient."""

    def layer(self, d_model: int, index: int) -> nn.Module:
        return DynamicLIMe(d_model, index + 1)


class LIMeMended(AttentionMended, LIMe):
    """The same, mended: computed in float32; the first sublayer reads the embeddings as they are."""
