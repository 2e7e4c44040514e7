"""Attention that an inference engine computes: the modules in which engines look for it, and the layout of a call.

Letters: N tokens of all requests of a call, D width, H heads, G kv-heads, K key width.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from twoaxis.core.errors import ConfigError, problem
from twoaxis.core.layout import Attend, TokenLayout
from twoaxis.sequence.heads import SoftmaxAttention

OWN = (None, "eager")
"""The names of a model's own attention in transformers."""


class EngineAttention(nn.Module):
    """The attention of one block for an engine: a module that calls the function that the engine has registered.

    vLLM reads the source of `forward` for one call of an entry of `ALL_ATTENTION_FUNCTIONS`, takes the scale from its argument
    `scaling`, and puts its own layer, with the cache of the block, into the attribute `attn`. There are no parameters.

    Args:
        attention: the attention that projects to heads; it is not held.
        layer: the index of its block.
        config: of the model, which names the registered function.
    """

    def __init__(self, attention: SoftmaxAttention, layer: int, config: PreTrainedConfig) -> None:
        super().__init__()
        heads = attention.config
        self.config, self.layer_idx, self.is_causal = config, layer, True
        self.num_heads, self.num_key_value_heads, self.head_dim = heads.n_heads, heads.kv_heads, attention.head_dim
        self.sliding_window, self.scaling = heads.span, attention.head_dim**-0.5

    def forward(
        self, query: Float[Tensor, "1 H N K"], key: Float[Tensor, "1 G N K"], value: Float[Tensor, "1 G N K"], **kwargs: Any
    ) -> Tensor:
        """Returns the output of all heads side by side, [N H*K] or [1 N H*K]; there is no mask, which the engine knows."""
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        y, _ = attend(self, query, key, value, None, scaling=self.scaling, sliding_window=self.sliding_window, **kwargs)
        return y

    def check_heads(self, instances: Mapping[int, Any] | None) -> None:
        """Refuses an engine that splits the heads among devices, for which models of this library have no plan.

        Args:
            instances: the layers of the engine by block, if it passes them; otherwise its layer is `attn`.

        Raises:
            ConfigError: it does.
        """
        layer = (instances or {}).get(self.layer_idx, getattr(self, "attn", None))
        heads = getattr(layer, "num_heads", self.num_heads)
        if heads != self.num_heads:
            allowed = f"all {self.num_heads}, since models of this library are not cut among devices"
            raise ConfigError(problem("heads of the engine", heads, allowed, "serve with --tensor-parallel-size 1"))


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
    attentions: nn.ModuleDict, position_ids: Tensor | None, unused: Iterable[Any], kwargs: Mapping[str, Any]
) -> TokenLayout:
    """The layout of tokens of several requests, which only the engine can tell apart.

    Args:
        attentions: of each block by its index.
        position_ids: [1 N], which begin anew with each request, or go on where its last call has stopped.
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
        attention: Any = attentions[str(module.layer_idx)]
        attention.check_heads(kwargs.get("attention_instances"))
        return attention(q, k, v, **kwargs).reshape(q.shape[0], q.shape[2], -1)

    operator: Attend = attend
    return TokenLayout(position_ids, attend=operator)


def builds_without_memory() -> bool:
    """Whether parameters land on the meta device when they are registered, as engines arrange while they build a model."""
    return nn.Linear(1, 1, bias=False).weight.is_meta
