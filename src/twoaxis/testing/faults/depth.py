"""Depth mixers that equal the plain residual except for one fault."""

from dataclasses import replace
from typing import Any, ClassVar

import torch
from pydantic import ConfigDict
from torch import Tensor

from twoaxis.core.cost import Cost, Shape
from twoaxis.core.design import InitEquivalence
from twoaxis.core.parameters import Constant
from twoaxis.core.position import LayerStack, SublayerPosition
from twoaxis.depth import DepthConfig, ResidualConfig
from twoaxis.depth.base import Layout, StreamEnds
from twoaxis.depth.residual import Residual
from twoaxis.testing.conformance import CheckFailed, Fault
from twoaxis.testing.toy import TooSteep


class _Planted(ResidualConfig):
    """A residual with another mixer or another declaration."""

    mixer: ClassVar[type[Residual]] = Residual
    relation: ClassVar[Any] = "exact"
    ends: ClassVar[type[StreamEnds]] = StreamEnds
    misstated: ClassVar[Cost] = Cost()

    @property
    def init_equivalence(self) -> InitEquivalence:
        return InitEquivalence(self.relation, "a planted fault or its twin")

    def cost(self, site: SublayerPosition, shape: Shape) -> Cost:
        return Cost(params=sum(p.numel() for p in self._mixer(site.d_model).parameters())) + self.misstated

    def build(self, stack: LayerStack) -> tuple[list[Residual], StreamEnds]:
        return [self._mixer(stack.d_model) for _ in stack.sites], self.ends()

    def _mixer(self, d_model: int) -> Residual:
        mixer = self.mixer()
        if isinstance(mixer, _WithParameters):
            mixer.add_parameters(d_model)
        return mixer


class _WithParameters(Residual):
    def add_parameters(self, d_model: int) -> None:
        """Adds them."""


class _PositionLeak(Residual):
    def read(self, state: Tensor, layout: Layout = None, cache: Any = None) -> tuple[Tensor, None, Any]:
        return state + 0.1 * state.mean(dim=1, keepdim=True), None, cache


class _PastLeak(Residual):
    def read(self, state: Tensor, layout: Layout = None, cache: Any = None) -> tuple[Tensor, None, Any]:
        return state + 0.1 * state.cumsum(dim=1), None, cache


class _PastLeakConfig(_Planted):
    """A class of the module, which other processes can be sent."""

    mixer: ClassVar[type[Residual]] = _PastLeak


class _Gated(Residual):
    """Gates the state by itself."""

    def read(self, state: Tensor, layout: Layout = None, cache: Any = None) -> tuple[Tensor, None, Any]:
        return state * state[..., :1].sigmoid(), None, cache


class _BatchLeak(Residual):
    def read(self, state: Tensor, layout: Layout = None, cache: Any = None) -> tuple[Tensor, None, Any]:
        return state + 0.1 * state.mean(dim=0, keepdim=True), None, cache


class _BatchLeakConfig(_Planted):
    """A class of the module, which other processes can be sent."""

    mixer: ClassVar[type[Residual]] = _BatchLeak


class _DepthLeak(Residual):
    """Reads the last write of any sublayer, possibly of a later one."""

    last: ClassVar[Tensor | None] = None

    def read(self, state: Tensor, layout: Layout = None, cache: Any = None) -> tuple[Tensor, None, Any]:
        last = _DepthLeak.last
        return (state if last is None or last.shape != state.shape else state + 0.1 * last), None, cache

    def write(self, state: Tensor, update: Tensor, context: Any, carry: None) -> Tensor:
        _DepthLeak.last = update.detach()
        return state + update


class _Dead(_WithParameters):
    def add_parameters(self, d_model: int) -> None:
        self.unused = self.parameter("unused", (d_model,), Constant(0.0), "gate")


class _Used(_WithParameters):
    def add_parameters(self, d_model: int) -> None:
        self.offset = self.parameter("offset", (d_model,), Constant(0.0), "gate")

    def read(self, state: Tensor, layout: Layout = None, cache: Any = None) -> tuple[Tensor, None, Any]:
        return state + self.offset, None, cache


class _Scalar(_WithParameters):
    def add_parameters(self, d_model: int) -> None:
        self.weight = self.parameter("weight", (), Constant(1.0), "mixing")

    def read(self, state: Tensor, layout: Layout = None, cache: Any = None) -> tuple[Tensor, None, Any]:
        return state * self.weight, None, cache


class _Linear(_WithParameters):
    """Depends on the zero initial value of an nn.Linear, which hosts overwrite."""

    def add_parameters(self, d_model: int) -> None:
        self.extra = self.linear("extra", d_model, d_model, std=0.0)

    def read(self, state: Tensor, layout: Layout = None, cache: Any = None) -> tuple[Tensor, None, Any]:
        return state + self.extra(state), None, cache


class _Buffer(_WithParameters):
    """Keeps a constant that `initialise` does not set."""

    persistent: ClassVar[bool] = False

    def add_parameters(self, d_model: int) -> None:
        self.register_buffer("scale", torch.ones(d_model), persistent=self.persistent)

    def read(self, state: Tensor, layout: Layout = None, cache: Any = None) -> tuple[Tensor, None, Any]:
        return state * self.get_buffer("scale"), None, cache


class _SavedBuffer(_Buffer):
    persistent: ClassVar[bool] = True


class _Wider(Residual):
    def read(self, state: Tensor, layout: Layout = None, cache: Any = None) -> tuple[Tensor, None, Any]:
        return (state.float() if state.dtype == torch.bfloat16 else state), None, cache


class _HalfStatistics(Residual):
    def read(self, state: Tensor, layout: Layout = None, cache: Any = None) -> tuple[Tensor, None, Any]:
        return state * torch.rsqrt(state.square().mean(-1, keepdim=True) + 1e-6), None, cache


class _WideStatistics(Residual):
    def read(self, state: Tensor, layout: Layout = None, cache: Any = None) -> tuple[Tensor, None, Any]:
        wide = state.double()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(state.dtype), None, cache


class _HalfUnderAutocast(_WideStatistics):
    """Computes statistics in the precision of autocast where that is on."""

    def read(self, state: Tensor, layout: Layout = None, cache: Any = None) -> tuple[Tensor, None, Any]:
        if not torch.is_autocast_enabled("cpu"):
            return super().read(state, layout, cache)
        half = state.to(torch.get_autocast_dtype("cpu"))
        return (half * torch.rsqrt(half.square().mean(-1, keepdim=True) + 1e-6)).to(state.dtype), None, cache


class _InPlace(Residual):
    def write(self, state: Tensor, update: Tensor, context: Any, carry: None) -> Tensor:
        return state.add_(update)


class _Halved(Residual):
    def write(self, state: Tensor, update: Tensor, context: Any, carry: None) -> Tensor:
        return state + 0.5 * update


class _Copies(Residual):
    unseen: ClassVar[bool] = True
    """Whether meta tensors take another path."""

    def read(self, state: Tensor, layout: Layout = None, cache: Any = None) -> tuple[Tensor, None, Any]:
        return state if self.unseen and state.is_meta else state.clone(), None, cache


class _OpenlyCopies(_Copies):
    unseen = False


class _ReadsContext(Residual):
    """Reads a source that it does not need."""

    unseen: ClassVar[bool] = True

    def write(self, state: Tensor, update: Tensor, context: Any, carry: None) -> Tensor:
        return state + update if self.unseen and state.is_meta else state + update + 0.0 * context


class _OpenlyReadsContext(_ReadsContext):
    unseen = False


class _WideState(Residual):
    """Keeps the stream in float32 where it has no memory, and in the dtype of the model elsewhere."""

    def read(self, state: Tensor, layout: Layout = None, cache: Any = None) -> tuple[Tensor, None, Any]:
        return (state.bfloat16() if state.dtype == torch.float32 else state), None, cache

    def write(self, state: Tensor, update: Tensor, context: Any, carry: None) -> Tensor:
        return (state.float() if state.is_meta and state.dtype == torch.bfloat16 else state) + update


class _Squares(Residual):
    """Saves the update for its gradient."""

    unseen: ClassVar[bool] = True

    def write(self, state: Tensor, update: Tensor, context: Any, carry: None) -> Tensor:
        return state + (update if self.unseen and update.is_meta else update * update)


class _OpenlySquares(_Squares):
    unseen = False


class _HandsOn(Residual):
    """Returns the state unchanged, except on the meta device."""

    unseen: ClassVar[bool] = True

    def write(self, state: Tensor, update: Tensor, context: Any, carry: None) -> Tensor:
        return state + update if self.unseen and state.is_meta else state


class _OpenlyHandsOn(_HandsOn):
    unseen = False


class _Stash(Residual):
    def write(self, state: Tensor, update: Tensor, context: Any, carry: None) -> Tensor:
        self.kept = state
        return state + update


class _CountsCalls(Residual):
    calls = 0

    def read(self, state: Tensor, layout: Layout = None, cache: Any = None) -> tuple[Tensor, None, Any]:
        self.calls += 1
        return state * (1 + 0.01 * self.calls), None, cache


class _EvenOnly(Residual):
    def read(self, state: Tensor, layout: Layout = None, cache: Any = None) -> tuple[Tensor, None, Any]:
        return state.unflatten(-1, (-1, 2)).flatten(-2), None, cache


class _GuessesWidth(Residual):
    """Leaves torch to find a size, which no elements leave open."""

    def read(self, state: Tensor, layout: Layout = None, cache: Any = None) -> tuple[Tensor, None, Any]:
        return state.view(*state.shape[:2], -1), None, cache


class _OneDtype(Residual):
    def write(self, state: Tensor, update: Tensor, context: Any, carry: None) -> Tensor:
        if state.dtype != update.dtype:
            raise TypeError(f"{state.dtype} and {update.dtype}")
        return state + update


class _GraphBreak(Residual):
    def read(self, state: Tensor, layout: Layout = None, cache: Any = None) -> tuple[Tensor, None, Any]:
        torch._dynamo.graph_break()
        return state, None, cache


class _WrongGradient(Residual):
    def read(self, state: Tensor, layout: Layout = None, cache: Any = None) -> tuple[Tensor, None, Any]:
        return TooSteep.apply(state), None, cache


class _Hoards(Residual):
    """Caches every token and uses none."""

    def read(self, state: Tensor, layout: Layout = None, cache: Any = None) -> tuple[Tensor, None, Any]:
        return state, None, None if cache is None else (*cache, state.clone())


class _HidingEnds(StreamEnds):
    """Passes the embeddings outside the state."""

    def enter(self, embeddings: Tensor, layout: Layout = None, cache: Any = None) -> tuple[Tensor, Any]:
        _ReadsHidden.hidden = embeddings
        return embeddings * 1.0, cache


class _ReadsHidden(Residual):
    hidden: ClassVar[Tensor] = torch.zeros(1)

    def read(self, state: Tensor, layout: Layout = None, cache: Any = None) -> tuple[Tensor, None, Any]:
        return state + 0.1 * _ReadsHidden.hidden, None, cache


def _planted(mixer: type[Residual] = Residual, **statements: Any) -> DepthConfig:
    return type("PlantedConfig", (_Planted,), {"mixer": mixer, **statements, "__module__": __name__})()


_WITH_HISTORY = property(lambda config: replace(ResidualConfig().design, window="all outputs"))
_WITH_HEADS = property(lambda config: replace(ResidualConfig().design, heads="each"))


def _fault(
    name: str, caught_by: str, faulty: DepthConfig, twin: DepthConfig | None = None, raises: type[Exception] = CheckFailed
) -> Fault:
    return Fault(name, faulty, twin or _planted(), tuple(caught_by.split()), raises)


class _Unfrozen(ResidualConfig):
    model_config = ConfigDict(frozen=False)


DEPTH_FAULTS = (
    _fault("changeable configuration", "config_round_trip", _Unfrozen()),
    _fault("position leak", "causal_along_positions incremental_decode document_isolation", _planted(_PositionLeak)),
    _fault(
        "leak from the past",
        "document_isolation left_padding incremental_decode declared_weights_are_measured tensor_parallel_equals_whole",
        _PastLeakConfig(),
        _Planted(),
    ),
    _fault("batch leak", "batch_invariance sharded_equals_whole", _BatchLeakConfig(), _Planted()),
    _fault("depth leak", "causal_along_depth deterministic_for_seed", _planted(_DepthLeak)),
    _fault("dead parameter", "gradients_reach_parameters", _planted(_Dead), _planted(_Used)),
    _fault("parameter without dimensions", "parameters_are_declared", _planted(_Scalar)),
    _fault("init broken by host", "init_survives_host", _planted(_Linear)),
    _fault("false claim of equivalence", "init_equivalence", _planted(_Halved), _planted(_Halved, relation="none")),
    _fault("false denial of equivalence", "init_equivalence", _planted(relation="none")),
    _fault("value that initialise does not set", "meta_init_equals_direct", _planted(_Buffer)),
    _fault("undeclared buffer", "checkpoint_round_trip parameters_are_declared", _planted(_SavedBuffer)),
    _fault("wrong dtype", "dtype_is_kept", _planted(_Wider), raises=RuntimeError),
    _fault(
        "statistics in half precision",
        "depth_statistics_are_wide",
        _planted(_HalfStatistics, relation="none"),
        _planted(_WideStatistics, relation="none"),
    ),
    _fault(
        "statistics in half precision under autocast",
        "depth_statistics_are_wide",
        _planted(_HalfUnderAutocast, relation="none"),
        _planted(_WideStatistics, relation="none"),
    ),
    _fault("one dtype only", "runs_under_autocast", _planted(_OneDtype), raises=TypeError),
    _fault("state written in place", "state_is_immutable", _planted(_InPlace)),
    _fault("state kept on the module", "graph_is_released", _planted(_Stash)),
    _fault("memory of earlier calls", "deterministic_for_seed recompute_parity", _planted(_CountsCalls)),
    _fault("information outside the state", "pipeline_cut", _planted(_ReadsHidden, ends=_HidingEnds), raises=RuntimeError),
    _fault("wrong gradient", "gradcheck_read_write", _planted(_WrongGradient)),
    _fault("even widths only", "edge_shapes", _planted(_EvenOnly), raises=RuntimeError),
    _fault("size that no rows leave open", "empty_input", _planted(_GuessesWidth), raises=RuntimeError),
    _fault("wrong parameter count", "depth_params_are_exact", _planted(misstated=Cost(params=1))),
    _fault("wrong flops", "depth_flops_are_exact", _planted(misstated=Cost(matmul_flops=1))),
    _fault(
        "tensor saved off the meta device",
        "decoder_saved_bytes_are_exact recomputing_bytes_are_exact",
        _planted(_Squares, relation="none"),
        _planted(_OpenlySquares, relation="none"),
    ),
    _fault("tensor shared off the meta device", "metered_states_are_real", _planted(_HandsOn), _planted(_OpenlyHandsOn)),
    _fault("another dtype off the meta device", "metered_states_are_real", _planted(_WideState)),
    _fault(
        "source read off the meta device", "metered_traffic_is_real", _planted(_ReadsContext), _planted(_OpenlyReadsContext)
    ),
    _fault("copy made off the meta device", "metered_traffic_is_real", _planted(_Copies), _planted(_OpenlyCopies)),
    _fault("undeclared gate", "declared_weights_are_measured", _planted(_Gated)),
    _fault("undeclared parameters", "declared_sharing_is_measured", _planted(_Used)),
    _fault("false claim of history", "declared_window_is_measured", _planted(design=_WITH_HISTORY)),
    _fault("false claim of heads", "declared_heads_are_measured", _planted(design=_WITH_HEADS)),
    _fault("growing cache", "depth_cache_is_exact", _planted(_Hoards)),
    _fault("graph break", "compiles_once", _planted(_GraphBreak)),
)
