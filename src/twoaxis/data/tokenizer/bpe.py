"""A byte-level BPE tokenizer, trained on first use and kept in the cache."""

import hashlib
from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from twoaxis.core.atomic import write_once
from twoaxis.core.folders import CACHE_REMEDY, CachePath, cache_folder
from twoaxis.core.text import read_text
from twoaxis.data.corpus import Corpus
from twoaxis.data.tokenizer.base import Progress, Tokenizer, TokenizerConfig
from twoaxis.data.tokenizer.subword import SubwordTokenizer, pieces_of

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
