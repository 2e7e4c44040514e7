"""Kernels and bytes that are counted without memory are those of a real pass."""

import itertools

import pytest
import torch
from torch.utils._pytree import tree_map

from twoaxis.core.site import Stack
from twoaxis.depth import DEPTH, AttentionResidualsConfig, DepthConfig, ResidualConfig
from twoaxis.model.trace import sublayer_list, trace
from twoaxis.planner.eager import KernelCounter, eager_depth
from twoaxis.testing.toy import toy_decoder, toy_tokens

EXAMPLES = [pytest.param(row.example(name), id=f"{row.kind}-{name}") for row in DEPTH for name in list(row.examples)[-1:]]


@pytest.mark.parametrize("depth", EXAMPLES)
def test_counts_without_memory_are_those_of_real_tensors(depth: DepthConfig) -> None:
    model, tokens = toy_decoder(depth), toy_tokens(batch=1, tokens=1009)
    counted = eager_depth(model.config.depth, model.config.stack, torch.float64)
    run = trace(model, tokens)
    for index, sublayer in enumerate(sublayer_list(model)):
        mixer, state = sublayer.depth, run.states[index]
        # Not slices of what the sublayer projected side by side, which some operations would copy first.
        heads, update = tree_map(lambda t: t.contiguous(), (run.heads[index], run.updates[index]))
        with KernelCounter(1009) as real:
            _, carry, _ = mixer.read(state)
            if mixer.mixes_heads:
                _, state = mixer.mix_heads(heads, run.contexts[index], state)
            mixer.write(state, update, run.contexts[index], carry)
        assert real.kernels == counted[index].forward


def test_one_stream_adds_in_one_kernel() -> None:
    add, ends = eager_depth(ResidualConfig(), Stack(8, 1e-6, (1,)), torch.float32)
    assert (add.forward.count, add.forward.bytes(5)) == (1, 5 * 3 * 8 * 4)
    assert ends.forward.count == 0


def test_a_full_history_moves_more_at_every_sublayer() -> None:
    operations = eager_depth(AttentionResidualsConfig(), Stack(8, 1e-6, (2,) * 4))[:-1]
    moved = [operation.forward.bytes_per_token for operation in operations]
    assert all(later > earlier for earlier, later in itertools.pairwise(moved))
    assert all(operation.backward.bytes_per_token > 0 for operation in operations)
