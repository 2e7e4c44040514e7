"""The lm-eval interface to a model of this library: log-likelihoods and generated text, in batches.

Importing it needs the extra `twoaxis[evaluate]`.
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

import torch
from lm_eval.api.model import TemplateLM

from twoaxis.core.errors import DataError
from twoaxis.data import Tokenizer
from twoaxis.data.restoration import Restoration
from twoaxis.data.text_stream import StoppingText, stop_tokens
from twoaxis.data.tokenizer import Progress
from twoaxis.interop.evaluate.perplexity import check_finite, text_passage
from twoaxis.interop.evaluate.tasks import Continuation
from twoaxis.model import Decoder
from twoaxis.model.generate import stream
from twoaxis.model.likelihood import BATCH_SIZE, Passage, loglikelihoods, windows


class DecoderLM(TemplateLM):
    """Implements the three requests of lm-eval for a decoder and its tokenizer.

    A context that is too long with its continuation loses its first tokens, with a warning to `note`. A context begins as
    documents do; an empty one without a begin marker is the end-of-document token, and if the tokenizer has none, the first
    token costs log V nats for a vocabulary of V. Rolling windows share one token, as in lm-eval.

    Args:
        model: the decoder, in evaluation mode.
        tokenizer: of the model.
        batch_size: sequences at once.
        note: receives warnings, one line each.
        progress: progress callback, optional.
        ends: tokens that end generated text, in addition to the end of a document.
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: Tokenizer,
        batch_size: int = BATCH_SIZE,
        note: Callable[[str], None] | None = None,
        progress: Progress | None = None,
        ends: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__()
        self._ends = ends
        self._model, self._text, self._batch_size = model, tokenizer, batch_size
        self._note = note or (lambda text: None)
        self._progress = progress or (lambda stage, done, total: None)

    @property
    def eot_token_id(self) -> int:
        """The end-of-document token.

        Raises:
            DataError: the tokenizer has none.
        """
        if self._text.end_of_document is None:
            raise DataError("the tokenizer has no end-of-document token: must have one here; use a task that needs none")
        return self._text.end_of_document

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Encodes a text without special tokens."""
        del add_special_tokens, kwargs
        return self._text.encode(string)

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Divides the tokens of both texts as lm-eval does; of a continuation that adds no token, the last ones are scored."""
        before, scored = super()._encode_pair(context, continuation)
        if scored or not continuation:
            return before, scored
        # A continuation that merges with the end of the context would have probability 1.
        whole = self.tok_encode(context + continuation)
        shared = max((n for n in range(len(whole)) if before[:n] == whole[:n]), default=0)
        return whole[:shared], whole[shared:]

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Scores continuations: the log-likelihood in nats, and whether greedy decoding generates it."""
        del disable_tqdm
        pairs = []
        for context, continuation in (request.args for request in requests):
            before, scored = self._encode_pair(context, continuation) if context else ([], self.tok_encode(continuation))
            pairs.append(([*self._text.begin_of_document, *before], scored))
        return self._score(pairs)

    def _loglikelihood_tokens(self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any) -> Any:
        del kwargs
        return self._score([(context, continuation) for _, context, continuation in requests])

    def _score(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        longest, passages = self._model.config.max_seq_len, []
        for context, continuation in pairs:
            prefix = context or self._text.before_text
            passages.append(Passage([*prefix, *continuation], len(prefix)))
        # The first window has all of the context that is read; a long continuation has more windows.
        read = (windows(max(1, first), len(tokens), longest, max(1, longest // 2)) for tokens, first in passages)
        self._warn(window.begin for one in read for window in islice(one, 1))
        found = loglikelihoods(self._model, passages, self._batch_size, progress=self._stage("scoring continuations"))
        for number, one in enumerate(found, start=1):
            check_finite(f"continuation {number}", one.nats)
        return [(one.nats, one.greedy) for one in found]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Scores whole texts, each token once, including the bits that restore text lost by the tokenizer."""
        del disable_tqdm
        texts = [request.args[0] for request in requests]
        passages = [text_passage(self._text, text) for text in texts]
        restored = [Restoration.by(self._text, text) for text in texts]
        if loss := sum(restored, Restoration()).words("the texts"):
            self._note(f"warning: {loss}")
        stride = self._model.config.max_seq_len
        found = loglikelihoods(self._model, passages, self._batch_size, stride, self._stage("scoring texts"))
        for number, one in enumerate(found, start=1):
            check_finite(f"text {number}", one.nats)
        return [one.nats - math.log(2) * lost.repair_bits for one, lost in zip(found, restored, strict=True)]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Continues contexts until a stop string, the end of the document, or the largest number of tokens.

        The seed of a sampled request depends on its context and its number among equal requests, not on its batch.
        """
        del disable_tqdm
        groups: dict[str, list[int]] = {}
        repeats, seen = [], Counter[tuple[str, str]]()
        for index, request in enumerate(requests):
            kind = json.dumps(request.args[1], sort_keys=True, default=str)
            groups.setdefault(kind, []).append(index)
            repeats.append(seen[request.args[0], kind])
            seen[request.args[0], kind] += 1
        texts, done, excess = [""] * len(requests), 0, []
        for indices in groups.values():
            options = Continuation.read(requests[indices[0]].args[1], self._model.config.max_seq_len)
            room = self._model.config.max_seq_len - options.max_new_tokens
            prompts = {index: self._text.prompt(requests[index].args[0]) for index in indices}
            excess += [len(prompt) - room for prompt in prompts.values()]
            # Prompts of similar length share a batch; the longest come first.
            order = sorted(indices, key=lambda index, prompts=prompts: -len(prompts[index]))
            for start in range(0, len(order), self._batch_size):
                batch = order[start : start + self._batch_size]
                seeds = (_seed_offset(requests[index].args[0], repeats[index]) for index in batch)
                generators = [options.sampling.generator(seed) for seed in seeds]
                generated = self._continue([prompts[index][-room:] for index in batch], options, generators)
                for index, text in zip(batch, generated, strict=True):
                    texts[index] = text
                done += len(batch)
                self._progress("generating", done, len(requests))
        self._warn(excess)
        return texts

    def _continue(self, prompts: list[list[int]], options: Continuation, generators: Sequence[torch.Generator]) -> list[str]:
        decoded = [StoppingText(self._text, options.until) for _ in prompts]
        ends = stop_tokens(self._text, options.until) | self._ends
        texts, finished = [""] * len(prompts), [False] * len(prompts)
        most, sampling, vocab_size = options.max_new_tokens, options.sampling, self._text.vocab_size
        for tokens in stream(self._model, prompts, most, sampling, vocab_size=vocab_size, generators=generators):
            for row, token in enumerate(tokens):
                finished[row] = finished[row] or token in ends
                if not finished[row]:
                    texts[row] += decoded[row].push(token)
                    finished[row] = decoded[row].stopped
            if all(finished):
                break
        return [text + one.rest() for text, one in zip(texts, decoded, strict=True)]

    def _warn(self, excess: Iterable[int]) -> None:
        cut = [tokens for tokens in excess if tokens > 0]
        if cut:
            longest = self._model.config.max_seq_len
            self._note(
                f"warning: {len(cut)} contexts do not fit in max_seq_len={longest} with what follows them: "
                f"up to {max(cut)} of their first tokens were left out"
            )

    def _stage(self, stage: str) -> Callable[[int, int], None]:
        return lambda done, total: self._progress(stage, done, total)


def _seed_offset(context: str, repeat: int) -> int:
    """The number added to the seed, different for each context and repeat."""
    return int.from_bytes(hashlib.sha256(f"{repeat} {context}".encode()).digest()[:4])
