"""One rank of tensor parallelism: a decoder with its part of every sublayer, on local tensors.

Letters: n tensor ranks, B batch, T tokens of a row, t = T / n, D width, E numbers that a sublayer emits.

Source: Megatron-LM, arXiv:1909.08053, section 3; sharded streams: Reducing Activation Recomputation in Large Transformer
        Models, arXiv:2205.05198, section 4.2.2
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, fields
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor

from twoaxis.core.errors import ConfigError
from twoaxis.core.layout import TokenLayout
from twoaxis.core.measure import tensors
from twoaxis.core.parameters import initial_values
from twoaxis.core.views import QKV, Views
from twoaxis.depth.base import State
from twoaxis.model import Decoder, DecoderConfig
from twoaxis.model.block import Block, Sublayer, SublayerCache, run_blocks
from twoaxis.model.cache import DecoderCache
from twoaxis.train.parallel.tensor_ranks import (
    TensorRanks,
    copied,
    from_previous,
    gathered,
    saving_parts,
    scattered_sum,
    summed,
)
from twoaxis.train.parallel.tensor_split import Chunk, Halo, Split, TensorSplit, begins_linear, halo_of


@dataclass(frozen=True, eq=False)
class ShardedLayout(TokenLayout):
    """The layout of whole rows, for a rank whose streams have some of the tokens only.

    Attributes:
        start: the first of these tokens.
        stop: the first one behind them.
        recomputes: whether the backward pass runs blocks again, and with them their communication.
    """

    start: int = 0
    stop: int = 0
    recomputes: bool = False

    def own(self, halo: int = 0) -> TokenLayout:
        """The layout of the tokens of this rank, after `halo` tokens of the rank before."""
        return self.shared(("own", halo), lambda: self._after(halo))

    def before(self, halo: int) -> TokenLayout:
        """The layout of the last tokens of the rank before."""
        return self.shared(("before", halo), lambda: self.part(self.start - halo, self.start))

    def _after(self, halo: int) -> TokenLayout:
        own = self.part(self.start, self.stop)
        if not halo or not self.start or self.documents is None:
            return own
        return TokenLayout(own.positions, own.documents, self.documents[:, self.start - halo : self.start])


class TensorSublayer(Sublayer):
    """A sublayer whose mixer has its part of the heads or of the hidden numbers.

    Attributes:
        ranks: the tensor ranks.
        halo: earlier tokens that the read looks at.
        begins_linear: whether only linear maps look at the context, so that under autocast it is sent as they take it.
    """

    ranks: TensorRanks
    halo: int = 0
    begins_linear: bool = False

    def forward(
        self, state: State, layout: TokenLayout, cache: SublayerCache | None = None
    ) -> tuple[State, SublayerCache | None]:
        """Returns the next depth state; there are no caches."""
        if not isinstance(layout, ShardedLayout):
            views, carry, _ = self.depth.read(state, layout)
            context = self.normalise(views)
            update, state, _ = self.mix(_each(self._sent(context), lambda x: copied(x, self.ranks)), state, layout)
            return self.depth.write(state, summed(update, self.ranks), context, carry), None
        state, cache_before = _before(self.depth.read, state, layout, self.halo, self.ranks)
        views, carry, _ = self.depth.read(state, layout.own(self.halo), cache_before)
        context = self.normalise(views)
        sent = self._sent(context)
        whole = _each(sent, lambda x: gathered(x, self.ranks))
        with nullcontext() if layout.recomputes else saving_parts(tensors(sent), tensors(whole), self.ranks):
            update, state, _ = self.mix(whole, state, layout)
        return self.depth.write(state, scattered_sum(update, self.ranks), context, carry), None

    def _sent(self, context: Views) -> Views:
        device = tensors(context)[0].device.type
        if not self.begins_linear or not torch.is_autocast_enabled(device):
            return context
        return _each(context, lambda x: x.to(torch.get_autocast_dtype(device)))


class TensorBlock(Block):
    """A block of a tensor rank."""

    sublayer_class: ClassVar[type[Sublayer]] = TensorSublayer


class TensorDecoder(Decoder):
    """The decoder of one tensor rank: parameters have the names of the whole one, and the parts that `splits` names.

    With sequence `none`, all ranks return the same loss and the same gradients of whole parameters. With `tensor`, the loss is
    that of the rank's own tokens. In both cases `sum_gradients` completes the gradients after the backward pass.

    Attributes:
        config: the whole decoder.
        ranks: the tensor ranks.
        splits: what the rank holds of every parameter, by name.

    Args:
        config: the whole decoder.
        ranks: the tensor ranks.
        tokens: T, of all rows to come with sequence `tensor`.

    Raises:
        ConfigError: a decoder that cannot be divided.
    """

    block_class: ClassVar[type[Block]] = TensorBlock

    def __init__(self, config: DecoderConfig, ranks: TensorRanks, tokens: int) -> None:
        split = TensorSplit(config, ranks.count)
        super().__init__(split.local)
        self.config, self.ranks, self.splits = config, ranks, split.splits(ranks.rank)
        self.halo = halo_of(config, tokens) if ranks.sequence == "tensor" else Halo(0, 0, (0,) * len(config.parts), 0)
        sublayers = [cast(TensorSublayer, one) for block in self.blocks for one in cast(Block, block).sublayers]
        for sublayer, part, halo in zip(sublayers, config.parts, self.halo.reads, strict=True):
            sublayer.ranks, sublayer.halo = ranks, halo
            sublayer.begins_linear = begins_linear(part) and not sublayer.depth.mixes_heads

    def hidden(
        self,
        embeddings: Float[Tensor, "B t D"],
        layout: TokenLayout | None = None,
        cache: DecoderCache | None = None,
        recompute: bool = False,
        tokens: Int[Tensor, "B t"] | None = None,
    ) -> tuple[Float[Tensor, "B t D"], DecoderCache | None]:
        """Runs the stack and the final norm on the tokens of this rank; the layout, with its ids, is that of whole rows.

        Raises:
            ConfigError: a cache, since a rank of several cannot generate.
        """
        if cache is not None:
            raise ConfigError("a cache with parallel.tensor above 1: must be left out; generate with one process")
        if self.ranks.sequence == "none":
            return super().hidden(embeddings, layout, recompute=recompute, tokens=tokens)
        layout = self._sharded(embeddings, layout, recompute)
        embeddings = self._mixed(embeddings, layout)
        embeddings, before = _before(self.ends.enter, embeddings, layout, self.halo.enter, self.ranks)
        state, _ = self.ends.enter(embeddings, layout.own(self.halo.enter), before)
        state = run_blocks(self.blocks, state, layout, recompute)
        state, before = _before(self.ends.leave, state, layout, self.halo.leave, self.ranks)
        left, _ = self.ends.leave(state, layout.own(self.halo.leave), before)
        return self.norm(left), None

    def loss(
        self,
        tokens: Int[Tensor, "B T"],
        targets: Int[Tensor, "B T"],
        layout: TokenLayout | None = None,
        recompute: bool = False,
    ) -> tuple[Float[Tensor, ""], Int[Tensor, ""]]:
        """Returns the sum of token losses in nats and the number of tokens that carry one: with `tensor`, of its own tokens."""
        return super().loss(self.ranks.own(tokens), self.ranks.own(targets), self._with_ids(layout, tokens), recompute)

    def correct(
        self, tokens: Int[Tensor, "B T"], targets: Int[Tensor, "B T"], layout: TokenLayout | None = None
    ) -> Int[Tensor, ""]:
        """Returns the number of targets that are the most likely token: with `tensor`, of its own tokens."""
        return super().correct(self.ranks.own(tokens), self.ranks.own(targets), self._with_ids(layout, tokens))

    def _with_ids(self, layout: TokenLayout | None, tokens: Tensor) -> TokenLayout:
        contiguous = TokenLayout.contiguous(tokens.shape[1], device=tokens.device)
        return (contiguous if layout is None else layout).of(tokens)

    def _mixed(self, embeddings: Tensor, layout: ShardedLayout) -> Tensor:
        """The embeddings of the tokens of this rank behind their local mixer, which looks at some of the rank before."""
        embeddings = layout.own().without_padding(embeddings)
        if self.embedding_local is None:
            return embeddings
        halo, new_cache = self.halo.embedding, self.embedding_local.new_cache

        def run(x: Tensor, own: TokenLayout, _: Any) -> Any:
            return self.embedding_local and self.embedding_local(x, own, new_cache())

        embeddings, before = _before(run, embeddings, layout, halo, self.ranks)
        return self.embedding_local(embeddings, layout.own(halo), before or new_cache())[0]

    def _sharded(self, embeddings: Tensor, layout: TokenLayout | None, recompute: bool) -> ShardedLayout:
        part = embeddings.shape[1]
        contiguous = TokenLayout.contiguous(part * self.ranks.count, device=embeddings.device)
        whole = contiguous if layout is None else layout.after(None)
        start = part * self.ranks.rank
        given = {field.name: getattr(whole, field.name) for field in fields(TokenLayout) if field.init}
        del given["_shared"]
        return ShardedLayout(**given, start=start, stop=start + part, recomputes=recompute)


def initial_parts(model: TensorDecoder, seed: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yields the name, the whole initial value for this seed, and the part of this rank, of every parameter."""
    with torch.device("meta"):
        whole = Decoder(model.config)
    names = {id(parameter): name for name, parameter in whole.named_parameters()}
    for parameter, value in initial_values(whole, seed):
        name = names[id(parameter)]
        yield name, value, model.splits[name].of(value)


Rows = Mapping[str, tuple[int, int]]
"""The first row that a process holds of a parameter of its tensor rank, and the one behind the last."""


def summed_chunks(splits: Mapping[str, Split], sequence: str, rows: Rows | None = None) -> list[tuple[str, Chunk]]:
    """The chunks whose gradient is a sum over the ranks that hold them, with the names of their parameters.

    Inside of a sublayer, every rank has the gradient of its own heads or hidden numbers. Elsewhere, every rank with whole
    streams has the whole gradient, and every rank with its own tokens that of these.

    Args:
        splits: what the tensor rank holds.
        sequence: `none` or `tensor`.
        rows: what the process holds of that, the same on all tensor ranks; None is everything.
    """
    summed = {name: split for name, split in splits.items() if split.inside or sequence == "tensor"}
    chunks = ((name, chunk) for name, split in summed.items() for chunk in split.chunks(*(rows or {}).get(name, ())))
    return [(name, chunk) for name, chunk in chunks if chunk.copies > 1]


BUCKET = 2**23
"""Numbers that are summed in one call, where there are as many."""


@torch.no_grad()
def sum_gradients(gradients: Mapping[str, Tensor], chunks: Iterable[tuple[str, Chunk]], ranks: TensorRanks) -> None:
    """Completes gradients in place after the backward pass; all ranks give those of the same parameters."""
    waiting, numbers = list[tuple[Tensor, Tensor]](), 0
    for name, chunk in chunks:
        if name not in gradients:
            continue
        piece = chunk.of(gradients[name])
        # One slot for each group of ranks that hold the same.
        slots = piece.new_zeros(ranks.count // chunk.copies, *piece.shape)
        slots[ranks.rank // chunk.copies] = piece
        waiting.append((piece, slots))
        numbers += slots.numel()
        if numbers >= BUCKET:
            _sum_slots(waiting, ranks)
            waiting, numbers = [], 0
    _sum_slots(waiting, ranks)


def _sum_slots(waiting: list[tuple[Tensor, Tensor]], ranks: TensorRanks) -> None:
    for dtype in dict.fromkeys(piece.dtype for piece, _ in waiting):
        alike = [(piece, slots) for piece, slots in waiting if piece.dtype == dtype]
        flat = torch.cat([slots.flatten() for _, slots in alike])
        dist.all_reduce(flat, group=ranks.group)
        for (piece, slots), total in zip(alike, flat.split([slots.numel() for _, slots in alike]), strict=True):
            own = ranks.rank * len(slots) // ranks.count
            piece.copy_(total.view_as(slots)[own])


def _each(views: Views, change: Any) -> Views:
    return QKV(*map(change, views)) if isinstance(views, QKV) else change(views)


def _before(run: Any, state: State, layout: ShardedLayout, halo: int, ranks: TensorRanks) -> tuple[State, Any]:
    """The cache that `run` makes of the last tokens of the rank before, and the state that these gradients return to."""
    if not halo:
        return state, None
    state, before = from_previous(state, halo, ranks)
    if ranks.rank == 0:
        return state, ()
    *_, cache = run(before, layout.before(halo), ())
    return state, cache
