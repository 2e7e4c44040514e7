"""How far back attention looks: its mass by distance, computed a few queries at a time.

Letters: B batch, H heads, G kv-heads, T queries and keys, K key width, C queries at once.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from twoaxis.core.layout import TokenLayout
from twoaxis.ops.precision import statistics_dtype

QUERIES_AT_ONCE = 64
"""So that scores take B*H*64*window numbers, whatever the length of the text."""


class Distances:
    """The attention of one place, added up by distance over batches.

    Args:
        window: keys that a query sees, its own included; None is all of them.
    """

    def __init__(self, window: int | None) -> None:
        self.window = window
        self.mass = torch.zeros(1, dtype=torch.float64)
        self.sink = 0.0
        self.queries = 0

    def add(
        self,
        q: Float[Tensor, "B H T K"],
        k: Float[Tensor, "B G T K"],
        layout: TokenLayout,
        sink: Float[Tensor, " H"] | None = None,
    ) -> None:
        """Counts the attention of one batch."""
        T, dtype = q.shape[2], statistics_dtype(q)
        if len(self.mass) < T:
            self.mass = torch.nn.functional.pad(self.mass, (0, T - len(self.mass)))
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        for start in range(0, T, QUERIES_AT_ONCE):
            stop = min(start + QUERIES_AT_ONCE, T)
            first = 0 if self.window is None else max(0, start - self.window + 1)
            keys = k[:, :, first:stop].to(dtype)
            scores = q[:, :, start:stop].to(dtype) @ keys.transpose(-1, -2) / math.sqrt(q.shape[-1])
            age = torch.arange(start, stop)[:, None] - torch.arange(first, stop)
            seen = (age >= 0) & (age < (self.window or T))
            if layout.documents is not None:
                own, other = layout.documents[:, start:stop], layout.documents[:, first:stop]
                seen = (seen & (own[:, :, None] == other[:, None, :])).unsqueeze(1)
            scores = scores.masked_fill(~seen, -torch.inf)
            if sink is not None:
                score = sink.to(dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
                scores = torch.cat((scores, score), dim=-1)
            weights = torch.softmax(scores, dim=-1).double()
            if sink is not None:
                self.sink += float(weights[..., -1].sum())
                weights = weights[..., :-1]
            self.mass.index_add_(0, age.clamp(min=0).flatten(), weights.sum((0, 1)).flatten())
        self.queries += q.shape[0] * q.shape[1] * T

    @property
    def mean(self) -> float:
        """The mean distance of the attended token, without the sink."""
        distance = torch.arange(len(self.mass), dtype=torch.float64)
        return float((self.mass * distance).sum() / self.mass.sum().clamp(min=torch.finfo(torch.float64).tiny))

    def bins(self) -> tuple[tuple[int, ...], Tensor]:
        """Where bins of doubling width begin, as far as anything was attended to, and the part of the mass in each."""
        reach = int(torch.nonzero(self.mass).max()) + 1 if bool(self.mass.any()) else 1
        begins = (0, *(2**power for power in range((reach - 1).bit_length())))
        ends = (*begins[1:], len(self.mass))
        shares = [self.mass[begin:end].sum() / max(self.queries, 1) for begin, end in zip(begins, ends, strict=True)]
        return begins, torch.stack(shares)
