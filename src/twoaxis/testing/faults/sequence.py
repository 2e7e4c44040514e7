"""Attention that is correct except for one fault."""

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from twoaxis.core.cost import Cost, Shape
from twoaxis.core.design import InitEquivalence
from twoaxis.core.key_value_cache import KeyValueCache, KeyValueRing
from twoaxis.core.layout import TokenLayout
from twoaxis.core.position import SublayerPosition
from twoaxis.sequence import AttentionConfig, SequenceConfig
from twoaxis.sequence.heads import AttentionCache, SoftmaxAttention
from twoaxis.testing.conformance import Fault
from twoaxis.testing.toy import TooSteep

Output = tuple[Tensor, Any]
WINDOW = 4


class _Planted(AttentionConfig):
    """Windowed attention with another mixer or another declaration."""

    mixer: ClassVar[type[SoftmaxAttention]] = SoftmaxAttention
    misstated: ClassVar[Cost] = Cost()
    relation: ClassVar[Any] = "none"

    @property
    def init_equivalence(self) -> InitEquivalence:
        return InitEquivalence(self.relation, "a planted fault or its twin")

    def cost(self, site: SublayerPosition, shape: Shape) -> Cost:
        return super().cost(site, shape) + self.misstated

    def build(self, site: SublayerPosition) -> SoftmaxAttention:
        return self.mixer(self, site)


class _StaleCache(SoftmaxAttention):
    """Drops the tokens of a chunk if it already holds some."""

    def forward(self, context: Any, layout: TokenLayout, cache: Any = None) -> Output:
        y, following = super().forward(context, layout, cache)
        return y, cache if cache is not None and cache.keys.length and context.shape[1] > 1 else following


class _GrowingCache(SoftmaxAttention):
    def new_cache(self) -> AttentionCache:
        return replace(super().new_cache(), keys=KeyValueCache(None))


class _TornCache(KeyValueCache):
    """Writes into the buffer even if another continuation has."""

    def _fits(self, tokens: int) -> bool:
        assert self._buffer is not None
        return self._buffer.filled + tokens <= self._buffer.capacity


class _SharesCache(SoftmaxAttention):
    def forward(self, context: Any, layout: TokenLayout, cache: Any = None) -> Output:
        y, following = super().forward(context, layout, cache)
        if following is not None:
            keys = following.keys
            following = replace(following, keys=_TornCache(keys.window, keys._buffer, keys._start, keys._stop))
        return y, following


class _TakesTheLastPlace(SoftmaxAttention):
    """Adds to a step of one token what stands last in the cache, as if that were the newest token in every cache."""

    def _over_keys(self, heads: Any, layout: TokenLayout, cache: Any, sink: Any) -> Output:
        y, following = super()._over_keys(heads, layout, cache, sink)
        own = heads.v.transpose(1, 2)
        if following is not None and own.shape[2] == 1:
            keys = following.keys
            own = (keys.values if isinstance(keys, KeyValueRing) else keys.past()[1])[:, :, -1:]
        added = own.repeat_interleave(heads.q.shape[2] // own.shape[1], dim=1)
        return y + added.transpose(1, 2).flatten(2), following


class _ReordersLongPrefills(SoftmaxAttention):
    """Puts what the window keeps of a long prefill in another order, keys and values alike."""

    def forward(self, context: Any, layout: TokenLayout, cache: Any = None) -> Output:
        y, following = super().forward(context, layout, cache)
        if following is not None and context.shape[1] > 256:
            kept, buffer = slice(following.keys._start, following.keys._stop), following.keys._buffer
            assert buffer is not None
            for held in (buffer.keys, buffer.values):
                held[:, :, kept] = held[:, :, kept].flip(2)
        return y, following


class _DetachedCache(SoftmaxAttention):
    def forward(self, context: Any, layout: TokenLayout, cache: Any = None) -> Output:
        y, following = super().forward(context, layout, cache)
        if following is not None:
            buffer = following.keys._buffer
            assert buffer is not None
            buffer.keys = buffer.keys.detach()
        return y, following


class _ChunkPositions(SoftmaxAttention):
    def forward(self, context: Any, layout: TokenLayout, cache: Any = None) -> Output:
        fresh = TokenLayout(layout.positions - layout.positions[:, :1], layout.documents, layout.past_documents)
        return super().forward(context, fresh, cache)


class _NoDocuments(SoftmaxAttention):
    def forward(self, context: Any, layout: TokenLayout, cache: Any = None) -> Output:
        return super().forward(context, TokenLayout(layout.positions), cache)


class _WiderWindow(SoftmaxAttention):
    """The window without the query, as some kernels count it."""

    def __init__(self, config: Any, site: SublayerPosition) -> None:
        super().__init__(config.replace(window=config.window + 1), site)


class _CappedWindow(SoftmaxAttention):
    def __init__(self, config: Any, site: SublayerPosition) -> None:
        super().__init__(config if config.window is None else config.replace(window=min(config.window, 8)), site)


class _Future(SoftmaxAttention):
    def forward(self, context: Any, layout: TokenLayout, cache: Any = None) -> Output:
        y, following = super().forward(context, layout, cache)
        return y + 0.1 * context.mean(dim=1, keepdim=True), following


class _AbsolutePositions(SoftmaxAttention):
    def forward(self, context: Any, layout: TokenLayout, cache: Any = None) -> Output:
        y, following = super().forward(context, layout, cache)
        return y + 0.01 * layout.positions.unsqueeze(-1), following


class _HalfStatistics(SoftmaxAttention):
    def forward(self, context: Any, layout: TokenLayout, cache: Any = None) -> Output:
        return super().forward(context * torch.rsqrt(context.square().mean(-1, keepdim=True)), layout, cache)


class _Squares(SoftmaxAttention):
    """Saves a copy of its input for its gradient, except on the meta device."""

    def forward(self, context: Any, layout: TokenLayout, cache: Any = None) -> Output:
        y, following = super().forward(context, layout, cache)
        return y if y.is_meta else y + 0.1 * context.clone().square(), following


class _RoughEngine(SoftmaxAttention):
    def forward(self, context: Any, layout: TokenLayout, cache: Any = None) -> Output:
        y, following = super().forward(context, layout, cache)
        return y * (1 + 1e-9 * (self.config.impl == "fused")), following


class _WrongGradient(SoftmaxAttention):
    def forward(self, context: Any, layout: TokenLayout, cache: Any = None) -> Output:
        y, following = super().forward(context, layout, cache)
        return TooSteep.apply(y), following


def _planted(mixer: type[SoftmaxAttention] = SoftmaxAttention, **statements: Any) -> SequenceConfig:
    config = type("PlantedConfig", (_Planted,), {"mixer": mixer, **statements, "__module__": __name__})
    return config(n_heads=2, head_dim=4, window=WINDOW)


def _fault(name: str, caught_by: str, faulty: SequenceConfig) -> Fault:
    return Fault(name, faulty, _planted(), tuple(caught_by.split()))


SEQUENCE_FAULTS = (
    _fault("stale cache", "incremental_decode chunk_size_invariance", _planted(_StaleCache)),
    _fault("cache beyond the window", "cache_size", _planted(_GrowingCache)),
    _fault("cache shared by continuations", "forked_cache", _planted(_SharesCache)),
    _fault("the newest token taken for the last", "static_cache_decode", _planted(_TakesTheLastPlace)),
    _fault("another order after a long prefill", "long_prefill", _planted(_ReordersLongPrefills)),
    _fault("cache without gradients", "chunked_gradients", _planted(_DetachedCache)),
    _fault("positions from the chunk's start", "incremental_decode chunk_size_invariance", _planted(_ChunkPositions)),
    _fault("documents ignored", "document_isolation left_padding", _planted(_NoDocuments)),
    _fault("window without the query", "receptive_field_is_exact", _planted(_WiderWindow)),
    _fault("capped window", "receptive_field_is_exact window_covers_all", _planted(_CappedWindow)),
    _fault("position leak", "causal_along_positions receptive_field_is_exact", _planted(_Future)),
    _fault("absolute positions", "position_offset_invariance", _planted(_AbsolutePositions)),
    _fault("statistics in half precision", "mixer_statistics_are_wide", _planted(_HalfStatistics)),
    _fault("engines that differ", "fused_equals_reference", _planted(_RoughEngine)),
    _fault("wrong gradient", "gradcheck_mixer", _planted(_WrongGradient)),
    _fault("false claim of equivalence", "sublayer_init_equivalence", _planted(relation="exact")),
    _fault("wrong pair flops", "mixer_costs_are_exact", _planted(misstated=Cost(pair_flops=1))),
    _fault("tensor saved off the meta device", "mixer_saved_bytes_are_exact decoder_saved_bytes_are_exact", _planted(_Squares)),
)
