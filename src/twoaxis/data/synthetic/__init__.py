"""Synthetic tasks that small models can solve: samples of equal length, drawn from a seed; only answers count in the loss.

Each task is a kind of corpus. Its docstring describes its text and what solves it. `answer_cues` are the characters after which
the next token counts in the loss, in training and validation; validation also measures accuracy.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import ClassVar, Self

import numpy as np
from pydantic import Field, model_validator

from twoaxis.core.errors import ConfigError, DataError, problem
from twoaxis.data.corpus.base import CorpusConfig, Document, Scan, Source, Split, split_documents


class KeyedRandom:
    """Random numbers that depend on a key alone.

    Made from raw bits, which are the same in all versions of numpy; its distributions are not.

    Example:
        >>> random = KeyedRandom(0, 1)
        >>> random.integers(10, 4).tolist(), random.permutation(4).tolist()
        ([9, 0, 6, 8], [3, 0, 1, 2])
    """

    def __init__(self, *key: int) -> None:
        self._bits = np.random.PCG64(np.random.SeedSequence(list(key)))

    def integers(self, limit: int, size: int) -> np.ndarray:
        """Draws `size` uniform integers from 0 to `limit` - 1."""
        return (self._bits.random_raw(size) % np.uint64(limit)).astype(np.int64)

    def permutation(self, size: int) -> np.ndarray:
        """Draws a permutation of the integers from 0 to `size` - 1."""
        return np.argsort(self._bits.random_raw(size), kind="stable")


CUE = "="
"""Precedes each answer, in tasks with a single cue."""

FILLER = "."
"""A token without meaning."""

LOWER, UPPER, DIGITS = "abcdefghijklmnopqrstuvwxyz", "ABCDEFGHIJKLMNOPQRSTUVWXYZ", "0123456789"

VERSION = "1"
"""The version of the texts, raised whenever the samples of a configuration change."""

MOST_TRIES = 1000
"""The most draws of a training sample that is no validation sample."""


class SyntheticConfig(CorpusConfig):
    """Base of the synthetic tasks.

    Attributes:
        n_train: training samples, which may repeat.
        n_validation: validation samples; none is a training sample, and they do not depend on `n_train`.
        seed: of all samples.
        bounds: for a field, another field that it must not exceed, and the remedy.

    Raises:
        ConfigError: a field that exceeds its bound.
    """

    bounds: ClassVar[Mapping[str, tuple[str, str]]] = {}

    n_train: int = Field(default=20_000, ge=1)
    n_validation: int = Field(default=1_000, ge=1)
    seed: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _in_bounds(self) -> Self:
        for name, (bound, remedy) in self.bounds.items():
            value, limit = getattr(self, name), getattr(self, bound)
            if value > limit:
                raise ConfigError(problem(name, value, f"at most {bound}={limit}", remedy))
        return self

    @property
    @abstractmethod
    def sample_length(self) -> int:
        """Tokens in every sample."""

    @abstractmethod
    def sample(self, random: KeyedRandom) -> str:
        """Draws one sample."""

    @property
    def answer_cues(self) -> str:
        """The equals sign."""
        return CUE

    @property
    def source(self) -> Source:
        """The kind of task and the version of its texts."""
        return Source(type(self).model_fields["kind"].default, VERSION)

    def documents(self) -> Iterator[Document]:
        """Draws the validation samples, then training samples that differ from all of them.

        Raises:
            DataError: nearly all samples of the task are validation samples.
        """
        random, held_out = KeyedRandom(self.seed, 0), set[str]()
        for number in range(self.n_validation):
            text = self.sample(random)
            held_out.add(text)
            yield Document(f"validation-{number}", text)
        random = KeyedRandom(self.seed, 1)
        for number in range(self.n_train):
            yield Document(f"train-{number}", self._unseen(random, held_out))

    def split(self, scan: Scan) -> Split:
        """Divides by name."""
        del scan
        return split_documents("samples drawn for it", lambda document: document.name.startswith("validation"))

    def check_windows(self, seq_len: int) -> None:
        """Refuses windows that cut a sample.

        Raises:
            ConfigError: `seq_len` is not a whole number of samples.
        """
        length = self.sample_length
        if seq_len % length:
            allowed = f"a multiple of the {length} tokens of a {self.source.name!r} sample"
            raise ConfigError(problem("seq_len", seq_len, allowed, f"set it to {length}"))

    def _unseen(self, random: KeyedRandom, held_out: set[str]) -> str:
        for _ in range(MOST_TRIES):
            text = self.sample(random)
            if text not in held_out:
                return text
        raise DataError(
            f"corpus {self.source.name!r} has too few different samples: {MOST_TRIES} in a row were among the "
            f"n_validation={self.n_validation} held out, and training must have others; make it smaller or the task larger"
        )
