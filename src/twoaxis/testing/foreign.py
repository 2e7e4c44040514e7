"""The checks on modules of other libraries: a small adapter makes one look like a mixer of this package.

`ForeignDepth` adapts what reads from and writes to a residual state, `ForeignSequence` what mixes along positions. The same
conformance checks run on an adapter as on our own mixers; a check that it cannot support is reported with the reason.

Letters: B batch, T position, D width.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from twoaxis.core.cost import Cost, Shape
from twoaxis.core.errors import ConfigError, problem
from twoaxis.core.layout import TokenLayout
from twoaxis.core.parameters import Declaration, DeclaredModule, Values, declarations
from twoaxis.core.position import LayerStack, SublayerPosition
from twoaxis.core.registry import Row
from twoaxis.depth.base import DepthConfig, DepthEnds, DepthMixer, InitEquivalence, Layout, MixingDesign, State
from twoaxis.sequence.base import SequenceConfig, SequenceMixer
from twoaxis.testing.conformance import Check, CheckResult, check, exactly, iterate_checks, require
from twoaxis.testing.measured import gradients
from twoaxis.testing.toy import noise, toy_decoder, toy_tokens

Relation = Literal["exact", "up_to_norm", "none"]


class Foreign(nn.Module):
    """What both adapters have; modules are built without dropout.

    Attributes:
        starts_as: the claim about a new model: `exact` (equal to the plain pre-norm model, or to one without this sublayer),
            `up_to_norm` (equal up to a factor that the next norm removes) or `none`; None claims nothing.
        dead: the reason why a parameter may have no gradient, by a pattern of its name such as "layers.0.*".
        multiple_of: the width must be a multiple of it.
    """

    starts_as: ClassVar[Relation | None] = None
    dead: ClassVar[Mapping[str, str]] = {}
    multiple_of: ClassVar[int] = 1

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Foreign":
        """Keeps the values of buffers, which `to_empty` would lose."""
        before = {name: buffer.clone() for name, buffer in self.named_buffers()}
        super()._apply(fn, recurse)
        for name, buffer in self.named_buffers():
            buffer.copy_(before[name])
        return self


class ForeignDepth(Foreign):
    """Adapts a depth mixer of another library: a subclass builds the modules of all sublayers, and calls them.

    A sublayer of the test model computes `input, carry = read(index, state)`, an update from the norm of the input, and
    `state = write(index, state, update, carry)`. The state is a tensor or nested tuples of tensors.

    Args:
        d_model: D, the width of the model.
        sublayers: their number; attention and feed-forward in turn.

    Example:
        >>> from twoaxis.testing import ForeignDepth, check_foreign
        >>> class Halved(ForeignDepth):
        ...     starts_as = "exact"
        ...
        ...     def write(self, index, state, update, carry):
        ...         return state + 0.5 * update
        >>> next(result.name for result in check_foreign(Halved, slow=False) if result.ok is False)
        'init_equivalence'
    """

    def __init__(self, d_model: int, sublayers: int) -> None:
        super().__init__()

    def enter(self, embeddings: Float[Tensor, "B T D"]) -> State:
        """Returns the state before the first sublayer; by default the embeddings."""
        return embeddings

    def read(self, index: int, state: State) -> tuple[Float[Tensor, "B T D"], Any]:
        """Returns the input of a sublayer before its norm, and anything that `write` needs; by default the state."""
        return state, None

    def write(self, index: int, state: State, update: Float[Tensor, "B T D"], carry: Any) -> State:
        """Returns the next state."""
        raise NotImplementedError

    def leave(self, state: State) -> Float[Tensor, "B T D"]:
        """Returns the hidden states before the final norm; by default the state."""
        return state


class ForeignSequence(Foreign):
    """Adapts a sequence mixer of another library: subclass it, build the module, and call it in `forward`.

    With `new_cache` and `step` its decoding is checked too, and with `packed` its isolation of documents.

    Args:
        d_model: D, the width of the model.

    Attributes:
        receptive_field: tokens that an output can depend on, its own included; None without a bound.

    Example:
        >>> from twoaxis.testing import ForeignSequence, check_foreign
        >>> class Mean(ForeignSequence):
        ...     def forward(self, x):
        ...         return x.cumsum(1) / torch.arange(1, x.shape[1] + 1, dtype=x.dtype).view(-1, 1)
        >>> results = {result.name: result for result in check_foreign(Mean, slow=False)}
        >>> results["causal_along_positions"].ok, results["forked_cache"].message
        (True, 'not run: the adapter has no step with a cache')
    """

    receptive_field: ClassVar[int | None] = None

    def __init__(self, d_model: int) -> None:
        super().__init__()

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        """Returns the update."""
        raise NotImplementedError

    def packed(self, x: Float[Tensor, "B T D"], documents: Int[Tensor, "B T"]) -> Float[Tensor, "B T D"]:
        """Returns the update of rows packed with several documents, given the number of the document of each token."""
        raise NotImplementedError

    def new_cache(self) -> Any:
        """Returns the cache before the first token."""
        raise NotImplementedError

    def step(self, x: Float[Tensor, "B T D"], cache: Any, start: int) -> tuple[Float[Tensor, "B T D"], Any]:
        """Returns the update of one or more tokens from position `start` on, and the next cache."""
        raise NotImplementedError


@contextmanager
def float64_stays() -> Iterator[None]:
    """Lets `Tensor.float` leave float64 as it is, for modules that compute statistics in float32 whatever the model's dtype is.

    The checks run in float64, where such a module differs from itself by its rounding, and gradients from finite differences.
    An adapter calls the module within it to see past that. Compiled code does not notice it.
    """
    narrow = Tensor.float

    def widest(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return tensor if tensor.dtype == torch.float64 else narrow(tensor, *args, **kwargs)

    Tensor.float = widest  # type: ignore[method-assign]
    try:
        yield
    finally:
        Tensor.float = narrow  # type: ignore[method-assign]


Adapter = type[ForeignDepth] | type[ForeignSequence]


def iterate_foreign(adapter: Adapter, checks: Sequence[Check], slow: bool) -> Iterator[CheckResult]:
    """Runs these checks on an adapter, those aside that it cannot support, and yields each result as it is known."""
    row, reasons = foreign_row(adapter), not_run(adapter)
    for one in checks:
        reason = reasons.get(one.name, "it is slow, and this is a quick run" if one.slow and not slow else None)
        if reason is None:
            yield from iterate_checks([row], [one])
        else:
            yield CheckResult(row.kind, "default", one.name, None, f"not run: {reason}", 0.0)


_UNDECLARED = "the adapter states nothing that it could be compared with"
_OUR_PLANNER = "it compares our planner with a mixer of ours"
_OTHER_RANKS = "ranks build mixers from a configuration, which the adapter has not"
_NOT_RUN = {
    "config_round_trip": "the module has no configuration of ours",
    "parameters_are_declared": "the module declares no initial values; parameters_can_be_sharded is run instead",
    "meta_init_equals_direct": "the adapter builds the module on the CPU",
    "fused_equals_reference": "the module has one engine",
    "empty_input": "a library seldom promises a result of no tokens",
    "decoder_saved_bytes_are_exact": _OUR_PLANNER,
    "recomputing_bytes_are_exact": _OUR_PLANNER,
    "sharded_equals_whole": _OTHER_RANKS,
    "tensor_parallel_equals_whole": _OTHER_RANKS,
}
_NOT_RUN_IN_DEPTH = {
    "long_prefill": "the adapter keeps no tokens",
    "depth_cache_is_exact": "the adapter keeps no tokens",
    "metered_states_are_real": _OUR_PLANNER,
    "metered_traffic_is_real": _OUR_PLANNER,
    "depth_params_are_exact": _UNDECLARED,
    "depth_flops_are_exact": _UNDECLARED,
    "declared_weights_are_measured": _UNDECLARED,
    "declared_sharing_is_measured": _UNDECLARED,
    "declared_window_is_measured": _UNDECLARED,
    "declared_heads_are_measured": _UNDECLARED,
}
_NOT_RUN_IN_SEQUENCE = {
    "cache_size": _OUR_PLANNER,
    "mixer_saved_bytes_are_exact": _OUR_PLANNER,
    "mixer_costs_are_exact": _UNDECLARED,
    "window_covers_all": "the adapter has one window",
    "position_offset_invariance": "the adapter takes no positions without a cache",
    "incremental_decode": "the adapter has no padding; chunk_size_invariance decodes without it",
    "left_padding": "the adapter has no padding",
    "static_cache_decode": "the adapter has no padding",
}
_DECODING = ("long_prefill", "chunk_size_invariance", "chunked_gradients", "forked_cache")
_STARTS = ("init_equivalence", "init_survives_host", "sublayer_init_equivalence")


def not_run(adapter: Adapter) -> dict[str, str]:
    """The checks that an adapter cannot support, each with the reason."""
    found = _NOT_RUN | (_NOT_RUN_IN_DEPTH if issubclass(adapter, ForeignDepth) else _NOT_RUN_IN_SEQUENCE)
    if adapter.starts_as is None:
        found |= dict.fromkeys(_STARTS, "the adapter claims nothing about a new model; set starts_as")
    if issubclass(adapter, ForeignSequence):
        if adapter.step is ForeignSequence.step:
            found |= dict.fromkeys(_DECODING, "the adapter has no step with a cache")
        if adapter.packed is ForeignSequence.packed:
            found["document_isolation"] = "the adapter takes no documents"
    return found


@check
def no_uninitialised_memory(config: Any) -> None:
    """No parameter, buffer or result depends on memory that nothing was written to: filled with NaN, all stay finite."""
    with _fresh_memory_is_nan():
        model = toy_decoder(config, perturbed=False)
        values = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        exactly("values that are not finite", [name for name, value in values.items() if not value.isfinite().all()], [])
        exactly("logits: finite", bool(model(toy_tokens()).isfinite().all()), True)


@check
def parameters_can_be_sharded(config: Any) -> None:
    """Every parameter has at least one dimension, which FSDP needs to divide it."""
    found = [name for name, parameter in toy_decoder(config).named_parameters() if not parameter.ndim]
    require(not found, f"parameters without a dimension: {len(found)} ({', '.join(found[:1])} first), must be none")


@check
def gradients_reach_columns(config: Any) -> None:
    """Every column of every matrix has a gradient: a matrix that is computed and not applied has none, while the loss falls."""
    model = toy_decoder(config, tie_embeddings=False)
    logits = model(toy_tokens())
    found = gradients(model, (logits * noise(tuple(logits.shape), "loss")).sum())
    for name, _, declaration in declarations(model):
        gradient = found[name]
        if declaration.dead is not None or gradient.ndim < 2:
            continue
        columns = gradient.abs().flatten(0, -2).amax(0)
        dead = [at for at, size in enumerate(columns.tolist()) if not size]
        require(not dead, f"gradient of {name}: 0 in columns {dead} of {len(columns)}, must not be")


FOREIGN_CHECKS = (no_uninitialised_memory, parameters_can_be_sharded, gradients_reach_columns)
"""Checks that only modules of other libraries need."""


@contextmanager
def _fresh_memory_is_nan() -> Iterator[None]:
    """Makes torch fill memory that it hands out, by `torch.empty` for example, with NaN."""
    before, only_warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    # A property, of which type checkers know nothing.
    memory: Any = torch.utils.deterministic
    filled, memory.fill_uninitialized_memory = memory.fill_uninitialized_memory, True
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=only_warns)
        memory.fill_uninitialized_memory = filled


def foreign_row(adapter: Adapter) -> Row[Any]:
    """The row of an adapter, as a table of mixers has one."""
    base = _DepthOfAdapter if issubclass(adapter, ForeignDepth) else _SequenceOfAdapter
    members = {"__module__": __name__, "__annotations__": {"kind": str}, "kind": adapter.__name__, "adapter": adapter}
    config: Any = type(f"{adapter.__name__}Config", (base,), members)
    return Row(config, (inspect.getdoc(adapter) or adapter.__name__).partition("\n")[0], {"default": {}}, status="contrib")


def _claim(adapter: Adapter) -> InitEquivalence:
    return InitEquivalence(adapter.starts_as or "none", "the claim of the adapter")


def _check_width(adapter: Adapter, d_model: int) -> None:
    if d_model % adapter.multiple_of:
        allowed = f"a multiple of {adapter.multiple_of}"
        raise ConfigError(problem("d_model", d_model, allowed, f"correct multiple_of of {adapter.__name__}"))


def _adapted(owner: DeclaredModule, adapter: Callable[..., Any], *sizes: int) -> Any:
    """Builds the module with the values of torch's seed 0, and declares these for the attribute `module` of the owner."""
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = adapter(*sizes)
    for name, parameter in module.named_parameters():
        reason = next((why for pattern, why in module.dead.items() if fnmatchcase(name, pattern)), None)
        start = Values(tuple(parameter.detach().flatten().tolist()))
        owner.declarations[f"module.{name}"] = Declaration(start, "mixing", reason)
    return module


class _DepthOfAdapter(DepthConfig):
    adapter: ClassVar[type[ForeignDepth]]

    @property
    def design(self) -> MixingDesign:
        some = "not stated"
        return MixingDesign(some, some, some, some, some, "sublayer", some, position=True)

    @property
    def init_equivalence(self) -> InitEquivalence:
        return _claim(self.adapter)

    def cost(self, site: SublayerPosition, shape: Shape) -> Cost:
        return Cost()

    def prepare(self, stack: LayerStack) -> LayerStack:
        _check_width(self.adapter, stack.d_model)
        return super().prepare(stack)

    def build(self, stack: LayerStack) -> tuple[Sequence[DepthMixer], DepthEnds]:
        ends = _AdaptedEnds(self.adapter, stack)
        return [_AdaptedMixer(ends.module, site.index) for site in stack.sites], ends


class _AdaptedEnds(DepthEnds):
    """Owns the module of all sublayers."""

    shares_parameters = True

    def __init__(self, adapter: type[ForeignDepth], stack: LayerStack) -> None:
        super().__init__()
        self.module: ForeignDepth = _adapted(self, adapter, stack.d_model, stack.n_sublayers)

    def enter(self, embeddings: Tensor, layout: Layout = None, cache: Any = None) -> tuple[State, Any]:
        return self.module.enter(embeddings), cache

    def leave(self, state: State, layout: Layout = None, cache: Any = None) -> tuple[Tensor, Any]:
        return self.module.leave(state), cache


class _AdaptedMixer(DepthMixer):
    def __init__(self, module: ForeignDepth, index: int) -> None:
        super().__init__()
        # In a tuple, so that the ends alone own it.
        self._shared, self.index = (module,), index

    def read(self, state: State, layout: Layout = None, cache: Any = None) -> tuple[Tensor, Any, Any]:
        return *self._shared[0].read(self.index, state), cache

    def write(self, state: State, update: Tensor, context: Any, carry: Any) -> State:
        return self._shared[0].write(self.index, state, update, carry)


class _SequenceOfAdapter(SequenceConfig):
    adapter: ClassVar[type[ForeignSequence]]

    @property
    def receptive_field(self) -> int | None:
        return self.adapter.receptive_field

    @property
    def init_equivalence(self) -> InitEquivalence:
        return _claim(self.adapter)

    def check(self, d_model: int) -> None:
        _check_width(self.adapter, d_model)

    def cost(self, site: SublayerPosition, shape: Shape) -> Cost:
        return Cost()

    def build(self, site: SublayerPosition) -> SequenceMixer:
        return _AdaptedSequence(self.adapter, site.d_model)


class _AdaptedSequence(SequenceMixer):
    def __init__(self, adapter: type[ForeignSequence], d_model: int) -> None:
        super().__init__()
        self.module: ForeignSequence = _adapted(self, adapter, d_model)

    def new_cache(self) -> Any:
        return self.module.new_cache()

    def forward(self, context: Any, layout: TokenLayout, cache: Any = None) -> tuple[Tensor, Any]:
        if cache is not None:
            return self.module.step(context, cache, int(layout.positions[0, 0]))
        if layout.documents is not None:
            return self.module.packed(context, layout.documents), None
        return self.module(context), None
