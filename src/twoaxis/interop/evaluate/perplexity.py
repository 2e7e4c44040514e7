"""Perplexity and bits per byte of texts."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from twoaxis.core.errors import DataError, problem
from twoaxis.data import Tokenizer
from twoaxis.data.restoration import Restoration
from twoaxis.data.tokenizer import Progress
from twoaxis.model import Decoder
from twoaxis.model.likelihood import BATCH_SIZE, Passage, loglikelihoods


class TextScore(NamedTuple):
    """The likelihood of a text under a model.

    Attributes:
        name: of the text.
        tokens: of the text, each scored once.
        text_bytes: of the text in UTF-8.
        nats: -sum of log p over the tokens.
        restored: the text that decoding does not restore.

    Example:
        >>> score = TextScore("two bytes", tokens=1, text_bytes=2, nats=math.log(16))
        >>> round(score.perplexity), score.bpb
        (16, 2.0)
    """

    name: str
    tokens: int
    text_bytes: int
    nats: float
    restored: Restoration = Restoration()

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """Per token: comparable only between models with the same tokenizer."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bpb(self) -> float:
        """Bits per byte: comparable between tokenizers, since lost text is charged."""
        return (self.nats / math.log(2) + self.restored.repair_bits) / self.text_bytes

    def to_data(self) -> dict[str, Any]:
        """The score as JSON-ready data."""
        return {
            "name": self.name,
            "tokens": self.tokens,
            "text_bytes": self.text_bytes,
            "loss": self.loss,
            # JSON has no infinity.
            "perplexity": self.perplexity if math.isfinite(self.perplexity) else None,
            "bpb": self.bpb,
            "lost_bytes": self.restored.lost_bytes,
            "repair_bits": self.restored.repair_bits,
        }


def score_texts(
    model: Decoder,
    tokenizer: Tokenizer,
    texts: Mapping[str, str],
    batch_size: int = BATCH_SIZE,
    stride: int | None = None,
    progress: Progress | None = None,
) -> list[TextScore]:
    """Scores every token of every text once, each text as a separate document.

    The first token follows the begin marker of documents. Without one it follows the end-of-document token, as in training with
    joined packing (with isolated packing no model learns that prediction). If the tokenizer has neither, the first token costs
    log V nats for a vocabulary of V. The end of the text is not scored. Texts longer than max_seq_len are read in overlapping
    windows, as in `loglikelihoods`.

    Args:
        model: the decoder.
        tokenizer: of the model.
        texts: by name.
        batch_size: windows at once.
        stride: tokens that each later window scores; None is half of max_seq_len.
        progress: progress callback, optional: the name of a stage, the tokens scored so far, and all tokens.

    Raises:
        ConfigError: a batch size or a stride out of range.
        DataError: an empty text, a tokenizer of another model, or a loss that is no number.

    Example:
        >>> from twoaxis import DecoderConfig
        >>> from twoaxis.data.tokenizer import ByteTokenizer
        >>> model = Decoder.build(DecoderConfig(vocab_size=256, d_model=8, n_layers=1))
        >>> [score] = score_texts(model, ByteTokenizer(), {"a name": "Zoë"})
        >>> score.tokens, score.text_bytes, round(score.bpb)
        (4, 4, 8)
    """
    passages = []
    for name, text in texts.items():
        passages.append(text_passage(tokenizer, text))
        if len(passages[-1].tokens) == passages[-1].first:
            raise DataError(problem("text", name, "at least one token", "name a longer text"))
    found = loglikelihoods(
        model, passages, batch_size, stride, progress and (lambda done, total: progress("scoring", done, total))
    )
    scores = []
    for (name, text), one in zip(texts.items(), found, strict=True):
        check_finite(f"text {name}", one.nats)
        scores.append(TextScore(name, one.tokens, len(text.encode()), -one.nats, Restoration.by(tokenizer, text)))
    return scores


def check_finite(what: str, nats: float) -> None:
    """Checks a log-likelihood.

    Raises:
        DataError: it is no number, or infinite.
    """
    if not math.isfinite(nats):
        raise DataError(f"{what}: its loss is {-nats}: must be a number; evaluate a model that has not diverged")


def text_passage(tokenizer: Tokenizer, text: str) -> Passage:
    """The tokens of a text, all scored, after the tokens before the text of a document.

    Raises:
        DataError: half of a surrogate pair, which is not Unicode text.
    """
    before = tokenizer.before_text
    tokens = torch.from_numpy(tokenizer.encode_array(text).astype(np.int64))
    return Passage(torch.cat((torch.tensor(before, dtype=torch.int64), tokens)), len(before))


def total_score(scores: Sequence[TextScore]) -> TextScore:
    """The score of all texts together; all tokens weigh the same."""
    tokens, text_bytes = sum(one.tokens for one in scores), sum(one.text_bytes for one in scores)
    restored = sum((one.restored for one in scores), Restoration())
    return TextScore("all", tokens, text_bytes, sum(one.nats for one in scores), restored)
