"""Stop strings: where a text ends, in whatever pieces it arrives, and tokens that end it."""

from hypothesis import given
from hypothesis import strategies as st

from twoaxis.data.stop_strings import StopScanner
from twoaxis.data.stopping_text import StoppingText
from twoaxis.data.tokenizer import ByteTokenizer


def first_stop(text: str, stops: list[str]) -> str:
    """The text before the stop string that is complete first, character by character."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))]
    return text


@given(st.lists(st.text("ab", max_size=4), max_size=8), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_stop_strings_end_the_text_whatever_its_pieces(pieces: list[str], stops: list[str]) -> None:
    scanner, out, stopped = StopScanner(stops), "", False
    expected = first_stop("".join(pieces), stops)
    for count, piece in enumerate(pieces, start=1):
        text, stopped = scanner.push(piece)
        out += text
        assert expected.startswith(out)
        if stopped:
            assert out == expected
            break
        # Nothing is held back without need.
        held = "".join(pieces[:count])[len(out) :]
        assert not held or any(stop.startswith(held) for stop in stops)
    if not stopped:
        out += scanner.rest()
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
