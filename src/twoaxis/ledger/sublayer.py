"""What one sublayer, or one local mixer inside it, saves for its backward pass and carries in generation: measured.

Letters: B batch, T position, C channels.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from twoaxis.core.cost import Shape
from twoaxis.core.layout import TokenLayout
from twoaxis.core.measure import saved_for_backward, storage_bytes, storage_of, tensors
from twoaxis.core.position import SublayerInfo, SublayerPosition
from twoaxis.feed_forward import FeedForwardConfig
from twoaxis.ledger.meter import Mode, held_bytes, measured_dtype, measured_once, placed, without_memory
from twoaxis.local import LocalConfig
from twoaxis.sequence import SequenceConfig

MeasuredConfig = SequenceConfig | FeedForwardConfig | LocalConfig


def sublayer_saved_bytes(config: MeasuredConfig, site: SublayerPosition, shape: Shape, mode: Mode = "eager") -> int:
    """Bytes of distinct storages that autograd saves of one pass, beyond parameters, input, output and rotation tables.

    Args:
        config: of the mixer.
        site: its place; of a local mixer only the width counts, which is that of its channels.
        shape: of the pass.
        mode: what runs.

    Example:
        >>> from twoaxis.core.position import LayerStack
        >>> from twoaxis.feed_forward import SwiGLUConfig
        >>> site = LayerStack(8, 1e-6, (1,)).sites[0]
        >>> sublayer_saved_bytes(SwiGLUConfig(d_ff=16), site, Shape(batch=1, tokens=1))  # gate, up and their product
        192
    """
    with without_memory(mode, shape.element_bytes):
        module, context, layout = _ready(config, site, shape, mode)
        with saved_for_backward() as saved:
            update, _ = module(context.requires_grad_(), layout)
        known = {storage_of(tensor) for tensor in _alive(module, context, update, layout)}
        return storage_bytes(tensor for tensor in saved if storage_of(tensor) not in known)


def sublayer_cache_bytes(config: MeasuredConfig, site: SublayerPosition, shape: Shape, mode: Mode = "eager") -> int:
    """Bytes that generation carries behind so many tokens; behind none, what does not depend on their number."""
    some = replace(shape, tokens=max(1, shape.tokens))
    with without_memory(mode, shape.element_bytes), torch.no_grad():
        module, context, layout = _ready(config, site, some, mode)
        return held_bytes(module(context, layout, module.new_cache())[1], of_tokens=shape.tokens > 0)


def saved_once(config: SequenceConfig | FeedForwardConfig, site: SublayerPosition, shape: Shape, mode: Mode = "eager") -> int:
    """The saved bytes; sublayers of one kind that have as many parameters are measured once."""
    return _once(sublayer_saved_bytes, config, _Alike.of(config, site), shape, mode)


def cached_once(config: SequenceConfig | FeedForwardConfig, site: SublayerPosition, shape: Shape, mode: Mode = "eager") -> int:
    """The bytes of the cache, in the same way."""
    return _once(sublayer_cache_bytes, config, _Alike.of(config, site), shape, mode)


@measured_once(8192)
def _once(measure: Callable[..., int], config: Any, at: "_Alike", shape: Shape, mode: Mode) -> int:
    return measure(config, at.site, shape, mode)


@dataclass(frozen=True)
class _Alike:
    """Sites at which a sublayer is the same: it is given as much, and has as many parameters."""

    d_model: int
    norm_eps: float
    slot: SublayerInfo
    params: int
    site: SublayerPosition = field(compare=False)

    @classmethod
    def of(cls, config: SequenceConfig | FeedForwardConfig, site: SublayerPosition) -> "_Alike":
        return cls(site.d_model, site.norm_eps, site.slot, config.cost(site, Shape(1, 1)).params, site)


def _ready(config: MeasuredConfig, site: SublayerPosition, shape: Shape, mode: Mode) -> tuple[Any, torch.Tensor, TokenLayout]:
    dtype = measured_dtype(mode, shape.element_bytes)
    with torch.device("meta"):
        module: Any = config.build(site.d_model, site) if isinstance(config, LocalConfig) else config.build(site)
    context = torch.empty(shape.batch, shape.tokens, site.d_model, dtype=dtype)
    ids = torch.zeros(shape.batch, shape.tokens, dtype=torch.int64)
    return placed(module, dtype), context, TokenLayout.contiguous(shape.tokens).of(ids)


def _alive(module: Any, context: Any, update: Any, layout: TokenLayout) -> list[torch.Tensor]:
    shared = tensors((layout.positions, layout.tokens, list(layout._shared.values())))
    return [*module.parameters(), *module.buffers(), context, update, *shared]
