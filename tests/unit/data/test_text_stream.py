"""Text that appears token by token is the text of all tokens, and never half a character."""

import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from twoaxis.data.text_stream import CONTEXT_TOKENS, TextStream
from twoaxis.data.tokenizer import ByteTokenizer, SubwordTokenizer, Tokenizer


def pieces(tokenizer: Tokenizer, tokens: list[int]) -> list[str]:
    stream = TextStream(tokenizer)
    return [*map(stream.push, tokens), stream.rest()]


@given(st.text(max_size=40))
def test_whole_characters_appear_with_their_last_byte(text: str) -> None:
    expected = [part for letter in text for part in [*[""] * (len(letter.encode()) - 1), letter]]
    # U+FFFD itself looks unfinished until something follows.
    if "\ufffd" not in text:
        assert pieces(ByteTokenizer(), list(text.encode())) == [*expected, ""]


@given(st.lists(st.sampled_from([*b"ab", *"é日\N{GRINNING FACE}".encode(), 0xFF]), max_size=60))
def test_any_bytes_end_as_their_text(tokens: list[int]) -> None:
    whole = ByteTokenizer().decode(tokens)
    assert "".join(pieces(ByteTokenizer(), tokens)) == whole
    assert "".join(pieces(ByteTokenizer(), tokens)[:-1]) == whole.rstrip("\ufffd")


def words() -> SubwordTokenizer:
    """A tokenizer that leaves the space out before the first word of a text."""
    vocabulary = {"▁one": 0, "▁two": 1, "s": 2, "<|end|>": 3}
    engine = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="s"))
    engine.add_special_tokens(["<|end|>"])
    engine.pre_tokenizer = pre_tokenizers.Metaspace()
    engine.decoder = decoders.Metaspace()
    return SubwordTokenizer(engine.to_str(), "<|end|>")


@given(st.lists(st.integers(0, 3), max_size=3 * CONTEXT_TOKENS))
def test_spaces_between_words_stay(tokens: list[int]) -> None:
    assert "".join(pieces(words(), tokens)) == words().decode(tokens)


def test_a_long_text_is_not_decoded_again() -> None:
    class Counting(ByteTokenizer):
        longest = 0

        def decode(self, ids):
            self.longest = max(self.longest, len(ids))
            return super().decode(ids)

    tokenizer = Counting()
    assert "".join(pieces(tokenizer, list("é".encode()) * 100)) == "é" * 100
    assert tokenizer.longest <= CONTEXT_TOKENS + 4
