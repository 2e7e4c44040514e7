"""Adaptive local mixing: a token selects which of the last tokens is repeated."""

from typing import Literal, Self

from pydantic import Field, model_validator

from twoaxis.core.errors import ConfigError, problem
from twoaxis.data.synthetic.base import CUE, DIGITS, FILLER, LOWER, KeyedRandom, SyntheticConfig


class SwitchingNgramConfig(SyntheticConfig):
    """Runs of random letters, each with a final switch that selects which of the last letters is repeated.

    Equation: after switch m and the cue, the next token is the letter m + 1 positions before the switch
    Text:     `gbhc1=h`: a run, a switch from 0, the cue, and the answer; letters repeat
    Answer:   one of the last n_switches letters, each as often as the others
    Source:   no published task; adaptive local mixing, which arXiv:2603.16039 recommends ShortSWA for, in its smallest form
    Needs:    two local steps, the first of which may be fixed: move the switch to the cue, then read at the position that it
              selects. One attention does one of them; a convolution, a shift or a short window before it does the first

    Args:
        n_letters: letters to draw from.
        n_switches: switches, and the letters they select from.
        delay: fillers between the switch and the cue.
        run: letters before every switch.
        n_answers: runs of a sample.

    Raises:
        ConfigError: runs with fewer letters than switches.

    Example:
        >>> SwitchingNgramConfig(n_switches=5, run=5, delay=1, n_answers=2).sample(KeyedRandom(0))
        'hbafd0.=dghfhf4.=g'
    """

    kind: Literal["switching_ngram"] = "switching_ngram"
    n_letters: int = Field(default=8, ge=2, le=26)
    n_switches: int = Field(default=6, ge=1, le=10)
    delay: int = Field(default=0, ge=0)
    run: int = Field(default=8, ge=1)
    n_answers: int = Field(default=6, ge=1)

    @model_validator(mode="after")
    def _reaches(self) -> Self:
        if self.run < self.n_switches:
            allowed = f"at least n_switches={self.n_switches}, so that every switch has a letter"
            raise ConfigError(problem("run", self.run, allowed, "use longer runs or fewer switches"))
        return self

    @property
    def sample_length(self) -> int:
        """Runs with a switch, its delay, a cue and an answer each."""
        return self.n_answers * (self.run + self.delay + 3)

    def sample(self, random: KeyedRandom) -> str:
        """Draws runs and switches."""
        letters = random.integers(self.n_letters, self.n_answers * self.run).reshape(self.n_answers, self.run)
        switches = random.integers(self.n_switches, self.n_answers)
        parts = []
        for run, switch in zip(letters.tolist(), switches.tolist(), strict=True):
            text = "".join(LOWER[number] for number in run)
            parts.append(text + DIGITS[switch] + FILLER * self.delay + CUE + text[-1 - switch])
        return "".join(parts)
