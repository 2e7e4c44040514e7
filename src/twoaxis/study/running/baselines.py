"""Baselines of the control: count models and guesses, fitted to its training tokens and scored on validation tokens."""

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import Field

from twoaxis.core.config import Config
from twoaxis.core.errors import TwoAxisError
from twoaxis.data import Batch, PackedSampler, PreparedData, prepare, validation_batches
from twoaxis.data.batch import read_batch
from twoaxis.data.counted_baselines import answer_guesses, ngram_losses
from twoaxis.train.recipe import TrainConfig

MOST_TOKENS = 20_000_000
"""Limit of counted training tokens; memory grows with their distinct trigrams."""

ROWS = 256
"""Windows read at once."""


class SeedBaselines(Config):
    """Baselines of one seed: the first three for text, the next three for a synthetic task, the others null.

    Attributes:
        unigram: loss, nats per token.
        bigram: loss, nats per token.
        trigram: loss, nats per token.
        chance: loss of guessing by frequency, nats per answer.
        majority: accuracy of the most frequent answer.
        in_context: loss of guessing among the possible answers in the sample, nats per answer.
        counted: training targets that were counted.
    """

    unigram: float | None = None
    bigram: float | None = None
    trigram: float | None = None
    chance: float | None = None
    majority: float | None = None
    in_context: float | None = None
    counted: int


class Baselines(Config):
    """Baselines of a study.

    Attributes:
        by_seed: of the control's runs.
        missing: reason when there are none, else "".
    """

    by_seed: dict[int, SeedBaselines] = Field(default_factory=dict)
    missing: str = ""


def measure_baselines(recipes: Mapping[int, TrainConfig], recorded: Mapping[int, Mapping[str, Any]]) -> Baselines:
    """Measures the baselines of the control's runs by seed, in seconds each; refuses other tokens than `recorded` ones."""
    found: dict[int, SeedBaselines] = {}
    try:
        for seed, recipe in recipes.items():
            data = prepare(recipe.data.corpus, recipe.data.tokenizer)
            if different := _different_tokens(data, recorded.get(seed, {})):
                return Baselines(missing=f"the {different} tokens here are not those that the run of seed {seed} has read")
            found[seed] = _of_run(recipe, data)
    except TwoAxisError as error:
        return Baselines(missing=str(error))
    return Baselines(by_seed=found)


def _of_run(recipe: TrainConfig, data: PreparedData) -> SeedBaselines:
    seq_len, packing, cues = recipe.data.seq_len, recipe.data.packing, data.answer_cues
    sampler = PackedSampler(data.train, recipe.batch_size, seq_len, recipe.seed, packing, cues)
    steps = min(recipe.steps, -(-MOST_TOKENS // (recipe.batch_size * seq_len)))
    train = _batches(sampler, steps)
    validation = validation_batches(data.validation, ROWS, seq_len, recipe.validation_tokens, packing, cues)
    if cues:
        guesses = answer_guesses(train, validation, data.tokenizer.vocab_size)
        return SeedBaselines(
            chance=guesses.chance, majority=guesses.majority, in_context=guesses.in_context, counted=guesses.answers
        )
    losses = ngram_losses(train, validation, data.tokenizer.vocab_size)
    return SeedBaselines(unigram=losses.unigram, bigram=losses.bigram, trigram=losses.trigram, counted=losses.tokens)


def _batches(sampler: PackedSampler, steps: int) -> Iterator[Batch]:
    """The windows of the first steps, without repeated epochs."""
    windows = sampler.windows(steps)
    for at in range(0, len(windows), ROWS):
        yield read_batch(sampler.shard, windows[at : at + ROWS], sampler.seq_len, sampler.packing, sampler.answer_cues)


def _different_tokens(data: PreparedData, recorded: Mapping[str, Any]) -> str:
    here = data.to_data()
    sides = [side for side in ("train", "validation") if side in recorded]
    return next((side for side in sides if recorded[side].get("fingerprint") != here[side]["fingerprint"]), "")
