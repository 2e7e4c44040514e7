"""Tokenizers of the library `tokenizers`: from a `tokenizer.json`, or a byte-level BPE trained on first use."""

import copy
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
from pydantic import Field

from twoaxis.core.errors import DataError, nearest
from twoaxis.core.files import CACHE_REMEDY, CachePath, cache_folder, write_once
from twoaxis.core.text import encode_text, read_text
from twoaxis.data.corpus.base import Corpus, RecordedPath, expanded
from twoaxis.data.tokenizer.base import Progress, Tokenizer, TokenizerConfig

if TYPE_CHECKING:
    import tokenizers


PIECE_CHARACTERS = 1 << 16
"""Long texts are encoded in pieces of about this many characters, to bound memory."""


class SubwordTokenizer(Tokenizer):
    """The tokenizer of a `tokenizer.json`, which may or may not restore a text exactly.

    Documents begin with the special tokens that the post-processor puts before a text, such as `<s>` in Llama and Mistral;
    those after a text are left out, since a text may continue.

    Args:
        definition: the text of the `tokenizer.json`; its truncation and padding are ignored.
        end_of_document: the token that ends documents; None without an end marker.
        where: names the tokenizer in errors.
        begin_of_document: the ids that documents begin with; None takes them from the file.

    Raises:
        DataError: not a tokenizer, or the end marker is not one of its tokens.
    """

    def __init__(
        self,
        definition: str,
        end_of_document: str | None = None,
        where: str = "tokenizer",
        begin_of_document: tuple[int, ...] | None = None,
    ) -> None:
        import tokenizers

        try:
            self._engine = tokenizers.Tokenizer.from_str(definition)
        # The library raises bare exceptions.
        except Exception as error:
            raise DataError(
                f"{where}: is not a tokenizer.json ({error}); save the tokenizer again, or delete the file"
            ) from None
        self._engine.no_truncation()
        self._engine.no_padding()
        # Text that spells a special token stays text, or it could end a document.
        self._engine.encode_special_tokens = True
        vocabulary = self._engine.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise DataError(f"{where}: has no tokens; save the tokenizer after its training")
        if end_of_document is not None and end_of_document not in vocabulary:
            remedy = nearest(end_of_document, vocabulary) if len(vocabulary) < 1000 else "name a token of the file"
            raise DataError(f"{where}: has no token end_of_document={end_of_document!r}; {remedy}")
        self.vocab_size = max(vocabulary.values()) + 1
        self.end_of_document = None if end_of_document is None else vocabulary[end_of_document]
        self._end_token = end_of_document
        form = json.loads(self._engine.to_str())
        self.begin_of_document = before_text(form["post_processor"]) if begin_of_document is None else begin_of_document
        self._splits_at_spaces, self._is_lossless = _is_byte_level(form), _is_lossless(form)

    @property
    def definition(self) -> str:
        """The whole tokenizer as JSON text."""
        content = {"kind": "subword", "end_of_document": self._end_token, "tokenizer": json.loads(self._engine.to_str())}
        if self.begin_of_document:
            # Absent in runs of older versions, which have none.
            content["begin_of_document"] = list(self.begin_of_document)
        return json.dumps(content, sort_keys=True)

    @property
    def is_lossless(self) -> bool:
        """Whether it is a byte-level BPE with a token for every byte, and nothing changes or drops text."""
        return self._is_lossless

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """The added tokens that are special."""
        return {token.content: index for index, token in self._engine.get_added_tokens_decoder().items() if token.special}

    def encode_array(self, text: str) -> np.ndarray:
        """Encodes text without special tokens."""
        encode_text(text)
        pieces = list(pieces_of(text)) if self._splits_at_spaces else [text]
        encodings = self._engine.encode_batch_fast(pieces, add_special_tokens=False)
        return np.concatenate([np.asarray(encoding.ids, dtype=np.int64) for encoding in encodings])

    def encode_special(self, text: str) -> list[int]:
        """Encodes text in which the name of a special token is that token, as in transformers."""
        encode_text(text)
        return self._parser.encode(text, add_special_tokens=False).ids

    @cached_property
    def _parser(self) -> "tokenizers.Tokenizer":
        # A copy, since the engine may be encoding in another thread.
        parser = copy.deepcopy(self._engine)
        parser.encode_special_tokens = False
        return parser

    def spelling(self, token: int) -> str:
        """The token as the file spells it; one that the file leaves out is spelt by its number."""
        return self._engine.id_to_token(token) or super().spelling(token)

    def decode(self, ids: Sequence[int]) -> str:
        """Decodes ids; special tokens are left out."""
        self._check_ids(ids)
        return self._engine.decode(list(ids), skip_special_tokens=True)


class FileTokenizerConfig(TokenizerConfig):
    """Any `tokenizer.json`.

    Attributes:
        path: the file.
        end_of_document: the token that ends every document, such as `<|endoftext|>`; None without an end marker.
        within: the base of a relative path: the `working_directory`, or the `run_folder` of a run that began with a model.
    """

    kind: Literal["file"] = "file"
    path: RecordedPath
    end_of_document: str | None = None
    within: Literal["working_directory", "run_folder"] = "working_directory"

    def in_run_folder(self, folder: Path) -> Self:
        """Resolves a path within the run folder."""
        path = folder / self.path
        # Without the file `build` raises; the run would otherwise begin with a new model.
        return self.replace(path=path, within="working_directory") if self.within == "run_folder" and path.is_file() else self

    def build(self, corpus: Corpus, cache: CachePath = None, progress: Progress | None = None) -> SubwordTokenizer:
        """Reads the file."""
        del corpus, cache, progress
        if self.within == "run_folder":
            raise DataError(f"tokenizer {self.path}: must be in the folder of its run, which begins with a model; train there")
        definition = read_text(expanded(self.path), f"tokenizer {self.path}", "set path to a tokenizer.json")
        return SubwordTokenizer(definition, self.end_of_document, f"tokenizer {self.path}")


def pieces_of(text: str, characters: int = PIECE_CHARACTERS) -> Iterator[str]:
    """Cuts text before a space or line end after another character, where byte-level tokenizers cut too.

    Example:
        >>> list(pieces_of("one two  three", characters=4))
        ['one two', '  three']
    """
    cut = re.compile(r"(?<=\S)[ \n]")
    start = 0
    while start < len(text):
        found = cut.search(text, start + characters)
        end = found.start() if found else len(text)
        yield text[start:end]
        start = end
    if not text:
        yield text


def before_text(post_processor: Mapping[str, Any] | None) -> tuple[int, ...]:
    """The special tokens that a post-processor of a `tokenizer.json` puts before a text.

    Example:
        >>> piece = [{"SpecialToken": {"id": "<s>"}}, {"Sequence": {"id": "A"}}, {"SpecialToken": {"id": "</s>"}}]
        >>> tokens = {"<s>": {"ids": [1]}, "</s>": {"ids": [2]}}
        >>> before_text({"type": "TemplateProcessing", "single": piece, "special_tokens": tokens})
        (1,)
    """
    kind = (post_processor or {}).get("type")
    if post_processor is None or kind == "ByteLevel":
        return ()
    if kind == "Sequence":
        # A later processor puts its tokens before those of earlier ones.
        return tuple(token for one in reversed(post_processor["processors"]) for token in before_text(one))
    if kind == "TemplateProcessing":
        before = takewhile(lambda piece: "SpecialToken" in piece, post_processor["single"])
        names = [piece["SpecialToken"]["id"] for piece in before]
        return tuple(token for name in names for token in post_processor["special_tokens"][name]["ids"])
    # BERT and RoBERTa.
    return (post_processor["cls"][1],)


def _is_byte_level(form: Mapping[str, Any]) -> bool:
    splitter = form["pre_tokenizer"] or {}
    plain = splitter.get("type") == "ByteLevel" and splitter.get("use_regex", True) and not splitter["add_prefix_space"]
    return bool(plain and form["normalizer"] is None and all(token["special"] for token in form["added_tokens"]))


def _is_lossless(form: Mapping[str, Any]) -> bool:
    from tokenizers import pre_tokenizers

    model, decoder, splitter = form["model"], form["decoder"] or {}, form["pre_tokenizer"] or {}
    *cuts, last = splitter.get("pretokenizers") or [splitter]
    if form["normalizer"] or model["type"] != "BPE" or {last.get("type"), decoder.get("type")} != {"ByteLevel"}:
        return False
    keeps = all(one["type"] == "Digits" or (one["type"] == "Split" and one["behavior"] != "Removed") for one in cuts)
    plain = not (last["add_prefix_space"] or model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"))
    # Added tokens are decoded as if their characters were bytes, which holds for ASCII.
    added = [one for one in form["added_tokens"] if not one["special"]]
    exact = all(one["content"].isascii() and not (one["lstrip"] or one["rstrip"]) for one in added)
    return keeps and plain and exact and model["vocab"].keys() >= set(pre_tokenizers.ByteLevel.alphabet())


END_OF_DOCUMENT = "<|endofdocument|>"
"""The special token that ends every document; it is one of the `vocab_size` tokens."""


class BpeConfig(TokenizerConfig):
    """Byte-pair encoding of UTF-8, so that decoding restores any text exactly.

    It is trained on the training side of the corpus only. A small corpus may have too few different pairs; the tokenizer is
    then smaller.

    Attributes:
        vocab_size: the most tokens, including the 256 bytes and the end marker.

    Source: Neural Machine Translation of Rare Words with Subword Units, arXiv:1508.07909, section 3.2.
    """

    kind: Literal["bpe"] = "bpe"
    vocab_size: int = Field(default=4096, ge=257)

    def remark(self, built: Tokenizer) -> str:
        """A note if the corpus gives fewer tokens than `vocab_size`."""
        if built.vocab_size >= self.vocab_size:
            return ""
        return f"the tokenizer has {built.vocab_size:,} tokens, all that the text gives, where vocab_size={self.vocab_size:,}"

    def build(self, corpus: Corpus, cache: CachePath = None, progress: Progress | None = None) -> SubwordTokenizer:
        """Reads the tokenizer from the cache, or trains and caches it."""
        import tokenizers

        key = f"{corpus.fingerprint} {self.vocab_size} {END_OF_DOCUMENT} {tokenizers.__version__}"
        name = f"bpe-{self.vocab_size}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
        path = cache_folder(cache) / "tokenizers" / name
        if not path.exists():
            write_once(path, train_bpe(corpus, self.vocab_size, progress).encode(), CACHE_REMEDY)
        # Read back even after training: two processes that train at once use the same file.
        where = f"cached tokenizer {path}"
        return SubwordTokenizer(read_text(path, where, "delete the file and run again"), END_OF_DOCUMENT, where)


def train_bpe(corpus: Corpus, vocab_size: int, progress: Progress | None = None) -> str:
    """Trains on the training side of the corpus and returns the text of a `tokenizer.json`."""
    from tokenizers import Tokenizer as Engine
    from tokenizers import decoders, models, pre_tokenizers, trainers

    engine = Engine(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )

    def texts() -> Iterator[str]:
        done = 0
        for document in corpus.documents("train"):
            yield from pieces_of(document.text)
            done += len(document.text.encode())
            if progress:
                progress("training the tokenizer", done, corpus.scan.text_bytes)

    engine.train_from_iterator(texts(), trainer)
    return engine.to_str()
