"""From a corpus and a tokenizer to shards that are ready for training."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twoaxis.core.errors import DataError
from twoaxis.data.cache import cache_folder
from twoaxis.data.corpus import Corpus, CorpusConfig, Side, parse_corpus
from twoaxis.data.shard_format import VERSION
from twoaxis.data.shard_writer import shard_writer
from twoaxis.data.shards import TokenShard
from twoaxis.data.tokenizer import ByteTokenizer, Progress, Tokenizer, TokenizerConfig, parse_tokenizer


@dataclass(frozen=True)
class PreparedData:
    """A corpus as tokens, divided into training and validation.

    Attributes:
        corpus: its name, version, hash and division.
        tokenizer: what made the tokens.
        train: the tokens to train on.
        validation: the tokens to validate on.
        answer_cues: the tokens after which a target counts; none means that all count.
    """

    corpus: Corpus
    tokenizer: Tokenizer
    train: TokenShard
    validation: TokenShard
    answer_cues: tuple[int, ...] = ()

    def bits_per_byte(self, nats_per_token: float) -> float:
        """Turns a validation loss into bits per byte of text, which compares different tokenizers."""
        header = self.validation.header
        return nats_per_token / math.log(2) * header.n_tokens / header.text_bytes

    def to_data(self) -> dict[str, Any]:
        """Returns what a run folder records about the data, as plain JSON-ready data."""
        return {
            "corpus": self.corpus.to_data(),
            "tokenizer": {"vocab_size": self.tokenizer.vocab_size, "fingerprint": self.tokenizer.fingerprint},
            "train": _side_data(self.train),
            "validation": _side_data(self.validation),
        }


def prepare(
    corpus: CorpusConfig | Mapping[str, Any] | str = "sotu",
    tokenizer: TokenizerConfig | Mapping[str, Any] | str = "byte",
    cache: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> PreparedData:
    """Reads the corpus, builds the tokenizer, and writes the shards unless the cache has them.

    The cache is addressed by content: a changed text, division or tokenizer gives new shards.

    Args:
        corpus: a configuration, or its short form: a kind or a path.
        tokenizer: a configuration, or its short form: a kind or the path of a `tokenizer.json`.
        cache: the cache folder; by default `TWOAXIS_CACHE`, else `~/.cache/twoaxis`.
        progress: called while the tokenizer is trained and the text is encoded.

    Raises:
        DataError: the corpus, the tokenizer or a cached shard cannot be used, or the cache cannot be written.
    """
    opened = Corpus.open(parse_corpus(corpus))
    built = parse_tokenizer(tokenizer).build(opened, cache, progress)
    cues = _answer_cues(opened, built)
    folder = cache_folder(cache) / "shards" / f"v{VERSION}-{opened.fingerprint[:16]}-{built.fingerprint[:16]}"
    train = _shard(folder, "train", opened, built, 0, progress)
    validation = _shard(folder, "validation", opened, built, train.header.text_bytes, progress)
    return PreparedData(opened, built, train, validation, cues)


def _answer_cues(corpus: Corpus, tokenizer: Tokenizer) -> tuple[int, ...]:
    characters = corpus.config.answer_cues
    if not characters:
        return ()
    if not isinstance(tokenizer, ByteTokenizer):
        raise DataError(
            f"corpus {corpus.source.name!r} with a tokenizer of {tokenizer.vocab_size} tokens: must be read one character a "
            "token, since single characters ask for its answers; use data.tokenizer=byte"
        )
    return tuple(tokenizer.encode(characters))


def _shard(folder: Path, side: Side, corpus: Corpus, tokenizer: Tokenizer, done: int, progress: Progress | None) -> TokenShard:
    path = folder / f"{side}.tokens"
    if not path.exists():
        _encode(path, side, corpus, tokenizer, done, progress)
    shard = TokenShard.open(path)
    if (shard.header.corpus, shard.header.tokenizer) != (corpus.fingerprint, tokenizer.fingerprint):
        raise DataError(f"{path}: belongs to another corpus or tokenizer; delete the file and run again")
    return shard


def _encode(path: Path, side: Side, corpus: Corpus, tokenizer: Tokenizer, done: int, progress: Progress | None) -> None:
    begin, end = tokenizer.begin_of_document, [] if tokenizer.end_of_document is None else [tokenizer.end_of_document]
    with shard_writer(
        path, vocab_size=tokenizer.vocab_size, tokenizer=tokenizer.fingerprint, corpus=corpus.fingerprint
    ) as writer:
        for document in corpus.documents(side):
            text_bytes = len(document.text.encode())
            ids = tokenizer.encode_array(document.text)
            writer.add([*begin, *ids.tolist(), *end] if begin or end else ids, text_bytes, document.name)
            done += text_bytes
            if progress:
                progress("encoding", done, corpus.scan.text_bytes)


def _side_data(shard: TokenShard) -> dict[str, Any]:
    header = shard.header
    return {
        "tokens": header.n_tokens,
        "documents": header.n_documents,
        "text_bytes": header.text_bytes,
        "fingerprint": shard.fingerprint,
    }
