"""Streaming decoding of tokens, up to the first stop string."""

from collections.abc import Iterable, Sequence

from twoaxis.data.tokenizer import Tokenizer

CONTEXT_TOKENS = 8
"""Tokens decoded again before each new one: some tokenizers decode a token differently at the start of a text."""

UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """Decodes tokens one at a time, and returns only text that later tokens do not change.

    A character may span several tokens; it is returned with the last of them. All returned text and `rest` together are the
    text of all tokens. One exception: tokenizers with byte fallback decode a run of bytes as a whole, so a byte that is not
    UTF-8 would change characters that were returned already.

    Cost: each token decodes the unfinished ones and a few before them, for a text of any length.

    Example:
        >>> from twoaxis.data.tokenizer import ByteTokenizer
        >>> stream = TextStream(ByteTokenizer())
        >>> [stream.push(token) for token in "é!".encode()]
        ['', 'é', '!']
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._settled = 0
        """Characters of the tokens whose text has been returned."""

    def push(self, token: int) -> str:
        """Returns the text that this token completes.

        Raises:
            DataError: an id outside the vocabulary.
        """
        self._tokens.append(token)
        new = self._new()
        if not new or new.endswith(UNFINISHED):
            return ""
        self._settle()
        return new

    def rest(self) -> str:
        """Returns the text of tokens without a whole character; call it once, at the end."""
        new = self._new()
        self._settle()
        return new

    def _new(self) -> str:
        return self._tokenizer.decode(self._tokens)[self._settled :]

    def _settle(self) -> None:
        self._tokens = self._tokens[-CONTEXT_TOKENS:]
        # Context that begins inside a character would decode differently.
        while (text := self._tokenizer.decode(self._tokens)).startswith(UNFINISHED):
            del self._tokens[0]
        self._settled = len(text)


def stop_tokens(tokenizer: Tokenizer, stops: Iterable[str] = ()) -> frozenset[int]:
    """The tokens that end a text: the end of the document, and special tokens that a stop string spells.

    Special tokens decode to nothing, so a stop string cannot match them in the text.

    Example:
        >>> from twoaxis.data.tokenizer import ByteTokenizer
        >>> stop_tokens(ByteTokenizer(), ["<|im_end|>"])
        frozenset()
    """
    special, end = tokenizer.special_tokens, tokenizer.end_of_document
    return frozenset({special[stop] for stop in stops if stop in special} | (set() if end is None else {end}))


class StopStringMatcher:
    """Returns text up to the first stop string (none is empty), and holds back text that may begin one.

    The stop string that is complete first ends the text; of two that end together, the longer. The result does not depend on
    the pieces of the text.

    Example:
        >>> matcher = StopStringMatcher(["END"])
        >>> [matcher.push(piece) for piece in ("one E", "N", "d E", "ND")]
        [('one ', False), ('', False), ('ENd ', False), ('', True)]
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Returns the text that is certain now, and whether a stop string ends it."""
        text = self._held + text
        found = [(text.index(stop) + len(stop), -len(stop)) for stop in self._stops if stop in text]
        if found:
            self._held = ""
            end, length = min(found)
            return text[: end + length], True
        certain = len(text) - self._uncertain(text)
        self._held = text[certain:]
        return text[:certain], False

    def rest(self) -> str:
        """Returns the text held back; call it once, at the end."""
        held, self._held = self._held, ""
        return held

    def _uncertain(self, text: str) -> int:
        """The length of the longest suffix of the text that begins a stop string."""
        longest = max((len(stop) for stop in self._stops), default=0) - 1
        lengths = range(min(longest, len(text)), 0, -1)
        return next((n for n in lengths if any(stop.startswith(text[-n:]) for stop in self._stops)), 0)


class StoppingText:
    """Decodes tokens one at a time, and ends the text before a stop string.

    Attributes:
        stopped: whether a stop string has ended the text.

    Example:
        >>> from twoaxis.data.tokenizer import ByteTokenizer
        >>> text = StoppingText(ByteTokenizer(), ["END"])
        >>> [text.push(token) for token in b"an END"], text.stopped, text.rest()
        (['a', 'n', ' ', '', '', ''], True, '')
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._text, self._stop = TextStream(tokenizer), StopStringMatcher(stops)
        self.stopped = False

    def push(self, token: int) -> str:
        """Returns the text that becomes certain with this token.

        Raises:
            DataError: an id outside the vocabulary.
        """
        text, self.stopped = self._stop.push(self._text.push(token))
        return text

    def rest(self) -> str:
        """Returns the text held back; call it once, at the end."""
        if self.stopped:
            return ""
        text, self.stopped = self._stop.push(self._text.rest())
        return text + self._stop.rest()
