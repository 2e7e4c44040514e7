"""Attention that another library computes: the function that an engine registers with transformers.

Letters: B batch, T tokens of this call, H heads, G kv-heads, K key width.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from twoaxis.core.errors import ConfigError, problem
from twoaxis.core.layout import Attend, TokenLayout

OWN = (None, "eager")
"""What transformers calls the attention that a model brings along."""


def engine_attention(implementation: str | None) -> Callable[..., Any] | None:
    """The registered attention function of this name, or None for a model's own attention.

    Raises:
        ConfigError: a function of transformers itself, which needs masks and caches that models of this library do not make.
    """
    if implementation in OWN:
        return None
    if implementation in ALL_MASK_ATTENTION_FUNCTIONS or "|" in implementation:
        allowed = "'eager', which is this library's own fast attention, or one that an engine has registered"
        raise ConfigError(problem("attn_implementation", implementation, allowed, "leave it out"))
    return ALL_ATTENTION_FUNCTIONS[implementation]


def engine_layout(
    attention: Callable[..., Any], position_ids: Tensor | None, unused: Iterable[Any], kwargs: Mapping[str, Any]
) -> TokenLayout:
    """The layout of tokens whose requests only the engine knows.

    Args:
        attention: the registered function.
        position_ids: [1 T], which begin anew with each request, or go on where its last call has stopped.
        unused: masks, caches, and what else must be None or False.
        kwargs: what the engine passes through the model to its function.

    Raises:
        ConfigError: no positions, or something that the engine itself keeps.
    """
    if position_ids is None or any(thing is not None and thing is not False for thing in unused):
        got = "no position_ids" if position_ids is None else "a mask, a cache or hidden states"
        remedy = "an engine's attention keeps keys and values itself and knows which tokens see each other"
        raise ConfigError(f"call with attn_implementation of an engine: got {got}; must be tokens and position_ids; {remedy}")

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        _check_heads(module, kwargs.get("attention_instances"))
        # No mask: which tokens see each other, the engine knows.
        y, _ = attention(module, q, k, v, None, scaling=module.scaling, sliding_window=module.sliding_window, **kwargs)
        return y.reshape(q.shape[0], q.shape[2], -1)

    operator: Attend = attend
    return TokenLayout(position_ids, attend=operator)


def _check_heads(module: Any, instances: Any) -> None:
    """Notices an engine that has cut the heads among devices, which a model without a plan for that cannot follow."""
    if instances is None or module.layer_idx not in instances:
        return
    heads = getattr(instances[module.layer_idx], "num_heads", module.num_heads)
    if heads != module.num_heads:
        allowed = f"all {module.num_heads}, since models of this library are not cut among devices"
        raise ConfigError(problem("heads of the engine", heads, allowed, "serve with --tensor-parallel-size 1"))


def builds_without_memory() -> bool:
    """Whether parameters land on the meta device when they are registered, as engines arrange while they build a model."""
    return nn.Linear(1, 1, bias=False).weight.is_meta
