"""The cache that transformers passes around in generation: the cache of a decoder, from which tokens can be removed.

Letters: B batch, N rows of it, T tokens, D width.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import Cache

from twoaxis.core.errors import ConfigError, problem
from twoaxis.core.layout import TokenLayout
from twoaxis.model import Decoder, DecoderCache
from twoaxis.model.cache import select_rows

REPLAY_TOKENS = 32
"""From this many kept tokens on, one separate call that settles them costs less than running them again each time."""


class _Tokens(NamedTuple):
    """Tokens of a call, and the cache before them."""

    before: DecoderCache
    embeddings: Float[Tensor, "B T D"]
    layout: TokenLayout

    @property
    def end(self) -> DecoderCache:
        """The cache after these tokens, without the states of the sublayers, which are not known yet."""
        return self.before.next_cache(self.before.sublayers, self.before.ends, self.layout)

    def first(self, tokens: int) -> "_Tokens":
        """The first of these tokens."""
        return _Tokens(self.before, self.embeddings[:, :tokens], self.layout.part(0, tokens))


class TwoAxisCache(Cache):
    """Holds a `DecoderCache` for the generation loops of transformers.

    A model of this library carries more than keys and values: recurrent states, last tokens of convolutions, states of depth
    mixers along positions. It therefore takes this cache alone, for dynamic and static caches alike; it grows as needed and
    has no fixed shape.

    Beam search selects rows. Assisted and prompt-lookup decoding remove tokens, which no recurrent state can undo: after
    `activate_past_recording` the cache keeps its earlier values, `crop` returns to one of them, and the next call runs the
    tokens since then again, without the removed ones. Every mixer then has the same state as if they had never been there.
    The next `crop` discards the recorded values.

    Attributes:
        value: what the decoder returned last, or None before the first token.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.value: DecoderCache | None = None
        self._batch = -1
        self._recording = False
        self._recorded: list[_Tokens] = []
        self._again: _Tokens | None = None

    @property
    def end(self) -> DecoderCache | None:
        """The end of the cached tokens, including those that will run again."""
        return self.value if self._again is None else self._again.end

    def run(
        self,
        decoder: Decoder,
        embeddings: Float[Tensor, "B T D"],
        layout: TokenLayout | None,
        revocable_tokens: int,
        ids: Int[Tensor, "B T"] | None = None,
    ) -> Float[Tensor, "B _ D"]:
        """Runs the next tokens through the decoder; the result begins with the tokens that run again.

        Args:
            decoder: the model.
            embeddings: of the new tokens.
            layout: of the new tokens, or None when rows go on.
            revocable_tokens: how many of them, counted from the last, `crop` may remove.
            ids: of the new tokens, where they are known.
        """
        value, self._batch = self.value or decoder.new_cache(), embeddings.shape[0]
        if not self._recording and self._again is None:
            hidden, self.value = decoder.hidden(embeddings, layout, value, tokens=ids)
            return hidden
        tokens = self._all_tokens(value, embeddings, layout, ids)
        settled = tokens.embeddings.shape[1] - revocable_tokens
        cuts = [0, settled] if self._recording and settled >= REPLAY_TOKENS and revocable_tokens else [0]
        hiddens = []
        for start, stop in zip(cuts, [*cuts[1:], tokens.embeddings.shape[1]], strict=True):
            part = _Tokens(value, tokens.embeddings[:, start:stop], tokens.layout.part(start, stop))
            if self._recording:
                self._recorded.append(part)
            hidden, next_value = decoder.hidden(part.embeddings, part.layout, value)
            assert next_value is not None
            value = next_value
            hiddens.append(hidden)
        self.value, self._again = value, None
        return torch.cat(hiddens, dim=1)

    def _all_tokens(self, value: DecoderCache, embeddings: Tensor, layout: TokenLayout | None, ids: Tensor | None) -> _Tokens:
        again = self._again
        end = self.end or value
        layout = end.layout(embeddings.shape[1], embeddings.device) if layout is None else end.place(layout)
        layout = layout.of(ids)
        if again is None:
            return _Tokens(value, embeddings, layout)
        return _Tokens(value, torch.cat((again.embeddings, embeddings), dim=1), _joined(again.layout, layout))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens in the cache, padding included."""
        return 0 if self.end is None else self.end.length

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: there is no largest length."""
        return -1

    def activate_past_recording(self) -> None:
        """Keeps earlier values from now on, so that `crop` can return to them."""
        self._recording = True

    @property
    def is_croppable(self) -> bool:
        """Whether `crop` can put everything back as it was."""
        return self._recording

    @property
    def is_compileable(self) -> bool:
        """Never: shapes grow with the text."""
        return False

    @property
    def is_linear(self) -> list[bool]:
        """One layer that counts tokens, which `generate` reads to find what part of its input is in the cache already."""
        return [False]

    @property
    def batch_size(self) -> int:
        """Rows, or -1 before the first token."""
        return self._batch

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last tokens, given as 0 or a negative number.

        Raises:
            ConfigError: a positive number, or tokens that were not recorded.
        """
        # A tensor in some versions.
        tokens_to_remove = int(tokens_to_remove)
        if tokens_to_remove > 0:
            raise ConfigError(problem("tokens_to_remove", tokens_to_remove, "<= 0", "pass the number to remove, negated"))
        length = self.get_seq_length() + tokens_to_remove
        recorded = [*self._recorded, *([self._again] if self._again else [])]
        self._recorded = []
        if not tokens_to_remove:
            return
        starts = [tokens for tokens in recorded if tokens.before.length <= length]
        if not starts:
            raise ConfigError(
                problem("tokens_to_remove", tokens_to_remove, "within what was recorded", "call activate_past_recording before")
            )
        self.value, kept = starts[-1].before, length - starts[-1].before.length
        self._again = starts[-1].first(kept) if kept else None

    def reorder_cache(self, beam_idx: Int[Tensor, " N"]) -> None:
        """Selects rows, for beam search."""
        if self.value is None:
            return
        if self._again is not None:
            before, embeddings, layout = self._again
            documents = None if layout.documents is None else layout.documents[beam_idx]
            positions = layout.positions if layout.positions.shape[0] == 1 else layout.positions[beam_idx]
            before = select_rows(before, beam_idx, self._batch)
            ids = None if layout.tokens is None else layout.tokens[beam_idx]
            self._again = _Tokens(before, embeddings[beam_idx], TokenLayout(positions, documents).of(ids))
        self.value = select_rows(self.value, beam_idx, self._batch)
        self._batch, self._recorded = beam_idx.shape[0], []

    def batch_select_indices(self, indices: Int[Tensor, " N"]) -> None:
        """Selects rows."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every row."""
        if self._batch > 0:
            self.reorder_cache(torch.arange(self._batch).repeat_interleave(repeats))

    def reset(self) -> None:
        """Returns to before the first token."""
        self.value, self._again, self._recorded, self._batch = None, None, [], -1


def _joined(first: TokenLayout, second: TokenLayout) -> TokenLayout:
    rows = max(first.positions.shape[0], second.positions.shape[0])
    positions = torch.cat([layout.positions.expand(rows, -1) for layout in (first, second)], dim=1)

    def both(name: str) -> Tensor | None:
        parts = [getattr(layout, name) for layout in (first, second)]
        return None if any(part is None for part in parts) else torch.cat(parts, dim=1)

    return TokenLayout(positions, both("documents"), tokens=both("tokens"))
