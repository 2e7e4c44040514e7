"""A tokenizer of 280 tokens with an end marker."""

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from twoaxis.data.tokenizer import SubwordTokenizer


def subword() -> SubwordTokenizer:
    engine = tokenizers.Tokenizer(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=280, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False)
    engine.train_from_iterator(["Fellow citizens of the Senate and of the House"] * 3, trainer)
    return SubwordTokenizer(engine.to_str(), "<|end|>")
