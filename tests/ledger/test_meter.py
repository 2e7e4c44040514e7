"""The meter finds hand-counted facts, and in every precision what autograd saves of real tensors.

The conformance suite holds it against real tensors for every mixer, and `docs/planner/published` against published formulas.
"""

import functools
import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from twoaxis.core.cost import Shape
from twoaxis.core.errors import ConfigError, DataError
from twoaxis.core.measure import saved_bytes
from twoaxis.depth import DEPTH
from twoaxis.ledger.decoder_memory import decoder_cache_bytes, decoder_saved_bytes, decoder_trace, loss_saved_bytes
from twoaxis.ledger.lines import TOKENS, depth_lines
from twoaxis.ledger.meter import ONE_BYTE, without_memory
from twoaxis.ledger.repeats import likeness, pattern
from twoaxis.ledger.stack import trace_stack
from twoaxis.ledger.sublayer import sublayer_cache_bytes, sublayer_saved_bytes
from twoaxis.model import DecoderConfig
from twoaxis.ops.cross_entropy import cross_entropy_of_valid, linear_cross_entropy
from twoaxis.ops.kernels import without_kernels
from twoaxis.sequence import SEQUENCE
from twoaxis.testing.toy import D_MODEL, decoder_config, toy_decoder, toy_site, toy_tokens

D, W = D_MODEL, 4
"""Width, and bytes of one number."""


def decoder(depth: Any) -> DecoderConfig:
    return decoder_config(DEPTH.parse(depth), n_layers=2)


def facts(depth: Any, index: int) -> tuple[int, int, int]:
    """Elements per token of the state before a sublayer, bytes that it reads, and bytes that it writes."""
    found = decoder_trace(decoder(depth), Shape(1, 5, W))
    return found.state_elements(index), found.sublayers[index].read // 5, found.sublayers[index].written // 5


def test_a_stream_is_read_and_written_once() -> None:
    # Reads the stream and the update, and writes their sum.
    assert [facts("residual", index) for index in range(4)] == [(D, 2 * D * W, D * W)] * 4


def test_a_dense_average_keeps_what_every_block_has_made() -> None:
    found = decoder_trace(decoder("denseformer"), Shape(1, 5, W))
    # The embedding, then also the stream of the first block, then also that of the second.
    assert [found.state_elements(index) // D for index in range(5)] == [1, 2, 3, 3, 1]


def test_streams_of_hyper_connections_are_one_tensor_at_first() -> None:
    found = decoder_trace(decoder({"kind": "hyper_connections", "n_streams": 4}), Shape(1, 5, W))
    assert [len({tensor.number for tensor in state}) for state in found.states[:2]] == [1, 4]
    assert {found.state_elements(index) for index in range(5)} == {4 * D}


def test_sources_are_new_tensors_that_later_states_share() -> None:
    found = decoder_trace(decoder("attention_residuals"), Shape(1, 5, W))
    numbers = [{tensor.number for tensor in state} for state in found.states]
    assert all(earlier < later for earlier, later in itertools.pairwise(numbers))
    # Every source is saved for the norm behind a read, or for the weights.
    assert all(tensor.saved for state in found.states for tensor in state)


def test_attention_carries_keys_and_values_and_a_feed_forward_nothing() -> None:
    config = SEQUENCE.parse({"kind": "attention", "n_heads": 2})
    assert sublayer_cache_bytes(config, toy_site(), Shape(3, 7, 2)) == 3 * 7 * 2 * D * 2
    windowed = SEQUENCE.parse({"kind": "attention", "n_heads": 2, "window": 4})
    assert sublayer_cache_bytes(windowed, toy_site(), Shape(3, 7, 2)) == 3 * 3 * 2 * D * 2
    assert decoder_cache_bytes(decoder("residual"), Shape(1, 0, 4)) == 0


@pytest.mark.parametrize("kind", ["residual", "deep_delta", "hyper_connections", "attention_residuals"])
@pytest.mark.parametrize("mode", ["eager", "autocast"])
def test_saved_bytes_are_those_of_real_tensors(kind: str, mode: Any) -> None:
    model = toy_decoder(DEPTH.parse(kind), dtype=torch.float32)
    tokens, targets = toy_tokens(), toy_tokens(seed=1)

    def run() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
            return model.loss(tokens, targets)[0]

    with without_kernels():
        real = saved_bytes(run, lambda _: [tokens, targets, *model.parameters()])
    assert decoder_saved_bytes(model.config, Shape(tokens.shape[0], tokens.shape[1], 4), mode) == real


def test_the_plain_forms_of_a_compiled_run_save_no_less() -> None:
    config = SEQUENCE.parse({"kind": "attention", "n_heads": 2, "qk_norm": "before_rope"})
    eager, compiled = (sublayer_saved_bytes(config, toy_site(), Shape(2, 9, 4), mode) for mode in ("eager", "compiled"))
    assert compiled >= eager > 0


@pytest.mark.parametrize("row", list(DEPTH), ids=lambda row: row.kind)
def test_depth_operations_are_lines_in_the_tokens(row: Any) -> None:
    """Two passes of few tokens say what a third, longer one of two sequences reads, writes and saves."""
    model = decoder_config(row.example(next(iter(row.examples))))
    lines, shape = depth_lines(model, 2, 2), Shape(2, 5 * TOKENS, 2)
    found, tokens = decoder_trace(model, shape), shape.total_tokens
    for line, operation in zip((*lines["sublayers"], lines["ends"]), (*found.sublayers, found.ends), strict=True):
        assert (tokens * line["read"], tokens * line["written"]) == (operation.read, operation.written)
        each, once = line["saved"]
        # What a convolution pads, it pads in every sequence.
        assert tokens * each + once <= operation.saved <= tokens * each + 2 * max(once, 0)


REPEATING = (
    "hyper_connections/dynamic",
    "deep_delta/ddl_tc",
    "deep_delta/channel_linear",
    "denseformer/last",
    *(f"depth_attention/{name}" for name in ("all", "sublayers", "own")),
)


@pytest.mark.parametrize("name", REPEATING)
def test_sublayers_that_run_the_same_are_measured_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their backward passes too, where some share parameters, whose gradients are added, and some differ in what they keep."""
    kind, example = name.split("/")
    config = decoder_config(DEPTH[kind].example(example), n_layers=6)
    run = functools.partial(trace_stack, config.depth, config.stack, Shape(1, 5, 4), parts=config.parts, backward=True)
    first = run()
    monkeypatch.setattr("twoaxis.ledger.stack.likeness", lambda mixer: id(mixer))
    each = run()
    assert (first.states, first.sublayers, first.ends) == (each.states, each.sublayers, each.ends)
    assert [save[::2] for save in first.saves] == [save[::2] for save in each.saves]


def test_modules_and_states_are_alike_by_what_they_hold() -> None:
    one, other = (torch.nn.Linear(2, 3, device="meta") for _ in range(2))
    assert likeness(one) == likeness(other) != likeness(torch.nn.Linear(3, 2, device="meta"))
    x, y = torch.zeros(2), torch.zeros(2)
    assert pattern((x, y)) == pattern((y, x)) != pattern((x, x))


@pytest.mark.parametrize("callers", [torch.no_grad, torch.inference_mode])
def test_the_modes_of_the_caller_change_no_count(callers: Any) -> None:
    model, shape = toy_decoder(DEPTH.parse("deep_delta"), dtype=torch.float32).config, Shape(1, 7, 4)
    expected = decoder_saved_bytes(model, shape)
    with callers():
        assert decoder_saved_bytes(model, Shape(1, 8, 4)) > expected


def test_other_widths_are_refused() -> None:
    config = toy_decoder(DEPTH.parse("residual")).config
    with pytest.raises(ConfigError, match="bytes of one number=3: must be 1, 2, 4 or 8"):
        decoder_trace(config, Shape(1, 3, 3))
    with pytest.raises(ConfigError, match="bytes of one number=1: must be 2, 4 or 8 under autocast"):
        decoder_trace(config, Shape(1, 3, 1), "autocast")


def by_width(model: DecoderConfig, width: int) -> list[int]:
    """What the depth operations take with numbers of this width, states, traffic and caches first."""
    found = decoder_trace(model, Shape(1, 9, width))
    each = [(s.read, s.written, s.views, s.cache) for s in (*found.sublayers, found.ends)]
    states = [found.state_bytes(index) for index in range(len(found.states))]
    return [*states, *itertools.chain(*each)]


@pytest.mark.parametrize("row", list(DEPTH), ids=lambda row: row.kind)
def test_numbers_of_one_byte_lie_on_the_line_through_two_and_four(row: Any) -> None:
    """States, traffic and caches are lines in the width, whose constant part is statistics in float32."""
    model = decoder_config(row.example(list(row.examples)[-1]), n_layers=2)
    one, two, four = (by_width(model, width) for width in (1, 2, 4))
    assert [2 * a for a in one] == [3 * b - c for b, c in zip(two, four, strict=True)]


@pytest.mark.parametrize("row", list(DEPTH), ids=lambda row: row.kind)
def test_only_numbers_of_the_model_shrink_to_one_byte(row: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of saved bytes and kernels, the run of bfloat16 is counted at three widths, which differ by its numbers alone."""
    model, shape = decoder_config(row.example(list(row.examples)[-1]), n_layers=2), Shape(1, 9, 1)
    found: list[list[int]] = []
    for counted in (torch.float8_e4m3fn, torch.bfloat16, torch.float64):
        monkeypatch.setitem(ONE_BYTE, torch.bfloat16, counted)
        run = trace_stack(model.depth, model.stack, shape, parts=model.parts, backward=True)
        each = [(s.saved, s.heads_saved, s.forward.bytes, s.backward.bytes) for s in (*run.sublayers, run.ends)]
        found.append([sum(size for _, _, size in run.saves), *itertools.chain(*each)])
    assert all(7 * (two - one) == eight - one for one, two, eight in zip(*found, strict=True))
    monkeypatch.undo()
    two = trace_stack(model.depth, model.stack, Shape(1, 9, 2), parts=model.parts, backward=True)
    assert found[1][0] == sum(size for _, _, size in two.saves)


def test_a_cache_of_one_byte_is_half_of_one_of_two() -> None:
    config = SEQUENCE.parse({"kind": "attention", "n_heads": 2})
    one, two = (sublayer_cache_bytes(config, toy_site(), Shape(1, 9, width)) for width in (1, 2))
    assert (one, two) == (9 * 2 * D, 9 * 2 * D * 2)


def test_statistics_keep_their_four_bytes() -> None:
    # The norm behind a read saves its input and one statistic for each token.
    found = [decoder_trace(decoder("residual"), Shape(1, 5, width)).saves[0][2] for width in (1, 2)]
    assert found == [5 * D, 5 * D * 2]
    saved = [decoder_saved_bytes(decoder("residual"), Shape(1, 5, width)) for width in (1, 2)]
    assert saved[1] < 2 * saved[0]


def test_modes_of_one_thread_change_no_count_of_another() -> None:
    config = SEQUENCE.parse({"kind": "attention", "n_heads": 2, "qk_norm": "before_rope"})

    def measured(mode: Any) -> int:
        return sublayer_saved_bytes(config, toy_site(), Shape(2, 9, 4), mode)

    modes: list[Any] = ["eager", "compiled", "autocast"]
    alone = {mode: measured(mode) for mode in modes}
    assert alone["eager"] < alone["compiled"]
    with ThreadPoolExecutor(1) as other:
        for mode in modes:
            with without_memory(mode, 1):
                assert {name: other.submit(measured, name).result() for name in alone} == alone
                assert not other.submit(torch.compiler.is_compiling).result()


def test_the_loss_is_measured_without_changing_that_of_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target outside the vocabulary is refused while another thread measures."""

    def refuse() -> None:
        with pytest.raises(DataError, match="target=7"):
            linear_cross_entropy(torch.zeros(1, 2), torch.zeros(3, 2), torch.tensor([7]))

    def meanwhile(*given: Any) -> torch.Tensor:
        with ThreadPoolExecutor(1) as other:
            other.submit(refuse).result()
        return cross_entropy_of_valid(*given)

    monkeypatch.setattr("twoaxis.ledger.decoder_memory.cross_entropy_of_valid", meanwhile)
    assert loss_saved_bytes(8, 3, Shape(1, 5, 4)) > 0
