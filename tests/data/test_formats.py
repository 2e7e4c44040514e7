"""What a corpus is follows from its content: nothing is trained on its syntax, and nothing is left out, without a word."""

import gzip
import json
import os
import tarfile
from pathlib import Path
from typing import Any, cast

import pytest

from twoaxis.core.errors import ConfigError, DataError
from twoaxis.core.text import decode_text
from twoaxis.data.corpus import Corpus, parse_corpus
from twoaxis.data.tokenizer import FileTokenizerConfig

LINES = "".join(json.dumps({"text": f"text {number}, é"}, ensure_ascii=False) + "\n" for number in range(20))
PROSE = "Fellow citizens of the Senate.\n" * 20


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("a.json", LINES.encode(), "jsonl"),
        ("a.ndjson", LINES.encode(), "jsonl"),
        ("a.txt", LINES.encode(), "jsonl"),
        ("a", b"\xef\xbb\xbf" + LINES.encode(), "jsonl"),
        ("long.json", json.dumps({"text": "x" * 100_000}).encode(), "jsonl"),
        ("a.jsonl", PROSE.encode(), "jsonl"),
        ("a.txt", PROSE.encode(), "text"),
        ("a.md", b"# Title\n" + PROSE.encode(), "text"),
        ("a.py", b"{\n  1: 2\n}\n", "text"),
        ("half.txt", LINES.encode() + PROSE.encode(), "jsonl"),
        ("some.txt", b'{"text": 1}\n' + PROSE.encode(), "text"),
        ("a.bin", b"PAR1\x15\x04 and more PAR1", "parquet"),
        ("empty.txt", b"", "text"),
        ("none.json", None, "text"),
        ("none.ndjson", None, "jsonl"),
    ],
)
def test_the_content_of_a_bare_path_tells_its_kind(tmp_path: Path, name: str, content: bytes | None, kind: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert parse_corpus(str(tmp_path / name)).to_data()["kind"] == kind


def tar(folder: Path) -> bytes:
    (folder / "in.txt").write_text(PROSE)
    with tarfile.open(folder / "all.tar", "w") as archive:
        archive.add(folder / "in.txt", "in.txt")
    return (folder / "all.tar").read_bytes()


def test_what_would_be_read_as_its_syntax_is_refused(tmp_path: Path) -> None:
    cases: dict[str, tuple[bytes, str]] = {
        "a.csv": (b"id,text\n1,one\n", "is a table of comma-separated values: must be text, JSON Lines or Parquet; convert it"),
        "a.tsv": (b"id\ttext\n", "is a table of tab-separated values"),
        "a.html": (b"<!DOCTYPE html>\n<p>one", "is HTML"),
        "page.txt": (b"\n <html lang='en'>one</html>", "is HTML"),
        "a.xml": (b'<?xml version="1.0"?><a/>', "is XML"),
        "list.json": (json.dumps([{"text": "one"}]).encode(), "is JSON, but not one object per line"),
        "object.json": (json.dumps({"text": "one"}, indent=1).encode(), "is JSON, but not one object per line"),
        "a.jsonl.gz": (
            gzip.compress(LINES.encode()),
            "is compressed by gzip: must be text in UTF-8, JSON Lines or Parquet; unpack it",
        ),
        "a.zst": (b"\x28\xb5\x2f\xfd rest", "is compressed by zstd"),
        "a.tar": (tar(tmp_path), "is a tar archive"),
        "a.pdf": (b"%PDF-1.7 ...", "is a PDF file"),
        "a.utf16": ("one".encode("utf-16"), "is text in UTF-16"),
        "unmarked.txt": (PROSE.encode("utf-16-le"), "is text in UTF-16"),
    }
    for name, (content, message) in cases.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError) as caught:
            parse_corpus(str(tmp_path / name))
        assert message in str(caught.value) and "\n" not in str(caught.value)
    # Whoever says so trains on syntax.
    assert Corpus.open(parse_corpus({"kind": "text", "path": str(tmp_path / "a.csv")})).scan.n_documents == 1


@pytest.mark.parametrize(
    ("names", "kind", "pattern"),
    [
        (("a.txt", "b/c.txt", "notes.json", "LICENSE"), "text", "*.txt"),
        (("a.jsonl", "b/c.jsonl"), "jsonl", "*.jsonl"),
        (("a.ndjson",), "jsonl", "*.ndjson"),
        (("a.parquet",), "parquet", "*.parquet"),
        ((), "text", "*.txt"),
    ],
)
def test_the_files_of_a_folder_tell_its_kind(tmp_path: Path, names: tuple[str, ...], kind: str, pattern: str) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("one")
    found = parse_corpus(tmp_path).to_data()
    assert (found["kind"], found["pattern"]) == (kind, pattern)


@pytest.mark.parametrize(
    "names", [("README.txt", "a.jsonl"), ("a.jsonl", "a.ndjson"), ("a.csv",), ("README.txt", "a.jsonl.gz")]
)
def test_files_that_would_be_left_out_are_named(tmp_path: Path, names: tuple[str, ...]) -> None:
    for name in names:
        (tmp_path / name).write_text("one")
    with pytest.raises(
        ConfigError, match=r"holds \*\..*: must be of one kind: .*; name its files with kind and pattern$"
    ) as caught:
        parse_corpus(tmp_path)
    assert all(f"*{Path(name).suffix}" in str(caught.value) for name in names)


def test_what_is_no_file_is_not_opened(tmp_path: Path) -> None:
    """Opening a pipe waits for somebody who writes."""
    os.mkfifo(tmp_path / "pipe")
    assert parse_corpus(tmp_path / "pipe").to_data()["kind"] == "text"


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_a_wrong_byte_is_named_where_it_is(mark: bytes) -> None:
    """Catches offsets that count from behind the byte order mark."""
    with pytest.raises(ValueError, match=f"^text: byte 0xff at offset {len(mark) + 2} is not UTF-8"):
        decode_text(mark + b"ab\xff", "text")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_other_encodings_are_named(encoding: str) -> None:
    name = "UTF-32" if encoding == "utf-32" else "UTF-16"
    remedy = f"must be text in UTF-8; convert it, for example with iconv -f {name} -t UTF-8"
    with pytest.raises(ValueError, match=f"^recipe: is text in {name}: {remedy}$"):
        decode_text("steps = 3".encode(encoding), "recipe")


def test_a_zero_in_a_text_is_no_other_encoding() -> None:
    assert decode_text(b"one\0two, three", "text") == "one\0two, three"


@pytest.mark.parametrize("beginning", ["GGUF is a format", "BZh is a strange word", "PAR1 begins it", "%PDF-files are"])
def test_a_text_may_begin_with_the_letters_of_a_format(beginning: str, tmp_path: Path) -> None:
    text = f"{beginning} of which this text tells. " * 20
    assert decode_text(text.encode(), "text") == text
    (tmp_path / "a.txt").write_text(text)
    assert parse_corpus(tmp_path / "a.txt").to_data()["kind"] == "text"


def test_files_of_a_folder_are_looked_into(tmp_path: Path) -> None:
    """A folder of them was once read as its syntax."""
    (tmp_path / "a.txt").write_text('{"text": "one"}\n{"text": "two"}\n')
    with pytest.raises(ConfigError, match=r"holds jsonl in a.txt: must be text; name its files with kind and pattern$"):
        parse_corpus(tmp_path)


@pytest.mark.parametrize("names", [("a.txt", "B.TXT"), ("a.jsonl", "b.JSONL"), ("a.CSV",)])
def test_suffixes_in_capitals_are_not_left_out(tmp_path: Path, names: tuple[str, ...]) -> None:
    for name in names:
        (tmp_path / name).write_text("one")
    with pytest.raises(ConfigError, match="must be of one kind"):
        parse_corpus(tmp_path)


def test_a_folder_of_suffixes_in_capitals_is_read(tmp_path: Path) -> None:
    (tmp_path / "B.TXT").write_text("one")
    assert [document.name for document in parse_corpus(tmp_path).documents()] == ["B.TXT"]


def test_folders_behind_links_are_read_once(tmp_path: Path) -> None:
    """They were left out without a word."""
    folder, elsewhere = tmp_path / "corpus", tmp_path / "elsewhere"
    (folder / "own").mkdir(parents=True)
    (elsewhere / "deep").mkdir(parents=True)
    for path in (folder / "a.txt", folder / "own" / "b.txt", elsewhere / "deep" / "c.txt"):
        path.write_text(path.name)
    (folder / "link").symlink_to(elsewhere)
    (folder / "again").symlink_to(folder / "own")
    (elsewhere / "deep" / "back").symlink_to(folder)
    (elsewhere / "up").symlink_to(tmp_path)
    (folder / "file.txt").symlink_to(elsewhere / "deep" / "c.txt")
    corpus = parse_corpus(folder)
    assert [document.name for document in corpus.documents()] == ["a.txt", "file.txt", "link/deep/c.txt", "own/b.txt"]


def test_a_link_to_a_missing_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.txt").symlink_to("gone.txt")
    with pytest.raises(DataError, match=r"b.txt: cannot be read \(No such file or directory\)"):
        Corpus.open(parse_corpus(tmp_path))


def test_a_folder_that_cannot_be_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "closed").mkdir()
    (tmp_path / "a.txt").write_text("one")
    scan = os.scandir

    def refuse(path: Path) -> object:
        if Path(path).name == "closed":
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DataError, match=r"closed: cannot be read \(Permission denied\)"):
        parse_corpus(tmp_path)


def test_a_pattern_outside_the_folder_is_an_error_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^pattern=.*: must be a pattern of names within the folder"):
        Corpus.open(parse_corpus({"kind": "text", "path": str(tmp_path), "pattern": "/etc/*"}))


def test_a_user_without_a_home_folder_is_no_trace() -> None:
    with pytest.raises(DataError, match=r"^path='~nobody-of-this-name/a.txt': must be an existing file or folder"):
        Corpus.open(parse_corpus("~nobody-of-this-name/a.txt"))
    with pytest.raises(DataError, match=r"^tokenizer ~nobody-of-this-name/a.json: cannot be read"):
        FileTokenizerConfig(path=Path("~nobody-of-this-name/a.json")).build(cast(Any, None))


def test_a_name_that_a_run_cannot_record_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run with such a path in its recipe could be neither resumed nor loaded."""
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    (folder / os.fsdecode(b"\xe9.txt")).write_text("a text and its end")
    for build in (parse_corpus, lambda path: FileTokenizerConfig(path=path)):
        with pytest.raises(
            ConfigError, match=r"caf\\+xe9': must be a name in UTF-8, since the run records it as text; rename it"
        ):
            build(folder)
    monkeypatch.chdir(folder)
    corpus = Corpus.open(parse_corpus(Path(".")))
    assert (corpus.source.name, corpus.scan.n_documents) == ("caf\\xe9", 1)
    assert json.loads(json.dumps(corpus.to_data(), ensure_ascii=False).encode()) == corpus.to_data()
