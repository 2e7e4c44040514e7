"""One choice of an answer: the text of one generation, on its way to whoever asked."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from twoaxis.data import Tokenizer
from twoaxis.data.stopping_text import StoppingText
from twoaxis.interop.serving.generation import Ending


class Piece(NamedTuple):
    """Text that became certain.

    Attributes:
        choice: its number in the answer.
        text: new text; empty only at the end.
        ending: how the choice ends, with its last piece.
        tokens: new tokens of the choice so far, those of a stop string included.
    """

    choice: int
    text: str
    ending: Ending | None
    tokens: int


class Choice:
    """Makes text of tokens, ends at stop strings, and hands each piece on; it listens to one generation.

    Args:
        index: of the choice in its answer.
        tokenizer: of the model.
        stops: stop strings.
        lead: left out where the text begins with it.
        deliver: called with every piece, in the thread of the model.
    """

    def __init__(
        self, index: int, tokenizer: Tokenizer, stops: Sequence[str], lead: str, deliver: Callable[[Piece], None]
    ) -> None:
        self._index, self._lead, self._deliver = index, lead, deliver
        self._text = StoppingText(tokenizer, stops)
        self._tokens = 0

    def token(self, token: int) -> bool:
        """Takes a token, and says whether a stop string is complete."""
        self._tokens += 1
        self._hand_on(self._text.push(token), None)
        return self._text.stopped

    def end(self, ending: Ending) -> None:
        """Hands on what is left, with the ending."""
        text = self._text.rest() if ending in ("stop", "length") else ""
        self._hand_on(text, "stop" if self._text.stopped and ending == "length" else ending)

    def _hand_on(self, text: str, ending: Ending | None) -> None:
        if text:
            text, self._lead = text.removeprefix(self._lead), ""
        if text or ending:
            self._deliver(Piece(self._index, text, ending, self._tokens))
