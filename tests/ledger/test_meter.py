"""The meter finds hand-counted facts, and in every precision what autograd saves of real tensors.

The conformance suite holds it against real tensors for every mixer, and `docs/planner/published` against published formulas.
"""

import itertools
from typing import Any

import pytest
import torch

from twoaxis.core.cost import Shape
from twoaxis.core.errors import ConfigError
from twoaxis.core.measure import saved_bytes
from twoaxis.depth import DEPTH
from twoaxis.ledger.decoder_memory import decoder_cache_bytes, decoder_saved_bytes, decoder_trace
from twoaxis.ledger.lines import TOKENS, depth_lines
from twoaxis.ledger.repeats import likeness, pattern
from twoaxis.ledger.stack import trace_stack
from twoaxis.ledger.sublayer import sublayer_cache_bytes, sublayer_saved_bytes
from twoaxis.model import DecoderConfig
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


def test_sublayers_that_run_the_same_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    config = decoder_config(DEPTH.parse("hyper_connections"), n_layers=6)
    shape = Shape(1, 5, 4)
    first = trace_stack(config.depth, config.stack, shape)
    monkeypatch.setattr("twoaxis.ledger.stack.likeness", lambda mixer: id(mixer))
    each = trace_stack(config.depth, config.stack, shape)
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
    with pytest.raises(ConfigError, match="bytes of one number=1: must be 2, 4 or 8"):
        decoder_trace(toy_decoder(DEPTH.parse("residual")).config, Shape(1, 3, 1))
