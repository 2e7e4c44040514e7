"""The conformance checks on hyper-connections 0.4.11: what it gets wrong, and the same mended.

pip install twoaxis hyper-connections==0.4.11
twoaxis check examples/conformance/hyper_connections.py --quick --html page.html
"""

from typing import Any

import torch
from hyper_connections import HyperConnections, mHCv2
from torch import Tensor, nn

from twoaxis.testing import ForeignDepth, float64_stays

STREAMS = 4


class _Wrapped(ForeignDepth):
    """Every module returns the input of a branch, and a function that adds the branch's output to the streams.

    Mended, gates have one dimension, and everything is computed at least in float32, from parameters in the model's dtype.
    """

    starts_as = "up_to_norm"
    mended = False

    def __init__(self, d_model: int, sublayers: int) -> None:
        super().__init__(d_model, sublayers)
        self.layers = nn.ModuleList(self.layer(d_model, index) for index in range(sublayers))
        if self.mended:
            for name, gate in list(self.named_parameters()):
                if not gate.ndim:
                    owner, _, last = name.rpartition(".")
                    setattr(self.get_submodule(owner), last, nn.Parameter(gate.detach().reshape(1)))

    def layer(self, d_model: int, index: int) -> nn.Module:
        return HyperConnections(STREAMS, dim=d_model, layer_index=index)

    def enter(self, embeddings: Tensor) -> Tensor:
        return embeddings.repeat_interleave(STREAMS, dim=0)

    def read(self, index: int, state: Tensor) -> tuple[Tensor, Any]:
        with float64_stays():
            if not self.mended:
                return self.layers[index](state)
            wide = torch.promote_types(state.dtype, torch.float32)
            values = {name: value.to(wide) for name, value in self.layers[index].named_parameters()}
            with torch.autocast(state.device.type, enabled=False):
                view, add = torch.func.functional_call(self.layers[index], values, (state.to(wide),))
            return view.to(state.dtype), add

    def write(self, index: int, state: Tensor, update: Tensor, carry: Any) -> Tensor:
        with float64_stays():
            if not self.mended:
                return carry(update)
            with torch.autocast(state.device.type, enabled=False):
                return carry(update.to(torch.promote_types(update.dtype, torch.float32))).to(state.dtype)

    def leave(self, state: Tensor) -> Tensor:
        return state.unflatten(0, (-1, STREAMS)).sum(1)


class Dynamic(_Wrapped):
    """HyperConnections: gates without a dimension, and statistics in half precision."""


class DynamicMended(_Wrapped):
    """HyperConnections, mended: gates of one number, statistics in float32."""

    mended = True


class WithoutIndex(DynamicMended):
    """HyperConnections without layer_index: the stream that is read first is drawn from Python's generator."""

    def layer(self, d_model: int, index: int) -> nn.Module:
        return HyperConnections(STREAMS, dim=d_model)


class Fractions(ForeignDepth):
    """HyperConnections with num_fracs=2: a new model is not the plain one."""

    starts_as = "exact"
    multiple_of = 2

    def __init__(self, d_model: int, sublayers: int) -> None:
        super().__init__(d_model, sublayers)
        layers = (HyperConnections(1, dim=d_model, layer_index=index, num_fracs=2) for index in range(sublayers))
        self.layers = nn.ModuleList(layers)

    def read(self, index: int, state: Tensor) -> tuple[Tensor, Any]:
        view, streams, gates = self.layers[index].width_connection(state)
        return view, (streams, gates["beta"])

    def write(self, index: int, state: Tensor, update: Tensor, carry: Any) -> Tensor:
        streams, beta = carry
        return self.layers[index].depth_connection(update, streams, beta=beta)


class FractionsMended(Fractions):
    """The same, mended: each fraction at first reads, keeps and writes itself."""

    def __init__(self, d_model: int, sublayers: int) -> None:
        super().__init__(d_model, sublayers)
        own = torch.eye(2)
        for layer in self.layers:
            # The order in which the columns are used: (fraction, [input, residual]).
            layer.static_alpha.data.copy_(torch.stack((own, own), dim=-1).flatten(1))

    def read(self, index: int, state: Tensor) -> tuple[Tensor, Any]:
        view, (streams, beta) = super().read(index, state)
        return view, (streams, beta * torch.eye(2, dtype=state.dtype).unsqueeze(1))


class Manifold(_Wrapped):
    """mHCv2: a new model multiplies every update with 1.46; its norm is computed in half precision."""

    def layer(self, d_model: int, index: int) -> nn.Module:
        return mHCv2.mHC(STREAMS, dim=d_model, layer_index=index)

    def enter(self, embeddings: Tensor) -> Tensor:
        return embeddings.unsqueeze(-2).expand(*embeddings.shape[:-1], STREAMS, -1)

    def leave(self, state: Tensor) -> Tensor:
        return state.sum(-2)


class ManifoldMended(Manifold):
    """mHCv2, mended: write gates start at one; gates of one number, statistics in float32."""

    mended = True

    def layer(self, d_model: int, index: int) -> nn.Module:
        layer: Any = super().layer(d_model, index)
        nn.init.zeros_(layer.static_beta)
        return layer
