"""Text that appears token by token: the text of all tokens up to a stop string, and never half a character."""

import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from twoaxis.data.text_stream import CONTEXT_TOKENS, StoppingText, StopStringMatcher, TextStream
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


def first_stop(text: str, stops: list[str]) -> str:
    """The text before the stop string that is complete first, character by character."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))]
    return text


@given(st.lists(st.text("ab", max_size=4), max_size=8), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_stop_strings_end_the_text_whatever_its_pieces(pieces: list[str], stops: list[str]) -> None:
    matcher, out, stopped = StopStringMatcher(stops), "", False
    expected = first_stop("".join(pieces), stops)
    for count, piece in enumerate(pieces, start=1):
        text, stopped = matcher.push(piece)
        out += text
        assert expected.startswith(out)
        if stopped:
            assert out == expected
            break
        # Nothing is held back without need.
        held = "".join(pieces[:count])[len(out) :]
        assert not held or any(stop.startswith(held) for stop in stops)
    if not stopped:
        out += matcher.rest()
    assert out == expected
    assert stopped == any(stop in "".join(pieces) for stop in stops)


@given(st.text("aé日", max_size=6), st.lists(st.text("aé日", min_size=1, max_size=2), max_size=2))
def test_text_of_tokens_ends_before_a_stop_string(text: str, stops: list[str]) -> None:
    written, out = StoppingText(ByteTokenizer(), stops), ""
    for token in text.encode():
        out += written.push(token)
        if written.stopped:
            break
    assert out + written.rest() == first_stop(text, stops)
    assert written.stopped == any(stop in text for stop in stops)


def test_half_a_character_at_the_end_may_complete_a_stop_string() -> None:
    written = StoppingText(ByteTokenizer(), ["a\ufffd"])
    assert (written.push(ord("a")), written.push("é".encode()[0]), written.stopped) == ("", "", False)
    assert (written.rest(), written.stopped) == ("", True)
