"""Prepares the data of a run: from a corpus and a tokenizer to token shards."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from twoaxis.core.errors import DataError
from twoaxis.core.files import CACHE_REMEDY, CachePath, cache_folder, replacing
from twoaxis.core.text import json_value
from twoaxis.data.batch import Packing
from twoaxis.data.corpus import Corpus, CorpusConfig, Side, parse_corpus
from twoaxis.data.restoration import Restoration
from twoaxis.data.shards import VERSION, TokenShard, shard_writer
from twoaxis.data.tokenizer import ByteTokenizer, Progress, Tokenizer, TokenizerConfig, parse_tokenizer


@dataclass(frozen=True)
class PreparedData:
    """A corpus as tokens, divided into training and validation.

    Attributes:
        corpus: its name, version, hash and division.
        tokenizer: of the tokens.
        train: training tokens.
        validation: validation tokens.
        answer_cues: the tokens after which a target counts; if empty, all count.
        restored: the text that decoding does not restore, by side.
        remarks: notes for the user, one line each.
    """

    corpus: Corpus
    tokenizer: Tokenizer
    train: TokenShard
    validation: TokenShard
    answer_cues: tuple[int, ...] = ()
    restored: Mapping[Side, Restoration] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()

    def bits_per_byte(self, nats_per_token: float, packing: Packing = "isolated") -> float:
        """Converts a validation loss to bits per byte of text, which is comparable between tokenizers.

        Text that a tokenizer loses is charged; see `data.restoration`.

        Args:
            nats_per_token: the mean over the targets.
            packing: of the batches; if isolated, begin markers of documents are no targets.
        """
        header, restored = self.validation.header, self.restored.get("validation", Restoration())
        begins = header.n_documents if packing == "isolated" and self.tokenizer.begin_of_document else 0
        # The shard does not count texts without a token.
        text_bytes = restored.text_bytes or header.text_bytes
        return nats_per_token / math.log(2) * (header.n_tokens - begins) / text_bytes + restored.bits_per_byte

    def to_data(self) -> dict[str, Any]:
        """The record of the data in a run folder, as JSON-ready data."""
        return {
            "corpus": self.corpus.to_data(),
            "tokenizer": {"vocab_size": self.tokenizer.vocab_size, "fingerprint": self.tokenizer.fingerprint},
            "train": _side_data(self.train, self.restored.get("train")),
            "validation": _side_data(self.validation, self.restored.get("validation")),
        }


def prepare(
    corpus: CorpusConfig | Mapping[str, Any] | str = "sotu",
    tokenizer: TokenizerConfig | Mapping[str, Any] | str = "byte",
    cache: CachePath = None,
    progress: Progress | None = None,
) -> PreparedData:
    """Reads the corpus, builds the tokenizer, and writes the shards unless they are cached.

    The cache is keyed by content: a changed text, division or tokenizer gives new shards.

    Args:
        corpus: a configuration, or its short form: a kind or a path.
        tokenizer: a configuration, or its short form: a kind or the path of a `tokenizer.json`.
        cache: the cache folder; by default `TWOAXIS_CACHE`, else `~/.cache/twoaxis`.
        progress: called while the tokenizer is trained and the text is encoded.

    Raises:
        DataError: the corpus, the tokenizer or a cached shard cannot be used, or the cache cannot be written.
    """
    opened = Corpus.open(parse_corpus(corpus))
    config = parse_tokenizer(tokenizer)
    built = config.build(opened, cache, progress)
    cues = _answer_cues(opened, built)
    folder = cache_folder(cache) / "shards" / f"v{VERSION}-{opened.fingerprint[:16]}-{built.fingerprint[:16]}"
    train = _shard(folder, "train", opened, built, 0, progress)
    validation = _shard(folder, "validation", opened, built, train.header.text_bytes, progress)
    restored: dict[Side, Restoration] = {}
    if not built.is_lossless:
        for side in ("train", "validation"):
            restored[side] = _restored(folder / f"{side}.restored.json", side, opened, built, progress)
    remarks = [config.remark(built), *(found.words(f"the {side} text") for side, found in restored.items())]
    return PreparedData(opened, built, train, validation, cues, restored, tuple(filter(None, remarks)))


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


def _restored(path: Path, side: Side, corpus: Corpus, tokenizer: Tokenizer, progress: Progress | None) -> Restoration:
    """The restoration of one side, measured once and cached next to the shard."""
    try:
        found = Restoration(**json_value(path.read_bytes()))
        if all(type(number) is int and number >= 0 for number in vars(found).values()):
            return found
    except (OSError, ValueError, TypeError):
        # Not measured yet, or damaged: measured from the text.
        pass
    found = Restoration()
    for document in corpus.documents(side):
        found += Restoration.by(tokenizer, document.text)
        if progress:
            progress(f"comparing the tokens of {side} with the text", found.text_bytes, corpus.scan.text_bytes)
    with replacing(path, CACHE_REMEDY) as file:
        file.write(json.dumps(asdict(found)).encode())
    return found


def _side_data(shard: TokenShard, restored: Restoration | None) -> dict[str, Any]:
    header = shard.header
    lost = {} if restored is None else {"lost_bytes": restored.lost_bytes, "repair_bits": restored.repair_bits}
    return {
        "tokens": header.n_tokens,
        "documents": header.n_documents,
        "text_bytes": header.text_bytes,
        "fingerprint": shard.fingerprint,
        **lost,
    }
