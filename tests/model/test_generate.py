"""Generation: a row is what it would be alone, uncached, or read in pieces (cases A03 and A05)."""

from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch

from twoaxis import DEPTH, ConfigError, DataError, Decoder, DecoderConfig, Sampling, generate
from twoaxis.model.generate import stream

WINDOW, NEW = 4, 6
# Conformance decodes left-padded rows with every other example.
MIXERS = [(row.kind, next(iter(row.examples))) for row in DEPTH]
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11], [12, 13]]


def decoder(kind: str = "residual", example: str = "default", max_seq_len: int = 64) -> Decoder:
    windowed = {"kind": "short_swa", "n_heads": 2, "window": WINDOW}
    sizes = {"vocab_size": 17, "d_model": 8, "n_layers": 2, "max_seq_len": max_seq_len}
    blocks = [[windowed, {"kind": "attention", "n_heads": 2}, "swiglu"]]
    model = Decoder.build(DecoderConfig.from_data({**sizes, "depth": DEPTH[kind].example(example), "blocks": blocks}), seed=3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())) * 0.3)
    return model.double()


def is_greedy_without_a_cache(model: Decoder, prompt: list[int], found: list[int]) -> bool:
    """Whether every token is the most likely one behind those before it, which one pass over all of them says."""
    return model(torch.tensor([[*prompt, *found]]))[0, len(prompt) - 1 : -1].argmax(-1).tolist() == found


@pytest.mark.parametrize(("kind", "example"), MIXERS)
def test_ragged_rows_equal_rows_alone_without_a_cache(kind: str, example: str) -> None:
    model = decoder(kind, example)
    found = generate(model, PROMPTS, NEW)
    assert all(len(row) == NEW for row in found)
    assert all(is_greedy_without_a_cache(model, prompt, row) for prompt, row in zip(PROMPTS, found, strict=True))
    assert len({tuple(row) for row in found}) > 1, "rows that are all equal would prove nothing"


@pytest.mark.parametrize("chunk", [1, 2, WINDOW - 1, WINDOW, WINDOW + 1, 100])
def test_prefill_in_pieces(chunk: int) -> None:
    model = decoder()
    assert generate(model, PROMPTS, NEW, prefill_chunk_tokens=chunk) == generate(model, PROMPTS, NEW)


@pytest.mark.parametrize("length", range(WINDOW - 1, 2 * WINDOW + 2))
def test_prompts_around_the_window(length: int) -> None:
    model = decoder()
    prompt = [(3 * i) % 17 for i in range(length)]
    found = generate(model, [prompt, prompt[::-1]], 3 * WINDOW)[0]
    assert len(found) == 3 * WINDOW and is_greedy_without_a_cache(model, prompt, found)


def test_padding_far_beyond_the_window() -> None:
    model = decoder()
    long = [i % 17 for i in range(5 * WINDOW)]
    found = generate(model, [[1], long], NEW)[0]
    assert len(found) == NEW and is_greedy_without_a_cache(model, [1], found)


def test_a_stop_token_ends_its_row_only() -> None:
    model = decoder()
    whole = generate(model, PROMPTS, NEW)
    stop = whole[0][2]
    expected = [row[: row.index(stop)] if stop in row else row for row in whole]
    assert generate(model, PROMPTS, NEW, stop_token=stop) == expected


@pytest.mark.parametrize("collection", [set, frozenset, list, tuple])
def test_stop_tokens_are_any_collection(collection: Callable[[list[int]], Collection[int]]) -> None:
    model = decoder()
    [new] = generate(model, [[1]], NEW)
    stops, expected = collection([16, new[-1]]), new[: new.index(new[-1])]
    assert generate(model, [[1]], NEW, stop_token=stops)[0] == model.generate([1], NEW, stop_token=stops) == expected


def test_sampling_repeats_with_its_seed_and_differs_with_another() -> None:
    model = decoder()
    rows = [generate(model, PROMPTS, NEW, Sampling(temperature=1.5, seed=seed)) for seed in (0, 0, 1)]
    assert rows[0] == rows[1] != rows[2]
    assert generate(model, PROMPTS, NEW, Sampling(temperature=1.0, top_k=1)) == generate(model, PROMPTS, NEW)


@pytest.mark.parametrize("sampling", [Sampling(temperature=1.5, seed=4), Sampling(temperature=0.9, top_k=5, seed=2**64 - 1)])
def test_a_sampled_row_is_what_it_would_be_alone(sampling: Sampling) -> None:
    model = decoder()
    rows = generate(model, PROMPTS, NEW, sampling)
    for row, prompt in enumerate(PROMPTS):
        assert rows[row] == generate(model, [prompt], NEW, sampling.replace(seed=(sampling.seed + row) % 2**64))[0]
    # A row that has ended leaves the draws of the others alone.
    stop = rows[0][0]
    stopped = [row[: row.index(stop)] if stop in row else row for row in rows]
    assert generate(model, PROMPTS, NEW, sampling, stop_token=stop) == stopped


def test_equal_prompts_are_continued_differently() -> None:
    assert len({tuple(row) for row in generate(decoder(), [[1, 2]] * 5, NEW, Sampling(temperature=1.5))}) == 5


def test_a_seed_draws_what_it_has_always_drawn() -> None:
    probabilities = torch.tensor([[0.1, 0.2, 0.3, 0.4]])
    draws = torch.Generator().manual_seed(-3)
    expected = [int(torch.multinomial(probabilities, 1, generator=draws)) for _ in range(9)]
    sampling = Sampling(temperature=1.0, seed=-3)
    generator = sampling.generator()
    assert [int(sampling.choose(probabilities.log(), [generator])) for _ in range(9)] == expected


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=5.0, top_k=3), Sampling(temperature=5.0, top_p=0.9)])
def test_ids_that_the_tokenizer_lacks_are_never_chosen(sampling: Sampling) -> None:
    model = decoder()
    model.embedding.weight.data[11:] *= 9
    free, bound = (generate(model, PROMPTS, NEW, sampling, vocab_size=n) for n in (None, 11))
    assert max(map(max, free)) >= 11 > max(map(max, bound))
    assert generate(model, PROMPTS, NEW, sampling, vocab_size=17) == free
    with pytest.raises(ConfigError, match="vocab_size=0: must be >= 1; give the vocab_size of the tokenizer"):
        generate(model, PROMPTS, NEW, sampling, vocab_size=0)


@pytest.mark.parametrize("options", [{"temperature": 1e-46}, {"temperature": 1e-40}, {"temperature": 1.0, "top_p": 1e-46}])
def test_extremes_take_the_most_likely_token(options: dict[str, Any]) -> None:
    sampling = Sampling(**options)
    logits = torch.tensor([[0.0, 50.0, -3.0], [1e30, -1e30, 0.0]])
    assert sampling.choose(logits, [sampling.generator(row) for row in range(2)]).tolist() == [1, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_logits_that_are_no_numbers_are_refused(temperature: float, bad: float) -> None:
    sampling = Sampling(temperature=temperature)
    with pytest.raises(DataError, match="logits: got infinite ones or NaN: must be numbers"):
        sampling.choose(torch.tensor([[0.0, bad, 1.0]]), [sampling.generator()])


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1])
def test_seeds_that_no_generator_takes(seed: int) -> None:
    with pytest.raises(ConfigError, match=f"seed={seed}: must be "):
        Sampling(seed=seed)


def test_truncation_keeps_what_it_says() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))

    def kept(**options: Any) -> list[int]:
        return Sampling(temperature=1, **options).truncate(logits).isfinite()[0].nonzero().flatten().tolist()

    assert kept(top_k=2) == [0, 1]
    assert kept(top_k=9) == [0, 1, 2, 3]
    assert kept(top_p=0.5) == [0]
    assert kept(top_p=0.51) == [0, 1]
    assert kept(top_p=0.01) == [0]
    assert kept(top_p=1.0) == [0, 1, 2, 3]
    assert kept(top_k=3, top_p=0.8) == [0, 1]


def test_nothing_new_is_nothing() -> None:
    assert generate(decoder(), PROMPTS, 0) == [[], [], [], []]


@pytest.mark.parametrize(
    ("prompts", "n", "chunk", "error", "message"),
    [
        ([], 1, None, DataError, "got no prompts: must be at least one"),
        ([[1], []], 1, None, DataError, "prompt 1 without tokens"),
        ([[17]], 1, None, DataError, "token id=17: must be in 0..16"),
        ([[1], [2, 2**70]], 1, None, DataError, f"token id={2**70}: must be in 0..16; use the model's own tokenizer"),
        ([[1], [2, 1.5]], 1, None, DataError, "token id=1.5: must be a whole number in 0..16; use the model's own tokenizer"),
        ([torch.tensor([1.0])], 1, None, DataError, "token id=1.0: must be a whole number in 0..16"),
        (["a"], 1, None, DataError, "token id='a': must be a whole number in 0..16"),
        ([1], 1, None, DataError, "token ids=1: must be a list of whole numbers; pass one list for each prompt"),
        ([[1, 2, 3]], 14, None, ConfigError, "prompt and new tokens=17: must be at most max_seq_len=16"),
        ([[1]], -1, None, ConfigError, "max_new_tokens=-1: must be >= 0"),
        ([[1]], 1, 0, ConfigError, "prefill_chunk_tokens=0: must be >= 1"),
    ],
)
def test_bad_input(prompts: Any, n: int, chunk: int | None, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        list(stream(decoder(max_seq_len=16), prompts, n, prefill_chunk_tokens=chunk))


@pytest.mark.parametrize("vocabulary", [17, 5000])
def test_draws_are_those_of_multinomial(vocabulary: int) -> None:
    """Catches seeds that mean other tokens than in earlier versions."""
    logits, sampling = torch.randn(3, vocabulary, dtype=torch.float64), Sampling(temperature=0.9, top_p=0.95, seed=2)
    probabilities = torch.softmax(sampling.truncate(logits.float() / 0.9), dim=-1)
    expected = [int(torch.multinomial(row, 1, generator=sampling.generator(i))) for i, row in enumerate(probabilities)]
    assert sampling.choose(logits, [sampling.generator(row) for row in range(3)]).tolist() == expected
