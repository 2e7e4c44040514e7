"""A local n-gram whose place in the last few tokens is switched by one of them: adaptive local mixing."""

from typing import Literal, Self

from pydantic import Field, model_validator

from twoaxis.core.errors import ConfigError, problem
from twoaxis.data.synthetic.base import CUE, DIGITS, FILLER, LOWER, Draws, SyntheticConfig


class SwitchingNgramConfig(SyntheticConfig):
    """Runs of random letters, each with a switch at its end that says which of the last letters comes again.

    Equation: after switch m and the cue, the next token is the letter that stands m + 1 places before the switch
    Text:     `gbhc1=h`: a run, a switch from 0, the cue, and the answer; letters repeat
    Answer:   one of the last n_switches letters, each as often as the others
    Source:   no published task; adaptive local mixing, which arXiv:2603.16039 recommends ShortSWA for, in its smallest form
    Asks for: two local steps, the first of which may be fixed: bring the switch to the cue, then read at the place that it
              names. One attention does one of them; a convolution, a shift or a short window before it does the first

    Args:
        n_letters: letters to draw from.
        n_switches: switches, and letters they choose from.
        delay: fillers between the switch and the cue.
        run: letters before every switch.
        n_answers: runs of a sample.

    Raises:
        ConfigError: runs shorter than what the switches choose from.

    Example:
        >>> SwitchingNgramConfig(n_switches=5, run=5, delay=1, n_answers=2).sample(Draws(0))
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

    def sample(self, draws: Draws) -> str:
        """Draws runs and switches."""
        letters = draws.below(self.n_letters, self.n_answers * self.run).reshape(self.n_answers, self.run)
        switches = draws.below(self.n_switches, self.n_answers)
        parts = []
        for run, switch in zip(letters.tolist(), switches.tolist(), strict=True):
            text = "".join(LOWER[number] for number in run)
            parts.append(text + DIGITS[switch] + FILLER * self.delay + CUE + text[-1 - switch])
        return "".join(parts)
