"""Conformance checks that every mixer must pass, for this package's tables, for yours, and for modules of other libraries.

`run_checks([row], depth_checks())` tests a new row, and `check_foreign` an adapter of a module of another library; every
tolerance is in `testing.conformance.BUDGETS`, and `testing.faults` has the planted faults that show that each check can fail.
"""

from collections.abc import Iterator

from twoaxis.testing import (
    causality,
    construction,
    declared_costs,
    decoding,
    dtypes,
    gradient,
    memory,
    mixing_design,
    sharded,
    state,
)
from twoaxis.testing.conformance import Check, CheckFailed, CheckResult, iterate_checks, run_checks
from twoaxis.testing.foreign import FOREIGN_CHECKS, Adapter, ForeignDepth, ForeignSequence, float64_stays, iterate_foreign

_EVERY_AXIS = (
    construction.config_round_trip,
    construction.parameters_are_declared,
    construction.deterministic_for_seed,
    construction.meta_init_equals_direct,
    construction.checkpoint_round_trip,
    causality.causal_along_positions,
    causality.document_isolation,
    decoding.incremental_decode,
    decoding.left_padding,
    decoding.long_prefill,
    decoding.static_cache_decode,
    causality.batch_invariance,
    causality.edge_shapes,
    causality.empty_input,
    gradient.gradients_reach_parameters,
    gradient.fused_equals_reference,
    gradient.recompute_parity,
    dtypes.dtype_is_kept,
    dtypes.runs_under_autocast,
    memory.decoder_saved_bytes_are_exact,
    memory.recomputing_bytes_are_exact,
    gradient.compiles_once,
    sharded.sharded_equals_whole,
    sharded.tensor_parallel_equals_whole,
)


def depth_checks() -> tuple[Check, ...]:
    """The checks of a depth mixer."""
    return (
        *_EVERY_AXIS,
        construction.init_equivalence,
        construction.init_survives_host,
        causality.causal_along_depth,
        decoding.depth_cache_is_exact,
        state.state_is_immutable,
        memory.metered_states_are_real,
        memory.metered_traffic_is_real,
        state.pipeline_cut,
        state.graph_is_released,
        gradient.gradcheck_read_write,
        dtypes.depth_statistics_are_wide,
        declared_costs.depth_params_are_exact,
        declared_costs.depth_flops_are_exact,
        mixing_design.declared_weights_are_measured,
        mixing_design.declared_sharing_is_measured,
        mixing_design.declared_window_is_measured,
        mixing_design.declared_heads_are_measured,
    )


_EVERY_MIXER = (
    causality.receptive_field_is_exact,
    decoding.chunk_size_invariance,
    decoding.chunked_gradients,
    decoding.forked_cache,
    decoding.cache_size,
    gradient.gradcheck_mixer,
    declared_costs.mixer_costs_are_exact,
    memory.mixer_saved_bytes_are_exact,
)
"""The checks of a mixer in a sublayer, or in a place inside one."""


def sequence_checks() -> tuple[Check, ...]:
    """The checks of a sequence mixer."""
    return (
        *_EVERY_AXIS,
        *_EVERY_MIXER,
        dtypes.mixer_statistics_are_wide,
        construction.sublayer_init_equivalence,
        causality.window_covers_all,
        causality.position_offset_invariance,
    )


def feed_forward_checks() -> tuple[Check, ...]:
    """The checks of a feed-forward."""
    return (*_EVERY_AXIS, *_EVERY_MIXER)


def local_checks() -> tuple[Check, ...]:
    """The checks of a local mixer inside a sublayer."""
    return (
        *_EVERY_AXIS,
        *_EVERY_MIXER,
        dtypes.mixer_statistics_are_wide,
        construction.local_init_equivalence,
        causality.window_covers_all,
        causality.position_offset_invariance,
    )


def foreign_checks(adapter: Adapter) -> tuple[Check, ...]:
    """The checks of a module of another library: those of its axis, and those that only such modules need."""
    return (*FOREIGN_CHECKS, *(depth_checks() if issubclass(adapter, ForeignDepth) else sequence_checks()))


def check_foreign(adapter: Adapter, slow: bool = True) -> Iterator[CheckResult]:
    """Runs every check of its axis on a module of another library and yields each result as it is known.

    A check that the adapter cannot support is not run: `ok` is None, and the message gives the reason.

    Args:
        adapter: a subclass of `ForeignDepth` or `ForeignSequence`.
        slow: whether to run the slow checks too, such as those that compile.
    """
    return iterate_foreign(adapter, foreign_checks(adapter), slow)


__all__ = [
    "FOREIGN_CHECKS",
    "Adapter",
    "Check",
    "CheckFailed",
    "CheckResult",
    "ForeignDepth",
    "ForeignSequence",
    "check_foreign",
    "depth_checks",
    "feed_forward_checks",
    "float64_stays",
    "foreign_checks",
    "iterate_checks",
    "local_checks",
    "run_checks",
    "sequence_checks",
]
