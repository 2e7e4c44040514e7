"""Measurements during an unchanged pass, as running sums.

Letters: B batch, H heads, G kv-heads, T queries and keys, K key width, C queries at once.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from twoaxis.audit.open_loop import Probe, Sample, Written, run_pass, sequence_losses
from twoaxis.audit.routing import RoutingTable, rounded
from twoaxis.audit.token_classes import TokenClasses
from twoaxis.core.layout import TokenLayout
from twoaxis.core.measure import tensors
from twoaxis.core.views import Views
from twoaxis.depth.base import Mix, Read, Write
from twoaxis.depth.streams import ParallelEnds
from twoaxis.local.base import LocalMixer, window_documents
from twoaxis.local.local_swa import LocalSWA
from twoaxis.local.places import LocalPlaces
from twoaxis.model import Decoder
from twoaxis.model.trace import sublayer_list
from twoaxis.ops.precision import statistics_dtype
from twoaxis.ops.streams import pieces_of
from twoaxis.sequence.heads import SoftmaxAttention

QUERIES_AT_ONCE = 64
"""Bounds scores to B*H*64*window numbers for any length of text."""


class Distances:
    """The attention of one mixer by distance, summed over batches.

    Args:
        window: keys visible to a query, including its own; None is all.
    """

    def __init__(self, window: int | None) -> None:
        self.window = window
        self.mass = torch.zeros(1, dtype=torch.float64)
        self.sink = self.slots = 0.0
        self.queries = 0

    def add(
        self,
        q: Float[Tensor, "B H T K"],
        k: Float[Tensor, "B G T K"],
        layout: TokenLayout,
        sink: Float[Tensor, " H"] | Float[Tensor, "B H T"] | None = None,
        slots: tuple[Tensor, ...] = (),
    ) -> None:
        """Adds one batch; `slots` of the token's own are one more key for each query, as in `Heads.beside`."""
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
                score = sink.to(dtype)
                score = score.view(1, -1, 1) if score.ndim == 1 else score[..., start:stop]
                score = score.unsqueeze(-1).expand(*scores.shape[:3], 1)
                scores = torch.cat((scores, score), dim=-1)
            weights = torch.softmax(scores, dim=-1).double()
            if slots:
                score, _, *weight = (x.double() for x in slots)
                share = torch.sigmoid(score[:, start:stop].transpose(1, 2) - torch.logsumexp(scores, dim=-1).double())
                share = share * weight[0] if weight else share
                weights = weights * (1 - share.unsqueeze(-1))
                self.slots += float(share.sum())
            if sink is not None:
                self.sink += float(weights[..., -1].sum())
                weights = weights[..., :-1]
            self.mass.index_add_(0, age.clamp(min=0).flatten(), weights.sum((0, 1)).flatten())
        self.queries += q.shape[0] * q.shape[1] * T

    @property
    def mean(self) -> float:
        """The mean distance of attended tokens, without the sink and slots."""
        distance = torch.arange(len(self.mass), dtype=torch.float64)
        return float((self.mass * distance).sum() / self.mass.sum().clamp(min=torch.finfo(torch.float64).tiny))

    def bins(self) -> tuple[tuple[int, ...], Tensor]:
        """The starts of bins of doubling width up to the largest attended distance, and the share of the mass in each."""
        reach = int(torch.nonzero(self.mass).max()) + 1 if bool(self.mass.any()) else 1
        begins = (0, *(2**power for power in range((reach - 1).bit_length())))
        ends = (*begins[1:], len(self.mass))
        shares = [self.mass[begin:end].sum() / max(self.queries, 1) for begin, end in zip(begins, ends, strict=True)]
        return begins, torch.stack(shares)


PLACES = ("input_local", "projected_local", "update_local")
"""Attributes of a sublayer that may hold a local mixer."""

NEAR = 0.1
"""Tolerance for a gate to count as 0 or 1."""


class Mean:
    """A mean over tokens, of one or several numbers each."""

    def __init__(self) -> None:
        self.total: Tensor | float = 0.0
        self.tokens = 0

    def add(self, values: Float[Tensor, "B T *each"]) -> None:
        """Adds one batch."""
        self.total = self.total + values.flatten(0, 1).double().sum(0)
        self.tokens += values.shape[0] * values.shape[1]

    @property
    def value(self) -> Tensor:
        """The mean, in float64."""
        return torch.as_tensor(self.total, dtype=torch.float64) / max(self.tokens, 1)


class Means(dict[Any, Mean]):
    """Means by key, created on first access."""

    def __missing__(self, key: Any) -> Mean:
        self[key] = Mean()
        return self[key]

    def number(self, key: Any) -> float:
        """A scalar mean, rounded for a report."""
        return rounded(self[key].value.reshape(1))[0]


def _rms(x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T"]:
    return x.square().mean(-1).sqrt()


def n_pieces(model: Decoder) -> tuple[int, int]:
    """Numbers of streams and of fractions of each; (1, 1) without parallel streams."""
    ends = model.ends
    return (ends.n_streams, ends.n_fractions) if isinstance(ends, ParallelEnds) else (1, 1)


def local_mixers(model: Decoder) -> Iterator[tuple[int, str, str, LocalMixer]]:
    """Every local mixer inside a sublayer: index of the sublayer, attribute name, kind, and module."""
    configs = [config for block in model.config.layers for config in block]
    for index, (sublayer, config) in enumerate(zip(sublayer_list(model), configs, strict=True)):
        if isinstance(sublayer.mixer, LocalPlaces):
            for place in PLACES:
                mixer = getattr(sublayer.mixer, place)
                if mixer is not None:
                    yield index, place, getattr(config, place).kind, mixer


class Observer(Probe):
    """Measures passes of a model.

    Args:
        model: to run.
        classes: of tokens, by which routing is reported.
    """

    def __init__(self, model: Decoder, classes: TokenClasses) -> None:
        self.model, self.classes = model, classes
        self.sublayers = sublayer_list(model)
        self.routing = RoutingTable(classes.names)
        self.means = Means()
        self.distances: dict[tuple[int, str], Distances] = {}
        self.locals = list(local_mixers(model))
        self._masks = torch.empty(0, 0, 0, dtype=torch.bool)
        self._composite: Tensor | None = None
        self._sample: Sample | None = None

    @torch.no_grad()
    def observe(self, sample: Sample) -> Float[Tensor, " B"]:
        """Runs one batch and returns the loss of each sequence."""
        self._sample, self._composite = sample, None
        self._masks = self.classes.masks(sample.batch.tokens, sample.layout)
        for name, mask in zip(self.classes.names, self._masks, strict=True):
            self.means["class", name].add(mask)
        with self._local_inputs() as seen:
            hidden = run_pass(self.model, sample, self)
        for index, place, _, mixer in self.locals:
            if isinstance(mixer, LocalSWA):
                window = mixer.config.window
                q, k = mixer.queries_and_keys(seen[mixer], sample.layout)
                documents, _ = window_documents(sample.layout, window, mixer.config.window_kind, k.shape[2])
                self._distance(index, place, window).add(q, k, replace(sample.layout, documents=documents))
        return sequence_losses(self.model, hidden, sample.batch)

    def state(self, index: int, state: Any) -> Any:
        """Measures the state and its streams."""
        if index < len(self.sublayers):
            width = self.model.config.d_model
            sizes = [_rms(t) for t in tensors(state) if t.ndim == 3 and t.shape[-1] == width]
            self.means["state", index].add(torch.stack(sizes).mean(0))
        n, m = n_pieces(self.model)
        if n * m > 1:
            # A state may carry more behind its streams.
            pieces = torch.stack(pieces_of(state[:n], m))
            self.means["piece", index].add(pieces.movedim(0, 2))
            compared = pieces if n == 1 else torch.stack(state[:n])
            apart = (compared - compared.mean(0)).square().mean((0, -1))
            size = compared.square().mean((0, -1)).clamp(min=torch.finfo(apart.dtype).tiny)
            self.means["spread", index].add((apart / size).sqrt())
        return state

    def read(self, index: int, state: Any, views: Views, carry: Any) -> tuple[Views, Any]:
        """Measures the read and its weights."""
        self.means["read", index].add(torch.stack([_rms(view) for view in tensors(views)]).mean(0))
        self.routing.add(index, self.sublayers[index].depth.explain(Read(state, views, carry)).sums, self._masks)
        return views, carry

    def mixed(self, index: int, mix: Mix) -> Mix:
        """Measures the weights of a mixing of heads."""
        self.routing.add(index, self.sublayers[index].depth.explain(mix).sums, self._masks)
        return mix

    def update(self, index: int, update: Tensor) -> Tensor:
        """Measures the update and adds it to its mean."""
        own = update[..., : self.model.config.d_model]
        self.means["update", index].add(_rms(own))
        self.means["mean update", index].add(own)
        return update

    def written(self, index: int, written: Written) -> Any:
        """Measures the write, and the distances of attention."""
        sublayer = self.sublayers[index]
        before, state, update, context, carry, next_state = written
        sums, gauges = sublayer.depth.explain(Write(state, update, context, carry, next_state))
        self.routing.add(index, sums, self._masks)
        n, m = n_pieces(self.model)
        if n * m > 1 and any(one.role == "mix" for one in sums):
            rows = torch.stack([one.weights[: n * m].movedim(0, -1) for one in sums], dim=2)
            matrix = rows.flatten(2, 3).double()
            self._composite = matrix if self._composite is None else matrix @ self._composite
            size = self._composite.abs()
            self.means["row", index].add(size.sum(-1).amax(-1))
            self.means["column", index].add(size.sum(-2).amax(-1))
            self.means["spectral", index].add(torch.linalg.matrix_norm(self._composite, 2))
        for name, values in gauges.items():
            self.means[name, index].add(values)
            if name == "beta":
                regimes = (values < NEAR, (values - 1).abs() <= NEAR, values > 1 + NEAR)
                for regime, members in zip(("near 0", "near 1", "above 1"), regimes, strict=True):
                    self.means[regime, index].add(members)
        if isinstance(sublayer.mixer, SoftmaxAttention) and self._sample is not None:
            self._look_back(index, before, context, self._sample)
        return next_state

    def left(self, state: Any, left: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        """Measures the weights of the final read."""
        self.routing.add(len(self.sublayers), self.model.ends.explain(Read(state, left)).sums, self._masks)
        return left

    def _look_back(self, index: int, state: Any, context: Views, sample: Sample) -> None:
        sublayer = self.sublayers[index]
        mixer = sublayer.mixer
        layout = sample.layout.of(sample.batch.tokens)
        heads, _ = mixer.project(context, layout)
        if sublayer.depth.mixes_heads:
            heads, _ = sublayer.depth.mix_heads(heads, context, state, layout)
        q, k = mixer.queries_and_keys(heads, layout, context)
        self._distance(index, "mixer", mixer.config.span).add(q, k, layout, mixer.sink_scores(context), heads.beside)

    def _distance(self, index: int, place: str, window: int | None) -> Distances:
        return self.distances.setdefault((index, place), Distances(window))

    @contextmanager
    def _local_inputs(self) -> Iterator[dict[nn.Module, Tensor]]:
        """Records the input of every local mixer during a pass, and adds its change to a mean."""
        seen: dict[nn.Module, Tensor] = {}

        def keep(module: nn.Module, given: tuple[Any, ...], result: Any) -> None:
            seen[module] = given[0]
            self.means["local", module].add(result[0] - given[0])

        handles = [mixer.register_forward_hook(keep) for _, _, _, mixer in self.locals]
        try:
            yield seen
        finally:
            for handle in handles:
                handle.remove()
