"""Synthetic tasks: samples of equal length, drawn from a seed, of which only the answers count."""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from pydantic import Field

from twoaxis.core.errors import ConfigError, DataError, problem
from twoaxis.data.corpus.base import CorpusConfig, Source
from twoaxis.data.corpus.scan import Document, Scan
from twoaxis.data.corpus.split import Side, Split


class Draws:
    """A stream of random numbers that is a function of its key alone.

    Only raw bits are taken from numpy, which keeps those the same in all versions, but not its distributions.

    Example:
        >>> draws = Draws(0, 1)
        >>> draws.below(10, 4).tolist(), draws.order(4).tolist()
        ([9, 0, 6, 8], [3, 0, 1, 2])
    """

    def __init__(self, *key: int) -> None:
        self._bits = np.random.PCG64(np.random.SeedSequence(list(key)))

    def below(self, limit: int, size: int) -> np.ndarray:
        """Draws `size` whole numbers from 0 to `limit` - 1, each as likely as the others."""
        return (self._bits.random_raw(size) % np.uint64(limit)).astype(np.int64)

    def order(self, size: int) -> np.ndarray:
        """Draws one order of the numbers from 0 to `size` - 1."""
        return np.argsort(self._bits.random_raw(size), kind="stable")


CUE = "="
"""What asks for an answer, in tasks with a single cue."""

FILLER = "."
"""A token that means nothing."""

LOWER, UPPER, DIGITS = "abcdefghijklmnopqrstuvwxyz", "ABCDEFGHIJKLMNOPQRSTUVWXYZ", "0123456789"

VERSION = "1"
"""Of the texts: raised whenever the same configuration would give other samples."""

MOST_TRIES = 1000
"""Draws in a row that may repeat a validation sample before the task is found to have too few samples."""


class SyntheticConfig(CorpusConfig):
    """Base of the synthetic tasks.

    Attributes:
        n_train: samples to train on; the same one may come again.
        n_validation: samples to validate on; none of them is a training sample, and `n_train` does not change them.
        seed: of all samples.
    """

    n_train: int = Field(default=20_000, ge=1)
    n_validation: int = Field(default=1_000, ge=1)
    seed: int = Field(default=0, ge=0)

    @property
    @abstractmethod
    def sample_length(self) -> int:
        """Tokens of every sample."""

    @abstractmethod
    def sample(self, draws: Draws) -> str:
        """Draws one sample."""

    @property
    def answer_cues(self) -> str:
        """The equals sign."""
        return CUE

    @property
    def source(self) -> Source:
        """The kind of task, and the version of its texts."""
        return Source(type(self).model_fields["kind"].default, VERSION)

    def documents(self) -> Iterator[Document]:
        """Draws the validation samples, then training samples that are none of those.

        Raises:
            DataError: nearly all samples that the task has are validation samples.
        """
        draws, held_out = Draws(self.seed, 0), set[str]()
        for number in range(self.n_validation):
            text = self.sample(draws)
            held_out.add(text)
            yield Document(f"validation-{number}", text)
        draws = Draws(self.seed, 1)
        for number in range(self.n_train):
            yield Document(f"train-{number}", self._unseen(draws, held_out))

    def split(self, scan: Scan) -> Split:
        """Divides by name."""
        del scan
        return SampleSplit()

    def check_windows(self, seq_len: int) -> None:
        """Refuses windows that would cut a sample in two.

        Raises:
            ConfigError: `seq_len` is not a whole number of samples.
        """
        length = self.sample_length
        if seq_len % length:
            allowed = f"a multiple of the {length} tokens of a {self.source.name!r} sample"
            raise ConfigError(problem("seq_len", seq_len, allowed, f"set it to {length}"))

    def _unseen(self, draws: Draws, held_out: set[str]) -> str:
        for _ in range(MOST_TRIES):
            text = self.sample(draws)
            if text not in held_out:
                return text
        raise DataError(
            f"corpus {self.source.name!r} has too few different samples: {MOST_TRIES} in a row were among the "
            f"n_validation={self.n_validation} held out, and training must have others; make it smaller or the task larger"
        )


@dataclass(frozen=True)
class SampleSplit(Split):
    """Documents whose name begins with `validation` are validation."""

    @property
    def rule(self) -> str:
        """The division in words."""
        return "validation: samples drawn for it"

    def divide(self, document: Document) -> Iterator[tuple[Side, Document]]:
        """Yields the whole sample with its side."""
        yield "validation" if document.name.startswith("validation") else "train", document
