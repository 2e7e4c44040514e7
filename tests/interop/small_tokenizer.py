"""A tokenizer of 280 tokens with an end marker."""

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from twoaxis.data.tokenizer import SubwordTokenizer


def subword(begin: str | None = None) -> SubwordTokenizer:
    """With a token that begins every text, if asked for."""
    engine = tokenizers.Tokenizer(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|end|>"] if begin is None else ["<|end|>", begin]
    trainer = trainers.BpeTrainer(vocab_size=280, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    engine.train_from_iterator(["Fellow citizens of the Senate and of the House"] * 3, trainer)
    if begin is not None:
        engine.post_processor = processors.TemplateProcessing(single=f"{begin} $A", special_tokens=[(begin, 1)])
    return SubwordTokenizer(engine.to_str(), "<|end|>")
