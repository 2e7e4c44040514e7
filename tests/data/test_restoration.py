"""What a tokenizer loses is measured and paid for: bits per byte never come from text that is not there."""

import json
import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from twoaxis.data import prepare
from twoaxis.data.restoration import Restoration, differences
from twoaxis.data.tokenizer import ByteTokenizer, SubwordTokenizer

TEXT = "Hello wörld 😀 Привет\n\n  it's 123 \t ﬁ \N{FULLWIDTH LATIN CAPITAL LETTER A} e\u0301 x\n" * 6
ALPHABET = pre_tokenizers.ByteLevel.alphabet()


def level(**changes: object) -> Tokenizer:
    """Byte-level pairs without merges, in which `changes` are set."""
    only = changes.pop("ascii", False)
    letters = sorted(letter for letter in ALPHABET if letter.isascii() or not only)
    engine = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    for name, value in changes.items():
        setattr(engine, name, value)
    return engine


def added(*tokens: str | AddedToken) -> Tokenizer:
    engine = level()
    engine.add_tokens(list(tokens))
    return engine


def words() -> Tokenizer:
    engine = Tokenizer(models.WordLevel(vocab={"[UNK]": 0, "Hello": 1, "x": 2}, unk_token="[UNK]"))
    engine.pre_tokenizer = pre_tokenizers.Whitespace()
    return engine


def cut(behaviour: str) -> pre_tokenizers.PreTokenizer:
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"\s+"), behaviour), by_bytes])


TOKENIZERS: dict[str, tuple[Callable[[], Tokenizer], bool]] = {
    "all bytes": (level, True),
    "cut at spaces": (lambda: level(pre_tokenizer=cut("isolated")), True),
    "added ASCII": (lambda: added("it's", "  "), True),
    "added beyond ASCII": (lambda: added("é", "ö"), False),
    "added that eats spaces": (lambda: added(AddedToken("x", lstrip=True)), False),
    "spaces removed": (lambda: level(pre_tokenizer=cut("removed")), False),
    "not all bytes": (lambda: level(ascii=True), False),
    "lower case": (lambda: level(normalizer=normalizers.Lowercase()), False),
    "NFKC": (lambda: level(normalizer=normalizers.NFKC()), False),
    "space before": (lambda: level(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)), False),
    "no decoder": (lambda: level(decoder=decoders.Fuse()), False),
    "unknown words": (words, False),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_what_is_lossless_is_known_and_all_else_is_measured(name: str) -> None:
    make, lossless = TOKENIZERS[name]
    tokenizer = SubwordTokenizer(make().to_str())
    assert tokenizer.is_lossless == lossless
    measured = Restoration.of(TEXT, tokenizer.decode(tokenizer.encode(TEXT)))
    assert (measured.repair_bits == 0) == (measured.lost_bytes == 0) == lossless
    assert Restoration.by(tokenizer, TEXT) == measured
    assert bool(measured.words("the text")) != lossless


def test_the_patch_makes_the_text_out_of_what_is_decoded() -> None:
    draw = random.Random(0)
    for _ in range(300):
        letters = "abcdefghijklmnopqrstuvwxyzéЖ😀 \n"[: draw.choice((2, 3, 30))]
        text = "".join(draw.choices(letters, k=draw.choice((0, 1, 5, 70, 200))))
        decoded = list(text)
        for _ in range(draw.choice((0, 1, 3, 50))):
            place = draw.randrange(len(decoded) + 1)
            stop = place + draw.choice((0, 1, 80))
            decoded[place:stop] = draw.choice(("", "Q", "zz" * 40))
        other, patched, there = "".join(decoded), "", 0
        for alike, dropped, missing in differences(text, other):
            assert other[there + alike : there + alike + len(dropped)] == dropped and (dropped or missing)
            patched += other[there : there + alike] + missing
            there += alike + len(dropped)
        assert patched + other[there:] == text
        found = Restoration.of(text, other)
        assert (found.repair_bits == 0) == (text == other) and found.lost_bytes <= found.text_bytes


def test_text_that_is_lost_wholly_costs_its_bytes() -> None:
    found = Restoration.of("Привет" * 500, "")
    assert found.lost_bytes == found.text_bytes and 8 <= found.bits_per_byte < 8.2


def test_each_capital_letter_is_one_byte() -> None:
    text = "The House and the Senate. " * 100
    found = Restoration.of(text, text.lower())
    assert found.lost_bytes == 300 and found.repair_bits < 300 * 24


def save(engine: Tokenizer, folder: Path) -> str:
    engine.save(str(folder / "tokenizer.json"))
    return str(folder / "tokenizer.json")


def test_bits_per_byte_of_a_run_pay_for_what_is_lost(tmp_path: Path) -> None:
    """Text that maps to nothing once made bits per byte small: 2.04 after three steps, where bytes gave 7.90."""
    (tmp_path / "text.txt").write_text(TEXT * 20)
    path = save(level(ascii=True), tmp_path)
    data = prepare(str(tmp_path / "text.txt"), path, tmp_path / "cache")
    lost = data.restored["validation"]
    assert data.bits_per_byte(0.0) == lost.bits_per_byte > 3
    header = data.validation.header
    assert data.bits_per_byte(math.log(2)) == pytest.approx(header.n_tokens / header.text_bytes + lost.bits_per_byte)
    assert [remark.split("(")[0] for remark in data.remarks] == [
        f"the tokenizer loses {100 * data.restored[side].lost_bytes / data.restored[side].text_bytes:.3g} % of the {side} text "
        for side in ("train", "validation")
    ]
    assert data.to_data()["validation"]["lost_bytes"] == lost.lost_bytes


def test_documents_without_a_token_count(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for number in range(12):
        (tmp_path / "texts" / f"{number}.txt").write_text(("Привет", "Hello")[number % 2] + f" {number}" * (number % 2))
    engine = level(ascii=True, pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    data = prepare(str(tmp_path / "texts"), save(engine, tmp_path), tmp_path / "cache")
    whole = sum(found.text_bytes for found in data.restored.values())
    assert whole == data.corpus.scan.text_bytes > data.train.header.text_bytes + data.validation.header.text_bytes


def test_it_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.txt").write_text(TEXT * 20)
    path = save(level(ascii=True), tmp_path)
    first = prepare(str(tmp_path / "text.txt"), path, tmp_path / "cache")
    with monkeypatch.context() as patched:
        patched.setattr(SubwordTokenizer, "decode", lambda *_: pytest.fail("measured again"))
        assert prepare(str(tmp_path / "text.txt"), path, tmp_path / "cache").restored == first.restored
    for damage in (b"{", b"[]", b'{"text_bytes": "3"}', b'{"lost": 3}'):
        [kept] = (tmp_path / "cache").rglob("validation.restored.json")
        kept.write_bytes(damage)
        assert prepare(str(tmp_path / "text.txt"), path, tmp_path / "cache").restored == first.restored
        assert json.loads(kept.read_bytes())["lost_bytes"] == first.restored["validation"].lost_bytes


def test_nothing_changes_for_tokenizers_that_lose_nothing(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    data = prepare(str(tmp_path / "text.txt"), "byte", tmp_path / "cache")
    assert ByteTokenizer().is_lossless and data.restored == {} and data.remarks == ()
    assert not list((tmp_path / "cache").rglob("*.restored.json"))
    assert "lost_bytes" not in data.to_data()["train"]
