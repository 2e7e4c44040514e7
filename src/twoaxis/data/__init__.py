"""Floor 4: text, tokens, and the order in which training sees them.

Corpora and tokenizers are tables of kinds; `prepare` turns one of each into shards, and `PackedSampler` and
`validation_batches` read batches from them. Nothing here imports `tokenizers` or `pyarrow` before it is needed.
"""

from twoaxis.data.batch import Batch, PackedSampler, Packing, validation_batches
from twoaxis.data.corpus import CORPORA, Corpus, CorpusConfig, CorpusField, Document, parse_corpus
from twoaxis.data.prepare import PreparedData, prepare
from twoaxis.data.shards import TokenShard, shard_writer, write_shard
from twoaxis.data.tokenizer import (
    TOKENIZERS,
    Tokenizer,
    TokenizerConfig,
    TokenizerField,
    compressed_ids,
    load_tokenizer,
    parse_tokenizer,
)

__all__ = [
    "CORPORA",
    "TOKENIZERS",
    "Batch",
    "Corpus",
    "CorpusConfig",
    "CorpusField",
    "Document",
    "PackedSampler",
    "Packing",
    "PreparedData",
    "TokenShard",
    "Tokenizer",
    "TokenizerConfig",
    "TokenizerField",
    "compressed_ids",
    "load_tokenizer",
    "parse_corpus",
    "parse_tokenizer",
    "prepare",
    "shard_writer",
    "validation_batches",
    "write_shard",
]
