"""Generation: a row is what it would be alone, uncached, or read in pieces (cases A03 and A05)."""

from typing import Any

import pytest
import torch

from twoaxis import DEPTH, ConfigError, DataError, Decoder, DecoderConfig, Sampling, generate
from twoaxis.model.generate import stream

WINDOW, NEW = 4, 6
MIXERS = [(row.kind, example) for row in DEPTH for example in row.examples]
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


def without_cache(model: Decoder, prompt: list[int], n: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize(("kind", "example"), MIXERS)
def test_ragged_rows_equal_rows_alone_without_a_cache(kind: str, example: str) -> None:
    model = decoder(kind, example)
    expected = [without_cache(model, prompt, NEW) for prompt in PROMPTS]
    assert generate(model, PROMPTS, NEW) == expected
    assert len({tuple(row) for row in expected}) > 1, "rows that are all equal would prove nothing"


@pytest.mark.parametrize("chunk", [1, 2, WINDOW - 1, WINDOW, WINDOW + 1, 100])
def test_prefill_in_pieces(chunk: int) -> None:
    model = decoder()
    assert generate(model, PROMPTS, NEW, prefill_chunk_tokens=chunk) == generate(model, PROMPTS, NEW)


@pytest.mark.parametrize("length", range(WINDOW - 1, 2 * WINDOW + 2))
def test_prompts_around_the_window(length: int) -> None:
    model = decoder()
    prompt = [(3 * i) % 17 for i in range(length)]
    assert generate(model, [prompt, prompt[::-1]], 3 * WINDOW)[0] == without_cache(model, prompt, 3 * WINDOW)


def test_padding_far_beyond_the_window() -> None:
    model = decoder()
    long = [i % 17 for i in range(5 * WINDOW)]
    assert generate(model, [[1], long], NEW)[0] == without_cache(model, [1], NEW)


def test_a_stop_token_ends_its_row_only() -> None:
    model = decoder()
    whole = generate(model, PROMPTS, NEW)
    stop = whole[0][2]
    expected = [row[: row.index(stop)] if stop in row else row for row in whole]
    assert generate(model, PROMPTS, NEW, stop_token=stop) == expected


def test_sampling_repeats_with_its_seed_and_differs_with_another() -> None:
    model = decoder()
    rows = [generate(model, PROMPTS, NEW, Sampling(temperature=1.5, seed=seed)) for seed in (0, 0, 1)]
    assert rows[0] == rows[1] != rows[2]
    assert generate(model, PROMPTS, NEW, Sampling(temperature=1.0, top_k=1)) == generate(model, PROMPTS, NEW)


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
        ([[1, 2, 3]], 14, None, ConfigError, "prompt and new tokens=17: must be at most max_seq_len=16"),
        ([[1]], -1, None, ConfigError, "max_new_tokens=-1: must be >= 0"),
        ([[1]], 1, 0, ConfigError, "prefill_chunk_tokens=0: must be >= 1"),
    ],
)
def test_bad_input(prompts: list[list[int]], n: int, chunk: int | None, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        list(stream(decoder(max_seq_len=16), prompts, n, prefill_chunk_tokens=chunk))
