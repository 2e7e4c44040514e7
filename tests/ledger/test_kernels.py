"""Kernels and bytes that are counted without memory are those of a real pass."""

import itertools

import pytest
from torch.utils._pytree import tree_map

from twoaxis.core.cost import Shape
from twoaxis.core.measure import Operations
from twoaxis.core.position import LayerStack
from twoaxis.depth import DEPTH, AttentionResidualsConfig, DepthConfig, ResidualConfig
from twoaxis.ledger.meter import Kernels, moved
from twoaxis.ledger.stack import trace_stack
from twoaxis.model.trace import sublayer_list, trace
from twoaxis.testing.toy import decoder_config, toy_decoder, toy_tokens

EXAMPLES = [pytest.param(row.example(name), id=f"{row.kind}-{name}") for row in DEPTH for name in list(row.examples)[-1:]]


@pytest.mark.parametrize("depth", EXAMPLES)
def test_counts_without_memory_are_those_of_real_tensors(depth: DepthConfig) -> None:
    model, tokens = toy_decoder(depth), toy_tokens(batch=1, tokens=1009)
    counted = trace_stack(model.config.depth, model.config.stack, Shape(1, 1009, 8), backward=True)
    run = trace(model, tokens)
    for index, sublayer in enumerate(sublayer_list(model)):
        mixer, state = sublayer.depth, run.states[index]
        # Not slices of what the sublayer projected side by side, which some operations would copy first.
        heads, update = tree_map(lambda t: t.contiguous(), (run.heads[index], run.updates[index]))
        real: list[Kernels] = []
        with Operations(lambda operation: real.extend([moved(operation)] if operation.moves else [])):  # noqa: B023
            _, carry, _ = mixer.read(state, run.layout)
            if mixer.mixes_heads:
                _, state = mixer.mix_heads(heads, run.contexts[index], state, run.layout)
            mixer.write(state, update, run.contexts[index], carry)
        assert sum(real, Kernels()) == counted.sublayers[index].forward


def test_one_stream_adds_in_one_kernel() -> None:
    found = trace_stack(ResidualConfig(), LayerStack(8, 1e-6, (1,)), Shape(1, 5, 4), backward=True)
    assert found.sublayers[0].forward == Kernels(1, 5 * 3 * 8 * 4)
    assert found.ends.forward.count == 0


def test_a_full_history_moves_more_at_every_sublayer() -> None:
    found = trace_stack(AttentionResidualsConfig(), LayerStack(8, 1e-6, (2,) * 4), Shape(1, 9, 2), backward=True)
    moved_bytes = [operation.forward.bytes for operation in found.sublayers]
    assert all(later > earlier for earlier, later in itertools.pairwise(moved_bytes))
    assert all(operation.backward.bytes > 0 for operation in found.sublayers)


def test_backward_passes_differ_where_less_is_added() -> None:
    """The keys and values of the last layer enter no later state, so that their gradients come from one place."""
    config = decoder_config(DEPTH["depth_attention"].example("paper"), n_layers=4)
    found = trace_stack(config.depth, config.stack, Shape(1, 5, 2), parts=config.parts, backward=True)
    counts = [operation.backward.count for operation in found.sublayers[2::2]]
    assert counts == [counts[0], counts[0], counts[0] - 2]


def test_gradients_of_shared_parameters_are_added() -> None:
    """All layers of this form share three parameters, whose gradients the second layer and each later one add."""
    config = decoder_config(DEPTH["depth_attention"].example("itself"), n_layers=4)
    found = trace_stack(config.depth, config.stack, Shape(1, 5, 2), parts=config.parts, backward=True)
    counts = [operation.backward.count for operation in found.sublayers[::2]]
    assert counts == [counts[0], *[counts[0] + 3] * 3]
