"""Stop strings in text that arrives piece by piece."""

from collections.abc import Iterable, Sequence

from twoaxis.data.tokenizer import Tokenizer


def stop_tokens(tokenizer: Tokenizer, stops: Iterable[str] = ()) -> frozenset[int]:
    """The tokens that end a text: the end of the document, and special tokens that a stop string spells.

    Special tokens decode to nothing, so that no stop string would ever meet them in the text.

    Example:
        >>> from twoaxis.data.tokenizer import ByteTokenizer
        >>> stop_tokens(ByteTokenizer(), ["<|im_end|>"])
        frozenset()
    """
    special, end = tokenizer.special_tokens, tokenizer.end_of_document
    return frozenset({special[stop] for stop in stops if stop in special} | (set() if end is None else {end}))


class StopScanner:
    """Gives out text up to the first stop string, and nothing that may still turn out to be the start of one.

    The stop string that is complete first wins, the longer of two that end together. The pieces in which the text arrives
    change nothing.

    Args:
        stops: not empty strings.

    Example:
        >>> scanner = StopScanner(["END"])
        >>> [scanner.push(piece) for piece in ("one E", "N", "d E", "ND")]
        [('one ', False), ('', False), ('ENd ', False), ('', True)]
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """The text that is certain now, and whether a stop string ends it."""
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
        """The text held back; call it once, at the end."""
        held, self._held = self._held, ""
        return held

    def _uncertain(self, text: str) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = max((len(stop) for stop in self._stops), default=0) - 1
        lengths = range(min(longest, len(text)), 0, -1)
        return next((n for n in lengths if any(stop.startswith(text[-n:]) for stop in self._stops)), 0)
