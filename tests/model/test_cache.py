from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from twoaxis import SEQUENCE, ConfigError, Decoder, TokenLayout
from twoaxis.core.cost import Shape
from twoaxis.core.layout import PADDING
from twoaxis.ledger.sublayer import sublayer_cache_bytes
from twoaxis.model import DecoderCache
from twoaxis.testing.toy import toy_decoder, toy_tokens

from .build import FULL, MODELS, NAMES, VOCABULARY, WINDOW, decoder, same, tokens

CHUNKS = [[10], [3, 3, 4], [1] * 10, [6, 1, 1, 1, 1], [4, 4, 2], [3, 1, 6]]


@pytest.fixture(params=MODELS, ids=NAMES)
def model(request: pytest.FixtureRequest) -> Decoder:
    return decoder(**request.param)


def run(model: Decoder, text: Tensor, chunks: Sequence[int], layout: TokenLayout | None = None) -> tuple[Tensor, DecoderCache]:
    cache, parts, start = model.new_cache(), [], 0
    for part in text.split(list(chunks), dim=1):
        placed = None if layout is None else layout.part(start, start + part.shape[1])
        logits, cache = model(part, placed, cache)
        parts.append(logits)
        start += part.shape[1]
    return torch.cat(parts, dim=1), cache


@torch.no_grad()
@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
def test_chunks_equal_one_pass(model: Decoder, chunks: list[int]) -> None:
    # Case A02: a prefill longer than the window of 4.
    text = tokens(2, 10)
    logits, cache = run(model, text, chunks)
    same(logits, model(text))
    assert cache.length == 10
    changed = text.clone()
    changed[:, 9] = (changed[:, 9] + 1) % VOCABULARY
    assert torch.equal(run(model, changed, chunks)[0][:, :9], logits[:, :9])


@torch.no_grad()
@pytest.mark.parametrize("prompt", [3, 4, 5, 8, 9])
def test_greedy_continuation_around_the_window(model: Decoder, prompt: int) -> None:
    # Case A03: the off-by-one where the cached length first equals the window of 4.
    text = tokens(2, prompt, seed=prompt)
    logits, cache = model(text, cache=model.new_cache())
    for _ in range(6):
        same(logits[:, -1], model(text)[:, -1])
        following = logits[:, -1:].argmax(-1)
        text = torch.cat((text, following), dim=1)
        logits, cache = model(following, cache=cache)


@torch.no_grad()
def test_positions_are_absolute_long_after_the_window_has_moved_on(model: Decoder) -> None:
    # Case A04: positions within a rolled cache are not those within the cache.
    text = tokens(1, 30)
    same(run(model, text, [12, *[1] * 18])[0], model(text))


@torch.no_grad()
def test_the_largest_length_is_refused_at_the_first_token_beyond_it() -> None:
    model = decoder(max_seq_len=16)
    _, cache = model(tokens(1, 12), cache=model.new_cache())
    for _ in range(4):
        _, cache = model(tokens(1, 1), cache=cache)
    with pytest.raises(ConfigError, match=r"^tokens=17: must be at most max_seq_len=16; raise it or generate less$"):
        model(tokens(1, 1), cache=cache)


@torch.no_grad()
def test_forked_caches_do_not_disturb_each_other(model: Decoder) -> None:
    prompt, left, right = tokens(2, 6), tokens(2, 5, seed=1), tokens(2, 5, seed=2)
    _, shared = model(prompt, cache=model.new_cache())
    a, b, parts = shared, shared, {"a": [], "b": []}
    for t in range(5):
        logits, a = model(left[:, t : t + 1], cache=a)
        parts["a"].append(logits)
        logits, b = model(right[:, t : t + 1], cache=b)
        parts["b"].append(logits)
    for name, text in (("a", left), ("b", right)):
        same(torch.cat(parts[name], dim=1), model(torch.cat((prompt, text), dim=1))[:, 6:])
    again, _ = model(left, cache=shared)
    same(again, model(torch.cat((prompt, left), dim=1))[:, 6:])


def test_gradients_pass_through_the_cache(model: Decoder) -> None:
    text = tokens(2, 7)

    def gradients(logits: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(logits.square().sum(), list(model.parameters())))

    for ours, theirs in zip(gradients(run(model, text, [4, 1, 2])[0]), gradients(model(text)), strict=True):
        same(ours, theirs)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_cache_may_cross_gradient_modes(mode: Any) -> None:
    model, text = decoder(), tokens(1, 8)
    with mode():
        _, cache = model(text[:, :5], cache=model.new_cache())
    logits, _ = model(text[:, 5:6], cache=cache)
    with torch.no_grad():
        again, later = model(text[:, 5:6], cache=cache)
        more, _ = model(text[:, 6:], cache=later)
        same(again, logits)
    same(torch.cat((logits, more), dim=1), model(text)[:, 5:])


@torch.no_grad()
@pytest.mark.parametrize("chunks", [[10], [7, 1, 1, 1], [2, 8], [1] * 10, [300], [257, 43]], ids=str)
def test_left_padded_rows_continue_as_if_alone(model: Decoder, chunks: list[int]) -> None:
    """Also behind prefills of which a cache with a window of 4 lets go."""
    total = sum(chunks)
    lengths = (3, total, total - 2)
    rows = [tokens(1, length, seed=length) for length in lengths]
    batch = torch.zeros(3, total, dtype=torch.int64)
    for row, text in zip(batch, rows, strict=True):
        row[-text.shape[1] :] = text[0]
    logits, cache = run(model, batch, chunks, TokenLayout.left_padded(torch.tensor(lengths), total))
    for row, text in zip(logits, rows, strict=True):
        same(row[None, -text.shape[1] :], model(text))
    following = tokens(3, 4, seed=50)
    parts = []
    for t in range(4):
        step, cache = model(following[:, t : t + 1], cache=cache)
        parts.append(step)
    for b, text in enumerate(rows):
        alone = model(torch.cat((text, following[b : b + 1]), dim=1))
        same(torch.cat(parts, dim=1)[b : b + 1], alone[:, text.shape[1] :])


@torch.no_grad()
@pytest.mark.parametrize("chunks", [[11], [3, 3, 5], [1] * 11], ids=str)
def test_packed_documents_through_the_cache(model: Decoder, chunks: list[int]) -> None:
    text, layout = tokens(1, 11), TokenLayout.packed(torch.tensor([[0] * 5 + [1] * 6]))
    same(run(model, text, chunks, layout)[0], model(text, layout))


@torch.no_grad()
def test_documents_from_the_first_call_or_never() -> None:
    model, layout = decoder(), TokenLayout.packed(torch.zeros(1, 3, dtype=torch.int64))
    _, cache = model(tokens(1, 3), cache=model.new_cache())
    with pytest.raises(ConfigError, match=r"^layout: documents must be given in every call of a cached sequence or in none; "):
        model(tokens(1, 3), layout, cache)


@torch.no_grad()
@pytest.mark.parametrize("row", [*SEQUENCE], ids=lambda row: row.kind)
def test_padding_on_the_right_may_end_a_row_but_not_stand_inside_it(row: Any) -> None:
    # Caught: windows, convolutions and recurrences counted the padding, and a row went on as padding.
    model = toy_decoder(row.example(next(iter(row.examples))))
    text, documents = toy_tokens(tokens=4), torch.tensor([[0, 0, 0, PADDING], [0, 0, 0, 0]])
    layout = TokenLayout(torch.tensor([[0, 1, 2, 0], [0, 1, 2, 3]]), documents)
    logits, cache = model(text, layout, model.new_cache())
    same(logits[0, :3], model(text[:1, :3])[0])
    step, positions = toy_tokens(tokens=1), torch.tensor([[3], [4]])
    with pytest.raises(ConfigError, match=r"^cache: row 0 ends in padding; must end in a real token to be continued; "):
        model(step, cache=cache)
    with pytest.raises(ConfigError, match=r"^layout: row 0 has padding between real tokens; must be .*; pad on the left, or"):
        model(step, TokenLayout(positions, torch.zeros(2, 1, dtype=torch.int64)), cache)
    with pytest.raises(ConfigError, match=r"^layout: row 1 has padding between real tokens"):
        model(text, TokenLayout(layout.positions, torch.tensor([[0, 0, 0, PADDING], [0, PADDING, 0, 0]])))
    # A row that has ended may be padded on while another goes on.
    after, _ = model(step, TokenLayout(positions, torch.tensor([[PADDING], [0]])), cache)
    same(after[1], model(torch.cat((text, step), dim=1)[1:])[0, 4:])


@torch.no_grad()
@pytest.mark.parametrize("tokens_seen", [1, 3, 4, 5, 300])
@pytest.mark.parametrize("mixer", [FULL, WINDOW, {**WINDOW, "window": 1}], ids=str)
def test_a_cache_holds_what_later_queries_see(mixer: dict, tokens_seen: int) -> None:
    model = decoder(n_layers=1, blocks=[[mixer]], max_seq_len=1000)
    text = tokens(2, tokens_seen + 1)
    _, cache = model(text[:, :-1], cache=model.new_cache())
    ((held,),) = cache.sublayers
    held = held.mixer
    window = mixer.get("window")
    assert held.keys.length == (tokens_seen if window is None else min(tokens_seen, window - 1))
    shape = Shape(batch=2, tokens=tokens_seen, element_bytes=8)
    assert held.keys.live_bytes == sublayer_cache_bytes(model.config.layers[0][0], model.config.stack.sites[0], shape)
    if window is not None:
        assert held.keys._buffer.capacity < 300, "a long prefill is let go of"
    same(model(text[:, -1:], cache=cache)[0], model(text)[:, -1:])
