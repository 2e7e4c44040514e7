"""From text to batches: corpora, tokenizers, shards and samplers."""
