"""Tensor ranks are one process: loss, gradients, initial values, bytes exchanged, and what cannot be divided."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from twoaxis.core.errors import ConfigError
from twoaxis.depth import DEPTH
from twoaxis.feed_forward import FEED_FORWARD
from twoaxis.local import LOCAL
from twoaxis.model import DecoderConfig
from twoaxis.planner.formulas.collectives import all_gather_bytes, all_reduce_bytes, tensor_parallel_bytes
from twoaxis.sequence import SEQUENCE
from twoaxis.testing.conformance import bound
from twoaxis.testing.sharded import tensor_parallel_equals_whole
from twoaxis.train.parallel.tensor_ranks import TensorRanks, from_previous
from twoaxis.train.parallel.tensor_split import Halo, TensorSplit, check_tensor, halo_of

from .processes import run_processes
from .tensor_worker import CASES, LAYERS, ROWS, SEQUENCES, TOKENS, WAYS, WIDTH, decoder_config

RANKS, ELEMENT = 4, 8
WORKER = Path(__file__).with_name("tensor_worker.py")
SUBLAYERS = 2 * LAYERS
RUNS = [f"{case}, {way}, {sequence}" for case in CASES for way in WAYS for sequence in SEQUENCES]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of four ranks has measured."""
    folder = tmp_path_factory.mktemp("tensor")
    run_processes(WORKER, folder, RANKS, timeout_seconds=300)
    return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize("run", RUNS)
def test_loss_and_gradients_are_those_of_one_process(found: list[dict[str, Any]], run: str) -> None:
    for rank in found:
        assert rank["runs"][run]["loss"] <= bound("same_values")
        assert rank["runs"][run]["gradients"] <= bound("same_gradients")


def test_initial_values_are_parts_of_those_of_one_process(found: list[dict[str, Any]]) -> None:
    assert [rank["starts"] for rank in found] == [{case: [] for case in CASES}] * RANKS


@pytest.mark.parametrize("sequence", SEQUENCES)
def test_ranks_exchange_what_a_plan_says(found: list[dict[str, Any]], sequence: str) -> None:
    expected = tensor_parallel_bytes(RANKS, SUBLAYERS, ROWS * TOKENS, WIDTH, ELEMENT, sequence)
    assert [rank["runs"][f"plain, whole rows, {sequence}"]["bytes"] for rank in found] == [expected] * RANKS


@pytest.mark.parametrize("sequence", SEQUENCES)
def test_ranks_exchange_half_as_much_under_autocast(found: list[dict[str, Any]], sequence: str) -> None:
    expected = tensor_parallel_bytes(RANKS, SUBLAYERS, ROWS * TOKENS, WIDTH, 2, sequence)
    assert [rank["half"][sequence]["bytes"] for rank in found] == [expected] * RANKS
    # Four partial sums are rounded to 8 bits each before they are added.
    assert all(rank["half"][sequence]["loss"] < 2**-8 for rank in found)


def test_sublayers_with_three_views_exchange_more(found: list[dict[str, Any]]) -> None:
    """Each view has a collective of its own; a plan counts one for each sublayer."""
    whole = ROWS * TOKENS * WIDTH * ELEMENT
    more = {"none": all_reduce_bytes(RANKS, whole), "tensor": 3 * all_gather_bytes(RANKS, whole)}
    for sequence in SEQUENCES:
        planned = tensor_parallel_bytes(RANKS, SUBLAYERS, ROWS * TOKENS, WIDTH, ELEMENT, sequence)
        measured = found[0]["runs"][f"three views, whole rows, {sequence}"]["bytes"]
        assert measured == planned + LAYERS * 2 * more[sequence]


def test_no_tokens_of_the_rank_before_are_none() -> None:
    state = torch.ones(2, 3, 4, requires_grad=True)
    own, before = from_previous(state, 0, TensorRanks(None, 0, 1, "tensor"))
    assert before.shape == (2, 0, 4)
    own.sum().backward()
    assert state.grad is not None and bool((state.grad == 1).all())


def test_earlier_tokens_that_a_depth_mixer_needs_are_found() -> None:
    sublayers = SUBLAYERS
    assert halo_of(decoder_config("earlier tokens"), TOKENS) == Halo(0, 3, (3,) * sublayers, 3)
    assert halo_of(decoder_config("plain"), TOKENS) == Halo(0, 0, (0,) * sublayers, 0)
    assert halo_of(decoder_config("local mixers"), TOKENS) == Halo(1, 0, (0,) * sublayers, 0)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("case", CASES)
def test_parts_of_all_ranks_are_the_whole(case: str, ranks: int) -> None:
    split = TensorSplit(decoder_config(case), ranks)
    every = [split.splits(rank) for rank in range(ranks)]
    for name, first in every[0].items():
        whole, rows = torch.randn(first.shape), first.local_shape[0]
        again, times = torch.zeros_like(whole), torch.zeros_like(whole)
        # Also when the rows of a rank are divided further.
        for rank, (start, stop) in product(range(ranks), ((0, rows // 2), (rows // 2, rows))):
            held = every[rank][name].of(whole)[start:stop]
            for chunk in every[rank][name].chunks(start, stop):
                place = tuple(slice(at, at + size) for at, size in zip(chunk.there, chunk.sizes, strict=True))
                again[place] = chunk.of(held)
                times[place] += 1 / chunk.copies
        assert torch.equal(again, whole), name
        torch.testing.assert_close(times, torch.ones_like(times), msg=name)


ATTENTION, SWIGLU = {"kind": "attention", "n_heads": 4}, {"kind": "swiglu", "d_ff": 16}

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "depth across heads": ({"depth": "lime"}, "depth='lime': must be a depth mixer that works on each head by itself"),
    "depth across groups": (
        {"depth": "depth_value_mixing", "blocks": [[{**ATTENTION, "n_kv_heads": 2}, SWIGLU]]},
        "n_kv_heads of attention under depth mixer 'depth_value_mixing'=2: must be a multiple of parallel.tensor=4, which",
    ),
    "rows across heads": (
        {"depth": {"kind": "value_embedding", "gate": "modded"}},
        "depth='value_embedding': must be a depth mixer that works on each head by itself",
    ),
    "short convolution": ({"blocks": [["short_conv", SWIGLU]]}, "sublayer='short_conv': must be one of attention, gelu"),
    "delta rule": ({"blocks": [["gated_delta_net", SWIGLU]]}, "sublayer='gated_delta_net': must be one of attention, gelu"),
    "reflections": ({"blocks": [["path_attention", SWIGLU]]}, "sublayer='path_attention': must be one of attention, gelu"),
    "heads": ({"blocks": [[{**ATTENTION, "n_heads": 2}, SWIGLU]]}, "n_heads of attention of block 0=2: must be a multiple of"),
    "kv-heads": (
        {"blocks": [[{**ATTENTION, "n_heads": 12, "n_kv_heads": 3, "head_dim": 2}, SWIGLU]]},
        "n_kv_heads of attention of block 0=3: must be a multiple or a divisor of parallel.tensor=4",
    ),
    "hidden width": ({"blocks": [[ATTENTION, {**SWIGLU, "d_ff": 18}]]}, "d_ff of swiglu of block 0=18: must be a multiple of"),
    "norm of all heads": (
        {"blocks": [[{**ATTENTION, "qk_norm": "before_rope", "qk_norm_over": "all_heads"}, SWIGLU]]},
        "qk_norm_over='all_heads': must be 'head' with parallel.tensor=4",
    ),
    "bias of the output": ({"blocks": [[{**ATTENTION, "bias": "all"}, SWIGLU]]}, "bias='all': must be 'qkv' or 'none' with"),
    "local attention": (
        {"blocks": [[{**ATTENTION, "projected_local": "local_swa"}, SWIGLU]]},
        "projected_local='local_swa': must be one whose channels can be divided",
    ),
    "gate of all channels": (
        {"blocks": [[ATTENTION, {**SWIGLU, "projected_local": {"kind": "smear", "gate_channels": 4}}]]},
        "projected_local='smear': must be one whose channels can be divided",
    ),
    "heads of taps": (
        {"blocks": [[ATTENTION, {**SWIGLU, "projected_local": {"kind": "dynamic_conv", "taps": "per_head", "head_dim": 8}}]]},
        "head_dim of projected_local of swiglu of block 0=8: must be a divisor of the 4 channels that a rank holds together",
    ),
    "update that is not linear": (
        {"blocks": [[{**ATTENTION, "update_local": {"kind": "canon", "activation": "silu"}}, SWIGLU]]},
        "update_local='canon': must be one that is linear in the channels",
    ),
    "length": ({"tokens": 18}, "data.seq_len=18: must be a multiple of parallel.tensor=4 with parallel.sequence='tensor'"),
    "halo": (
        {"depth": {"kind": "deep_delta", "preset": "ddl_tc"}, "tokens": 8},
        "2 tokens on a rank: must be at least the 3 earlier tokens that depth mixer 'deep_delta' looks at",
    ),
    "halo behind the embedding": (
        {"embedding_local": "canon", "tokens": 8},
        "2 tokens on a rank: must be at least the 3 earlier tokens that embedding_local looks at",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_divided_is_refused_in_one_line(name: str) -> None:
    changes, said = REFUSED[name]
    model = {"vocab_size": 8, "d_model": 8, "n_layers": 2, "blocks": [[ATTENTION, SWIGLU]], **changes}
    tokens = model.pop("tokens", 16)
    with pytest.raises(ConfigError) as caught:
        check_tensor(DecoderConfig.from_data(model), 4, "tensor", tokens)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_every_mixer_is_one_process_or_refused() -> None:
    """The first example of every row; `make conformance` runs them too. The checks of what is refused are those above."""
    examples: list[Any] = [row.example(next(iter(row.examples))) for row in (*DEPTH, *SEQUENCE, *FEED_FORWARD, *LOCAL)]
    for config in examples:
        tensor_parallel_equals_whole.run(config)
