"""Text of tokens that arrive one at a time."""

from twoaxis.data.tokenizer import Tokenizer

CONTEXT_TOKENS = 8
"""Decoded again before each new token: some tokenizers write a token differently at the start of a text."""

UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """Decodes tokens as they come, and gives out only text that later tokens do not change.

    A character may span several tokens: it appears with the last of them. All that was given out and the rest together are the
    text of all tokens.

    Cost: a token decodes the unsettled ones and a few before them, however long the text is.

    Args:
        tokenizer: that made the tokens.

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

    def push(self, token: int) -> str:
        """The text that this token completes.

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
        """The text of tokens that never became whole characters; call it once, at the end."""
        new = self._new()
        self._settle()
        return new

    def _new(self) -> str:
        before = self._tokenizer.decode(self._tokens[: self._settled])
        return self._tokenizer.decode(self._tokens)[len(before) :]

    def _settle(self) -> None:
        self._tokens = self._tokens[-CONTEXT_TOKENS:]
        # Context that begins inside a character would be written differently.
        while self._tokens and self._tokenizer.decode(self._tokens).startswith(UNFINISHED):
            del self._tokens[0]
        self._settled = len(self._tokens)
