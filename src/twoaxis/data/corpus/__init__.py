"""Corpora: one row per kind."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, SerializeAsAny

from twoaxis.core.registry import Row, Table
from twoaxis.data.corpus.base import Corpus, CorpusConfig, Document, Side, expanded
from twoaxis.data.corpus.sotu import SotuConfig
from twoaxis.data.corpus.user_files import JsonlConfig, ParquetConfig, TextConfig, detect_kind
from twoaxis.data.synthetic.kinds import CopyConfig, EarlyFeatureConfig, MqarConfig, MultiHopConfig, SwitchingNgramConfig

CORPORA: Table[CorpusConfig] = Table(
    "corpus",
    CorpusConfig,
    "twoaxis.corpora",
    [
        Row(SotuConfig, "State of the Union messages 1790-2026 from the package sotu", {"default": {}}),
        Row(TextConfig, "a text file, or a folder with one document per file", {"file": {"path": "corpus.txt"}}),
        Row(JsonlConfig, "JSON Lines files with one document per line", {"file": {"path": "corpus.jsonl"}}),
        Row(ParquetConfig, "Parquet files with one document per row", {"file": {"path": "corpus.parquet"}}),
        Row(MqarConfig, "synthetic: the values of several keys (associative recall)", {"default": {}}),
        Row(CopyConfig, "synthetic: symbols copied in order without the blanks among them (induction)", {"default": {}}),
        Row(SwitchingNgramConfig, "synthetic: one of the last letters, selected by the last token", {"default": {}}),
        Row(EarlyFeatureConfig, "synthetic: a token or its looked-up value, selected by a mark", {"default": {}}),
        Row(MultiHopConfig, "synthetic: the k-th successor of a node on a cycle of shuffled edges", {"default": {}}),
    ],
)
"""The kinds of corpus; other packages add rows through the entry point `twoaxis.corpora`."""


def parse_corpus(data: Any) -> CorpusConfig:
    """Reads a corpus from a table with `kind`, a bare kind, a bare path, or a configuration.

    The kind of a bare path is detected from its content, that of a folder from the files in it.

    Raises:
        ConfigError: neither a known kind nor a path, or a file in a format that no kind reads.

    Example:
        >>> parse_corpus("sotu").kind, parse_corpus("notes/all.jsonl").kind
        ('sotu', 'jsonl')
    """
    if isinstance(data, Path) or (isinstance(data, str) and data not in CORPORA and _is_path(data)):
        return CORPORA.parse({**detect_kind(expanded(Path(data))), "path": str(data)})
    return CORPORA.parse(data)


def _is_path(text: str) -> bool:
    path = expanded(Path(text))
    return path.exists() or bool(path.suffix) or len(path.parts) > 1


CorpusField = Annotated[SerializeAsAny[CorpusConfig], BeforeValidator(parse_corpus)]
"""The type of a configuration field that holds a corpus."""

__all__ = [
    "CORPORA",
    "Corpus",
    "CorpusConfig",
    "CorpusField",
    "Document",
    "JsonlConfig",
    "ParquetConfig",
    "Side",
    "SotuConfig",
    "TextConfig",
    "parse_corpus",
]
