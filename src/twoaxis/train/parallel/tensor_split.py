"""Which part of every parameter a tensor-parallel rank holds, and which decoders cannot be divided.

Letters: n tensor ranks, T tokens of a row, D width, H heads, G kv-heads, K key width, F hidden width.

Attention is divided by heads and a feed-forward by hidden numbers; embedding, norms, depth mixers and head are whole on every
rank. Names and shapes of the whole decoder are those of initial values and checkpoints.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from twoaxis.core.errors import ConfigError, problem
from twoaxis.core.layout import TokenLayout
from twoaxis.core.measure import tensors
from twoaxis.core.parameters import declarations
from twoaxis.core.position import SublayerPosition
from twoaxis.depth import DepthMixer
from twoaxis.feed_forward import GELUConfig, ReLU2Config, SwiGLUConfig
from twoaxis.feed_forward.base import HiddenConfig
from twoaxis.ledger.meter import measured_once
from twoaxis.model import Decoder, DecoderConfig
from twoaxis.model.block import sublayer_names
from twoaxis.model.config import SublayerConfig
from twoaxis.sequence import AttentionConfig, KVShiftConfig, ShortSWAConfig
from twoaxis.sequence.heads import HeadsConfig

SequenceSharding = Literal["none", "tensor"]
"""Streams are whole on every tensor rank, or each has the tokens of its part of the sequence."""

DIVIDED = (AttentionConfig, ShortSWAConfig, KVShiftConfig, SwiGLUConfig, GELUConfig, ReLU2Config)
"""The sublayers that can be divided."""


class Piece(NamedTuple):
    """Entries of a whole tensor along one dimension.

    Attributes:
        start: the first one.
        length: how many.
        copies: ranks in a row that hold them.
    """

    start: int
    length: int
    copies: int


class Part(NamedTuple):
    """Equal units, such as heads, that the ranks divide; where they are fewer than the ranks, several hold the same."""

    units: int
    width: int

    def piece(self, offset: int, rank: int, ranks: int) -> Piece:
        """What a rank holds of units that begin at an offset."""
        length = max(1, self.units // ranks) * self.width
        return Piece(offset + rank * self.units // ranks * self.width, length, max(1, ranks // self.units))


class Chunk(NamedTuple):
    """A box of entries of a whole tensor.

    Attributes:
        here: where it begins in what this process holds.
        there: where it begins in the whole tensor.
        sizes: of the box.
        copies: tensor ranks in a row that hold it.
    """

    here: tuple[int, ...]
    there: tuple[int, ...]
    sizes: tuple[int, ...]
    copies: int

    def of(self, held: Tensor) -> Tensor:
        """A view of the box in what this process holds."""
        return _box(held, self.here, self.sizes)

    def of_whole(self, whole: Tensor) -> Tensor:
        """A view of the box in the whole tensor."""
        return _box(whole, self.there, self.sizes)


def _box(tensor: Tensor, starts: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
    for dim, (start, length) in enumerate(zip(starts, sizes, strict=True)):
        tensor = tensor.narrow(dim, start, length)
    return tensor


@dataclass(frozen=True)
class Split:
    """What one rank holds of one whole tensor.

    Attributes:
        shape: of the whole tensor.
        dim: the dimension along which it is divided.
        pieces: what the rank holds along it, in order.
        inside: whether the parameter works on what is divided, so that its gradient on a rank lacks that of other ranks.
    """

    shape: torch.Size
    dim: int
    pieces: tuple[Piece, ...]
    inside: bool

    @property
    def local_shape(self) -> torch.Size:
        """The shape of what the rank holds."""
        sizes = list(self.shape)
        sizes[self.dim] = sum(piece.length for piece in self.pieces)
        return torch.Size(sizes)

    def of(self, whole: Tensor) -> Tensor:
        """What the rank holds of the whole tensor."""
        return torch.cat([whole.narrow(self.dim, piece.start, piece.length) for piece in self.pieces], self.dim)

    def chunks(self, start: int = 0, stop: int | None = None) -> list[Chunk]:
        """The boxes that the rows from `start` to `stop` of what the rank holds are made of."""
        rows, found, first = self.local_shape[0], [], 0
        stop = rows if stop is None else stop
        for piece in self.pieces:
            low, high = (max(first, start), min(first + piece.length, stop)) if self.dim == 0 else (start, stop)
            here, there, sizes = [low - start, *[0] * (len(self.shape) - 1)], [low, *[0] * (len(self.shape) - 1)], [*self.shape]
            sizes[0] = high - low
            if self.dim == 0:
                there[0] = piece.start + low - first
            else:
                here[self.dim], there[self.dim], sizes[self.dim] = first, piece.start, piece.length
            first += piece.length
            if high > low:
                found.append(Chunk(tuple(here), tuple(there), tuple(sizes), piece.copies))
        return found


class TensorSplit:
    """How the parameters of a decoder are divided among n tensor ranks.

    Attributes:
        config: the whole decoder.
        ranks: n.
        local: the decoder of one rank: fewer heads and hidden numbers, else the same.

    Raises:
        ConfigError: a decoder that cannot be divided.

    Example:
        >>> config = DecoderConfig(vocab_size=16, d_model=8, n_layers=1, blocks=[[{"kind": "attention", "n_heads": 2}]])
        >>> split = TensorSplit(config, 2).splits(1)["blocks.0.attention.mixer.qkv.weight"]
        >>> [(piece.start, piece.length) for piece in split.pieces], tuple(split.local_shape)
        ([(4, 4), (12, 4), (20, 4)], (12, 8))
    """

    def __init__(self, config: DecoderConfig, ranks: int) -> None:
        self.config, self.ranks = config, ranks
        for site, sublayer in zip(config.stack.sites, config.parts, strict=True):
            _check_sublayer(sublayer, site, ranks)
        if config.depth.design.heads == "across":
            allowed = "a depth mixer that works on each head by itself"
            raise ConfigError(
                problem("depth", config.depth.kind, f"{allowed} with parallel.tensor={ranks}", "set parallel.tensor=1")
            )
        shapes = [(slot.kind, slot.heads.n_kv_heads) for slot in config.stack.slots if slot.heads is not None]
        cut = [(kind, kv_heads) for kind, kv_heads in shapes if kv_heads % ranks]
        if config.depth.design.heads == "groups" and cut:
            what = f"n_kv_heads of {cut[0][0]} under depth mixer {config.depth.kind!r}"
            allowed = f"a multiple of parallel.tensor={ranks}, which may not cut a group of heads"
            raise ConfigError(problem(what, cut[0][1], allowed, "set parallel.tensor=1"))
        parts = iter(
            _local_sublayer(sublayer, site, ranks) for site, sublayer in zip(config.stack.sites, config.parts, strict=True)
        )
        self.local = config.replace(blocks=tuple(tuple(next(parts) for _ in block) for block in config.layers))

    def splits(self, rank: int) -> dict[str, Split]:
        """What a rank holds of every parameter, by name."""
        return {name: self._split(name, shape, rank) for name, shape in self._shapes[0].items()}

    @cached_property
    def _shapes(self) -> tuple[dict[str, torch.Size], dict[str, torch.Size]]:
        """The shapes of all parameters, whole and on a rank."""
        with torch.device("meta"):
            models = Decoder(self.config), Decoder(self.local)
        whole, local = ({name: one.shape for name, one in model.named_parameters()} for model in models)
        return whole, local

    @cached_property
    def _of_heads(self) -> dict[str, bool]:
        """Whether each parameter of a depth mixer works on heads; one around another is none of what that has.

        The norms of a depth mixer are those of streams.
        """
        with torch.device("meta"):
            model, found = Decoder(self.config), dict[str, bool]()
        norms = {name for name, _, declaration in declarations(model) if declaration.tag == "norm"}
        # Parts come behind what they are in.
        for path, module in model.named_modules():
            if isinstance(module, DepthMixer):
                found |= {name: module.mixes_heads and name not in norms for name, _ in module.named_parameters(path)}
        return found

    @cached_property
    def _sublayers(self) -> Mapping[str, tuple[SublayerConfig, SublayerPosition]]:
        """The configuration and the site of every sublayer by the prefix of its parameters."""
        names = [f"blocks.{n}.{name}." for n, block in enumerate(self.config.layers) for name in sublayer_names(block)]
        return dict(zip(names, zip(self.config.parts, self.config.stack.sites, strict=True), strict=True))

    def _split(self, name: str, shape: torch.Size, rank: int) -> Split:
        local = self._shapes[1][name]
        prefix = next((one for one in self._sublayers if name.startswith(one)), "")
        within = name.removeprefix(prefix)
        inside = bool(prefix) and (within.startswith("mixer.") or self._of_heads.get(name, False))
        dim = next((d for d, (a, b) in enumerate(zip(shape, local, strict=True)) if a != b), None)
        if dim is None:
            return Split(shape, 0, (Piece(0, shape[0], self.ranks),), inside)
        found, offset = [], 0
        for part in _parts(within, *self._sublayers[prefix], shape[dim]):
            found.append(part.piece(offset, rank, self.ranks))
            offset += part.units * part.width
        split = Split(shape, dim, tuple(found), inside)
        assert offset == shape[dim] and split.local_shape == local, f"{name}: {shape} is not divided into {local}"
        return split


class Halo(NamedTuple):
    """Earlier tokens needed behind the embedding, where the depth state begins, before each sublayer, and where it ends."""

    embedding: int
    enter: int
    reads: tuple[int, ...]
    leave: int

    @property
    def largest(self) -> int:
        """The most tokens that any of them needs."""
        return max(self.embedding, self.enter, self.leave, *self.reads)


@measured_once(maxsize=8)
def halo_of(config: DecoderConfig, tokens: int) -> Halo:
    """The earlier tokens that each read of the depth state looks at, found in the caches of a pass on the meta device."""
    sites, local = config.stack.sites, config.embedding_local
    embedding = 0 if local is None else local.receptive_field - 1
    if not config.depth.design.position:
        return Halo(embedding, 0, (0,) * len(sites), 0)
    with torch.device("meta"):
        mixers, ends = config.depth.build(config.stack)
        layout = TokenLayout.contiguous(tokens).of(torch.empty(1, tokens, dtype=torch.int64))
        state, cache = ends.enter(torch.empty(1, tokens, config.d_model), layout, ())
        entering, reads = _tokens(cache), []
        for mixer, site in zip(mixers, sites, strict=True):
            views, carry, cache = mixer.read(state, layout, ())
            reads.append(_tokens(cache))
            update = torch.empty(1, tokens, config.d_model + site.slot.update_extra)
            state = mixer.write(state, update, views, carry)
        _, cache = ends.leave(state, layout, ())
    return Halo(embedding, entering, tuple(reads), _tokens(cache))


def check_tensor(config: DecoderConfig, ranks: int, sequence: SequenceSharding, tokens: int) -> None:
    """Refuses what tensor ranks cannot divide.

    Raises:
        ConfigError: a sublayer, a depth mixer or a length that cannot be divided.
    """
    TensorSplit(config, ranks)
    if sequence == "none":
        return
    if tokens % ranks:
        allowed = f"a multiple of parallel.tensor={ranks} with parallel.sequence='tensor'"
        raise ConfigError(problem("data.seq_len", tokens, allowed, "change one of them, or use parallel.sequence=none"))
    halo = halo_of(config, tokens)
    if halo.largest > tokens // ranks:
        of_depth = halo.largest > halo.embedding
        what = f"depth mixer {config.depth.kind!r} looks at" if of_depth else "embedding_local looks at"
        allowed = f"at least the {halo.largest} earlier tokens that {what}"
        got = f"data.seq_len={tokens} over parallel.tensor={ranks}"
        raise ConfigError(f"{got}: {tokens // ranks} tokens on a rank: must be {allowed}; use parallel.sequence=none")


def begins_linear(sublayer: SublayerConfig) -> bool:
    """Whether only linear maps in the precision of the model look at the input of a sublayer that can be divided."""
    assert isinstance(sublayer, HeadsConfig | HiddenConfig)
    if isinstance(sublayer, HeadsConfig) and sublayer.sink == "per_token":
        return False
    return sublayer.input_local is None and not isinstance(sublayer, KVShiftConfig)


def _tokens(cache: object) -> int:
    return max((tensor.shape[1] for tensor in tensors(cache)), default=0)


def _check_sublayer(sublayer: SublayerConfig, site: SublayerPosition, ranks: int) -> None:
    where, given = f"{sublayer.kind} of block {site.block}", f"parallel.tensor={ranks}"
    if type(sublayer) not in DIVIDED:
        known = ", ".join(sorted(str(one.model_fields["kind"].default) for one in DIVIDED))
        raise ConfigError(problem("sublayer", sublayer.kind, f"one of {known} with {given}", "set parallel.tensor=1"))
    assert isinstance(sublayer, HeadsConfig | HiddenConfig)
    projected, update = sublayer.projected_local, sublayer.update_local
    if projected is not None and projected.channel_group is None:
        allowed = f"one whose channels can be divided, such as canon, with {given}"
        raise ConfigError(problem("projected_local", projected.kind, allowed, "drop it"))
    if update is not None and not update.linear:
        # Ranks have summands of the update.
        allowed = f"one that is linear in the channels, such as canon without activation and bias, with {given}"
        raise ConfigError(problem("update_local", update.kind, allowed, "drop it"))
    unit = sublayer.width_at(site) // ranks if isinstance(sublayer, HiddenConfig) else sublayer.key_width(site.d_model)
    if projected is not None and projected.channel_group is not None and unit % projected.channel_group:
        what = f"head_dim of projected_local of {where}"
        allowed = f"a divisor of the {unit} channels that a rank holds together with {given}"
        raise ConfigError(problem(what, projected.channel_group, allowed, "change one of them"))
    if isinstance(sublayer, HiddenConfig):
        if (width := sublayer.width_at(site)) % ranks:
            raise ConfigError(problem(f"d_ff of {where}", width, f"a multiple of {given}", "change one of them"))
        return
    if sublayer.n_heads % ranks:
        raise ConfigError(problem(f"n_heads of {where}", sublayer.n_heads, f"a multiple of {given}", "change one of them"))
    if sublayer.kv_heads % ranks and ranks % sublayer.kv_heads:
        allowed = f"a multiple or a divisor of {given}"
        raise ConfigError(problem(f"n_kv_heads of {where}", sublayer.kv_heads, allowed, "change one of them"))
    if sublayer.bias == "all":
        raise ConfigError(problem("bias", "all", f"'qkv' or 'none' with {given}", "set parallel.tensor=1"))
    if sublayer.qk_norm != "none" and sublayer.qk_norm_over == "all_heads":
        raise ConfigError(problem("qk_norm_over", "all_heads", f"'head' with {given}", "set parallel.tensor=1"))


def _local_sublayer(sublayer: SublayerConfig, site: SublayerPosition, ranks: int) -> SublayerConfig:
    if isinstance(sublayer, HiddenConfig):
        return sublayer.replace(d_ff=sublayer.width_at(site) // ranks, d_ff_by_depth="equal")
    assert isinstance(sublayer, HeadsConfig)
    heads, kv_heads = sublayer.n_heads // ranks, max(1, sublayer.kv_heads // ranks)
    return sublayer.replace(n_heads=heads, n_kv_heads=kv_heads, head_dim=sublayer.key_width(site.d_model))


def _parts(within: str, sublayer: SublayerConfig, site: SublayerPosition, size: int) -> list[Part]:
    """What stands side by side in the divided dimension, of this size, of a parameter of a sublayer."""
    assert isinstance(sublayer, HeadsConfig | HiddenConfig)
    if isinstance(sublayer, HiddenConfig) and within.startswith("depth."):
        # Heads that a depth mixer projects, as those of the attention before.
        shape = next(slot.heads for slot in reversed(site.stack.slots[: site.index]) if slot.heads is not None)
        return [Part(shape.n_kv_heads, shape.head_dim)] * (size // (shape.n_kv_heads * shape.head_dim))
    if within.startswith("mixer.projected_local."):
        return _channel_parts(sublayer, site, size)
    if isinstance(sublayer, HiddenConfig):
        one = Part(sublayer.width_at(site), 1)
        return [one] if within.startswith(("mixer.down.", "mixer.extra.")) else [one] * sublayer.projections
    assert isinstance(sublayer, HeadsConfig)
    H, G, K = sublayer.n_heads, sublayer.kv_heads, sublayer.key_width(site.d_model)
    values = 2 if site.slot.projects_values else 1
    if within.startswith("mixer.qkv"):
        return [Part(H, K), *[Part(G, K)] * values]
    if within.startswith(("mixer.output.", "mixer.extra.")):
        return [Part(H, K)]
    if within.startswith("mixer.shift"):
        return [Part(G, 1)] * values
    # A sink of each head, or what a depth mixer has for each kv-head.
    return [Part(H if within.startswith("mixer.sink") else G, 1)]


def _channel_parts(sublayer: HeadsConfig | HiddenConfig, site: SublayerPosition, size: int) -> list[Part]:
    """The parts of a parameter that has as many entries for each channel of the projection, or for each group of them."""
    local = sublayer.projected_local
    assert local is not None and local.channel_group is not None
    channels = sublayer.local_channels(site).projected
    if isinstance(sublayer, HiddenConfig):
        units = sublayer.width_at(site) // local.channel_group
        return [Part(units, size * local.channel_group // channels)] * sublayer.projections
    heads = {"q": sublayer.n_heads, "k": sublayer.kv_heads, "v": sublayer.kv_heads}
    return [Part(heads[name], size * sublayer.key_width(site.d_model) // channels) for name in sublayer.projected_branches]
