"""Text of tokens that arrive one at a time, up to the first stop string."""

from collections.abc import Sequence

from twoaxis.data.stop_strings import StopScanner
from twoaxis.data.text_stream import TextStream
from twoaxis.data.tokenizer import Tokenizer


class StoppingText:
    """Gives out what is certain of a text, and ends it before a stop string.

    Args:
        tokenizer: that made the tokens.
        stops: not empty strings.

    Attributes:
        stopped: whether a stop string has ended the text.

    Example:
        >>> from twoaxis.data.tokenizer import ByteTokenizer
        >>> text = StoppingText(ByteTokenizer(), ["END"])
        >>> [text.push(token) for token in b"an END"], text.stopped, text.rest()
        (['a', 'n', ' ', '', '', ''], True, '')
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._text, self._stop = TextStream(tokenizer), StopScanner(stops)
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that becomes certain with this token.

        Raises:
            DataError: an id outside the vocabulary.
        """
        text, self.stopped = self._stop.push(self._text.push(token))
        return text

    def rest(self) -> str:
        """The text held back; call it once, at the end."""
        if self.stopped:
            return ""
        text, self.stopped = self._stop.push(self._text.rest())
        return text + self._stop.rest()
