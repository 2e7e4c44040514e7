"""One sublayer between its read and its write, and a block of them.

Letters: B batch, T position, D width.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, NamedTuple, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from twoaxis.core.layout import TokenLayout
from twoaxis.core.parameters import Constant, DeclaredModule
from twoaxis.core.position import SublayerPosition
from twoaxis.core.views import QKV, Heads, Views
from twoaxis.depth import DepthConfig, DepthMixer
from twoaxis.depth.base import Mix, NoHeads, State
from twoaxis.model.config import SublayerConfig
from twoaxis.ops.norm import rms_norm
from twoaxis.sequence import HeadMixer, SequenceConfig


class RMSNorm(DeclaredModule):
    """RMS normalisation with a learned gain, an explicit eps and a constant factor."""

    def __init__(self, width: int, eps: float, scale: float = 1.0, dead: str | None = None) -> None:
        super().__init__()
        self.eps, self.scale = eps, scale
        self.gain = self.parameter("gain", (width,), Constant(1.0), "norm", dead)

    def forward(self, x: Float[Tensor, "*n D"]) -> Float[Tensor, "*n D"]:
        """Normalises the last axis."""
        return rms_norm(x, self.gain, self.eps, scale=self.scale)


def norm_before(site: SublayerPosition, dead: str | None = None) -> nn.Module:
    """Builds a norm between a read and its sublayer, which may be none; `dead` as in `Declaration`."""
    slot = site.slot
    return nn.Identity() if slot.norm == "none" else RMSNorm(site.d_model, site.norm_eps, slot.norm_scale, dead)


class SublayerCache(NamedTuple):
    """The cache of one sublayer: that of its depth mixer and that of its mixer."""

    depth: Any
    mixer: Any


class Sublayer(nn.Module):
    """Reads from the depth state, normalises, mixes, writes back.

    Separate views have a norm each: `norm` for the queries, `key_norm` and `value_norm`. The depth mixer may do without.
    """

    def __init__(self, depth: DepthMixer, config: SublayerConfig, site: SublayerPosition, splits_views: bool) -> None:
        super().__init__()
        self.depth = depth
        self.update_scale, self.update_extra = site.stack.update_scale, site.slot.update_extra
        # A depth mixer may read the context that its mixer does not.
        unread = isinstance(config, SequenceConfig) and not config.reads_context and not site.slot.update_extra
        self.norm = norm_before(site, "no depth mixer need read the context" if unread else None)
        self.mixer: Any = config.build(site)
        if splits_views:
            self.key_norm, self.value_norm = norm_before(site), norm_before(site)

    def new_cache(self) -> SublayerCache:
        """The caches before the first token."""
        return SublayerCache((), self.mixer.new_cache())

    def forward(
        self, state: State, layout: TokenLayout, cache: SublayerCache | None = None
    ) -> tuple[State, SublayerCache | None]:
        """Returns the next depth state and the next caches."""
        depth_cache, mixer_cache = cache or (None, None)
        views, carry, depth_cache = self.depth.read(state, layout, depth_cache)
        context = self.normalise(views)
        update, state, mixer_cache = self.mix(context, state, layout, mixer_cache)
        state = self.depth.write(state, update, context, carry)
        return state, None if cache is None else SublayerCache(depth_cache, mixer_cache)

    def normalise(self, views: Views) -> Views:
        """Returns the context: every view after its norm."""
        if isinstance(views, QKV):
            return QKV(self.norm(views.q), self.key_norm(views.k), self.value_norm(views.v))
        return self.norm(views)

    def heads(self, context: Views, layout: TokenLayout, cache: Any = None) -> tuple[Heads | NoHeads, Any]:
        """Returns the heads that the depth mixer mixes, and the mixer's next cache."""
        if not self.depth.mixes_heads or not isinstance(self.mixer, HeadMixer):
            return (), cache
        return self.mixer.project(context, layout, cache)

    def mix(
        self, context: Views, state: State, layout: TokenLayout, cache: Any = None, seen: Callable[[Mix], Mix] | None = None
    ) -> tuple[Tensor, State, Any]:
        """Returns the update, the state after heads are mixed, and the mixer's next cache.

        Args:
            context: behind the norm.
            state: before this sublayer.
            layout: of the tokens.
            cache: of the mixer.
            seen: called where heads are mixed; returns what goes on instead.
        """
        heads, cache = self.heads(context, layout, cache)
        if self.depth.mixes_heads:
            mix = Mix(state, heads, *self.depth.mix_heads(heads, context, state, layout))
            _, _, heads, state = mix if seen is None else seen(mix)
        update, cache = self.mixer.attend(heads, layout, cache, context) if heads else self.mixer(context, layout, cache)
        return self._scaled(update), state, cache

    def _scaled(self, update: Tensor) -> Tensor:
        if self.update_scale == 1:
            return update
        if not self.update_extra:
            return update * self.update_scale
        own, extra = update.split((update.shape[-1] - self.update_extra, self.update_extra), dim=-1)
        return torch.cat((own * self.update_scale, extra), dim=-1)


def sublayer_names(configs: Sequence[SublayerConfig]) -> list[str]:
    """Names the sublayers of a block by kind, so that models with a sublayer in common have its parameter names in common.

    Example:
        >>> from twoaxis.model import DecoderConfig
        >>> blocks = [["short_swa", "attention", "attention", "swiglu"]]
        >>> sublayer_names(DecoderConfig(vocab_size=8, d_model=8, n_layers=1, blocks=blocks).blocks[0])
        ['short_swa', 'attention', 'attention_2', 'swiglu']
    """
    names = []
    for place, config in enumerate(configs):
        earlier = sum(other.kind == config.kind for other in configs[:place])
        names.append(f"{config.kind}_{earlier + 1}" if earlier else config.kind)
    return names


class Block(nn.Module):
    """Sublayers in order."""

    sublayer_class: ClassVar[type[Sublayer]] = Sublayer

    def __init__(
        self,
        depth: DepthConfig,
        mixers: Sequence[DepthMixer],
        configs: Sequence[SublayerConfig],
        sites: Sequence[SublayerPosition],
    ) -> None:
        super().__init__()
        for name, mixer, config, site in zip(sublayer_names(configs), mixers, configs, sites, strict=True):
            self.add_module(name, self.sublayer_class(mixer, config, site, depth.splits_views(site)))

    @property
    def sublayers(self) -> list[Sublayer]:
        """The sublayers in order."""
        return [cast(Sublayer, sublayer) for sublayer in self.children()]

    def new_caches(self) -> tuple[SublayerCache, ...]:
        """The caches of each sublayer before the first token."""
        return tuple(sublayer.new_cache() for sublayer in self.sublayers)

    def forward(
        self, state: State, layout: TokenLayout, caches: Sequence[SublayerCache] | None = None
    ) -> tuple[State, list[SublayerCache | None]]:
        """Returns the depth state after the block, and the next caches of each sublayer."""
        next_caches = []
        for index, sublayer in enumerate(self.children()):
            state, cache = sublayer(state, layout, None if caches is None else caches[index])
            next_caches.append(cache)
        return state, next_caches


def run_blocks(blocks: Iterable[nn.Module], state: State, layout: Any, recompute: bool) -> State:
    """Runs blocks without caches; `recompute` keeps only the depth state between them and recomputes the rest."""
    for block in blocks:
        if recompute and torch.is_grad_enabled():
            state, _ = checkpoint(block, state, layout, use_reentrant=False)
        else:
            state, _ = block(state, layout)
    return state
