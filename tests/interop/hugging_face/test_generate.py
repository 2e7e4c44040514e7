"""Every decoding strategy of transformers with every sort of state: the same tokens as without a cache, or as our own."""

from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra twoaxis[hf]")

from transformers import DynamicCache

from twoaxis import ConfigError, generate
from twoaxis.interop.hugging_face import TwoAxisCache, to_hugging_face
from twoaxis.interop.hugging_face.generation_cache import REPLAY_TOKENS, select_rows
from twoaxis.interop.hugging_face.modeling import CACHE

from ..hf_models import MODELS, small_decoder

PROMPTS = [[1, 7, 3, 9, 2, 11], [5, 5, 8]]
NEW = 8


def batch(prompts: list[list[int]]) -> dict[str, torch.Tensor]:
    longest = max(map(len, prompts))
    rows = [[0] * (longest - len(row)) + row for row in prompts]
    masks = [[0] * (longest - len(row)) + [1] * len(row) for row in prompts]
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(masks)}


def continued(model: Any, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    inputs = batch(prompts)
    options = {"do_sample": False, "max_new_tokens": NEW, "pad_token_id": 0, **options}
    return model.generate(**inputs, **options)[:, inputs["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize("name", MODELS)
def test_greedy_in_a_left_padded_batch_is_our_own(name):
    decoder = small_decoder(name)
    expected = generate(decoder, PROMPTS, NEW)
    assert continued(to_hugging_face(decoder), PROMPTS) == expected


@pytest.mark.parametrize(
    "options",
    [{"use_cache": False}, {"cache_implementation": "static"}, {CACHE: TwoAxisCache()}],
    ids=lambda one: next(iter(one)),
)
def test_every_way_to_ask_for_a_cache_or_none_is_the_same(options):
    """What is asked for decides which cache is passed on, before any model sees it."""
    decoder = small_decoder("states")
    assert continued(to_hugging_face(decoder), PROMPTS, **options) == generate(decoder, PROMPTS, NEW)


# What carries most sorts of state; that rows of all of them can be selected is tested without beams below.
@pytest.mark.parametrize("name", ["windows", "states", "rewritten", "ngrams"])
def test_beams_do_not_depend_on_the_cache(name):
    model, options = to_hugging_face(small_decoder(name)), {"num_beams": 4, "num_return_sequences": 2}
    assert continued(model, PROMPTS, **options) == continued(model, PROMPTS, use_cache=False, **options)


@pytest.mark.parametrize("name", ["plain", "states"])
def test_sampling_does_not_depend_on_the_cache(name):
    model = to_hugging_face(small_decoder(name))
    found = []
    for use_cache in (True, False):
        torch.manual_seed(3)
        options = {"do_sample": True, "temperature": 1.5, "top_k": 30, "num_return_sequences": 2}
        found.append(continued(model, PROMPTS, use_cache=use_cache, **options))
    assert found[0] == found[1] and found[0] != [row for row in generate(small_decoder(name), PROMPTS, NEW) for _ in range(2)]


# Each way to draft and each sort of state; that a cropped cache of any model is as good as new is tested below.
@pytest.mark.parametrize(
    ("assistant", "name"),
    [("another", "windows"), ("another", "ngrams"), ("itself", "states"), ("lookup", "states"), ("lookup", "views")],
)
def test_drafts_change_no_token(name, assistant):
    decoder = small_decoder(name)
    model = to_hugging_face(decoder)
    prompt = PROMPTS[0] * (REPLAY_TOKENS // 4)
    options: dict[str, Any] = {"prompt_lookup_num_tokens": 3}
    if assistant != "lookup":
        options = {"assistant_model": model if assistant == "itself" else to_hugging_face(small_decoder("plain"))}
    assert continued(model, [prompt], max_new_tokens=24, **options) == generate(decoder, [prompt], 24)


def test_drafts_are_both_taken_and_refused():
    """Otherwise the test above would say little."""
    model, forwards = to_hugging_face(small_decoder("states")), []
    model.model.register_forward_hook(lambda *_: forwards.append(1))
    prompt = [PROMPTS[0] * 8]
    continued(model, prompt, max_new_tokens=24, prompt_lookup_num_tokens=3)
    assert 8 < len(forwards) < 24


@pytest.mark.parametrize(("name", "kept"), [*((name, 2) for name in MODELS), ("windows", 0), ("states", 0), ("ngrams", 0)])
def test_cropped_is_as_never_seen(name, kept):
    """Prompts that were cut in the middle of a call, twice in a row, in padded rows."""
    model, inputs = to_hugging_face(small_decoder(name)), batch(PROMPTS)
    ids = torch.cat((inputs["input_ids"], torch.randint(0, 40, (2, 20))), dim=1)
    mask = torch.cat((inputs["attention_mask"], torch.ones(2, 20, dtype=torch.long)), dim=1)

    def run(cache: TwoAxisCache, start: int, stop: int) -> torch.Tensor:
        return model(ids[:, start:stop], attention_mask=mask[:, :stop], **{CACHE: cache}).logits

    straight, cropped = TwoAxisCache(), TwoAxisCache()
    cropped.activate_past_recording()
    run(straight, 0, 7)
    run(cropped, 0, 7)
    cropped.crop(0)
    for begin in (7, 13):
        expected = run(straight, begin, begin + 6)
        ids_wrong = torch.cat((ids[:, begin : begin + kept], (ids[:, begin + kept : begin + 6] + 1) % 40), dim=1)
        model(ids_wrong, attention_mask=mask[:, : begin + 6], **{CACHE: cropped})
        cropped.crop(kept - 6)
        assert cropped.get_seq_length() == begin + kept
        found = run(cropped, begin + kept, begin + 6)
        torch.testing.assert_close(found, expected[:, kept:], rtol=1e-9, atol=1e-9)
        cropped.crop(0)


def test_a_crop_while_tokens_wait_to_run_again():
    model, ids = to_hugging_face(small_decoder("states")), torch.tensor([PROMPTS[0] * 2])
    cache = TwoAxisCache()
    cache.activate_past_recording()
    model(ids, **{CACHE: cache})
    cache.crop(-3)
    cache.crop(-2)
    assert cache.get_seq_length() == 7
    found = model(ids[:, 7:], **{CACHE: cache}).logits
    torch.testing.assert_close(found, model(ids).logits[:, 7:], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("waiting", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_rows_of_a_cache_go_their_own_ways(name, waiting):
    model, ids = to_hugging_face(small_decoder(name)), torch.randint(0, 40, (2, 9))
    cache = TwoAxisCache()
    if waiting:
        cache.activate_past_recording()
    model(ids[:, :6], **{CACHE: cache})
    if waiting:
        cache.crop(-2)
    start = cache.get_seq_length()
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([2, 0, 0, 3]))
    cache.batch_select_indices(torch.tensor([1, 0, 3]))
    assert cache.batch_size == 3
    rows = ids[torch.tensor([0, 1, 1])]
    torch.testing.assert_close(
        model(rows[:, start:], **{CACHE: cache}).logits, model(rows).logits[:, start:], rtol=1e-9, atol=1e-9
    )
    cache.reset()
    assert (cache.get_seq_length(), cache.batch_size, cache.get_max_length()) == (0, -1, -1)


def test_a_call_in_two_parts_returns_all_of_its_tokens():
    model, ids = to_hugging_face(small_decoder("states")).model, torch.randint(0, 40, (2, REPLAY_TOKENS + 5))
    cache = TwoAxisCache()
    cache.activate_past_recording()
    found = model(ids, revocable_tokens=4, output_hidden_states=True, **{CACHE: cache})
    whole = model(ids, output_hidden_states=True, use_cache=False)
    for part, expected in zip(found.hidden_states, whole.hidden_states, strict=True):
        torch.testing.assert_close(part, expected, rtol=1e-9, atol=1e-9)
    cache.crop(-4)
    assert cache.value is not None and cache.value.length == cache.get_seq_length() == REPLAY_TOKENS + 1


def test_a_call_without_tokens_returns_none_after_a_crop():
    model, ids = to_hugging_face(small_decoder("states")).model, torch.tensor(PROMPTS[:1])
    cache = TwoAxisCache()
    cache.activate_past_recording()
    model(ids, **{CACHE: cache})
    cache.crop(-2)
    found = model(ids[:, :0], output_hidden_states=True, **{CACHE: cache})
    assert found.last_hidden_state.shape[1] == 0
    assert {read.shape[1] for read in found.hidden_states} == {0}
    assert cache.get_seq_length() == len(PROMPTS[0]) - 2


def test_a_conversation_goes_on_from_the_cache_it_returned():
    model: Any = to_hugging_face(small_decoder("states"))
    inputs = batch(PROMPTS)
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 5, "pad_token_id": 0}
    found = model.generate(**inputs, **options, return_dict_in_generate=True)
    longer = torch.cat((found.sequences, torch.tensor([[4, 4], [7, 1]])), dim=1)
    mask = torch.cat((inputs["attention_mask"], torch.ones(2, 7, dtype=torch.long)), dim=1)
    fresh = model.generate(longer, attention_mask=mask, **options)
    assert torch.equal(model.generate(longer, attention_mask=mask, **options, **{CACHE: found[CACHE]}), fresh)
    assert found[CACHE].get_seq_length() == fresh.shape[1] - 1


def test_an_earlier_cache_value_stays_usable():
    """What a cache holds is a value: nothing that happens to the cache later changes it."""
    model, ids = to_hugging_face(small_decoder("windows")), torch.tensor([PROMPTS[0] * 2])
    cache = TwoAxisCache()
    model(ids[:, :6], **{CACHE: cache})
    kept = cache.value
    with torch.no_grad():
        first = model(ids[:, 6:], **{CACHE: cache}).logits
        cache.value = kept
        model((ids[:, 6:] + 1) % 40, **{CACHE: cache})
        cache.value = kept
        assert torch.equal(model(ids[:, 6:], **{CACHE: cache}).logits, first)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"cache_implementation": "quantized"}, "cache_implementation='quantized': must be dynamic or static"),
        ({CACHE: DynamicCache()}, "cache='DynamicCache': must be a TwoAxisCache"),
        ({"max_new_tokens": 12}, "at most max_position_embeddings=16"),
    ],
)
def test_what_generate_cannot_do(options, said):
    with pytest.raises(ConfigError, match=said):
        continued(to_hugging_face(small_decoder("plain", max_seq_len=16)), PROMPTS, **options)


def test_what_a_cache_cannot_do():
    model, cache = to_hugging_face(small_decoder("plain")), TwoAxisCache()
    model(torch.tensor(PROMPTS[:1]), **{CACHE: cache})
    assert not cache.is_croppable and not cache.is_compileable
    with pytest.raises(ConfigError, match="activate_past_recording"):
        cache.crop(-1)
    with pytest.raises(ConfigError, match="tokens_to_remove=2: must be <= 0"):
        cache.crop(2)
    with pytest.raises(ConfigError, match="cache='object'"):
        select_rows(object(), torch.tensor([0]), 1)


def test_the_loss_is_the_mean_over_shifted_labels():
    decoder = small_decoder("views")
    model, tokens = to_hugging_face(decoder), torch.tensor([PROMPTS[0]])
    total, count = decoder.loss(tokens[:, :-1], tokens[:, 1:])
    torch.testing.assert_close(model(tokens, labels=tokens).loss.double(), total / count, rtol=1e-5, atol=1e-5)
