"""Depth mixers with tables of tokens, around another depth mixer, to which they leave the stream.

Letters: B batch, T position.
"""

from abc import ABC
from functools import lru_cache
from typing import Annotated, Any

import torch
from jaxtyping import Int
from pydantic import BeforeValidator, Field, SerializeAsAny
from torch import Tensor

from twoaxis.core.cost import Cost, Shape
from twoaxis.core.errors import ConfigError, problem
from twoaxis.core.position import LayerStack, SublayerPosition
from twoaxis.core.views import Heads, Views
from twoaxis.depth.base import Controls, DepthConfig, DepthMixer, Explanation, Layout, Mix, State, StreamEnds


def _parsed(data: Any) -> DepthConfig:
    # The table names the mixers that are made of this.
    from twoaxis.depth import DEPTH

    return DEPTH.parse(data)


# Any, since it is parsed like what is given.
PLAIN: Any = "residual"


class AroundConfig(DepthConfig, ABC):
    """The option of the mixer of the stream, and what is that mixer's to say."""

    stream: Annotated[SerializeAsAny[DepthConfig], BeforeValidator(_parsed)] = Field(default=PLAIN)

    def splits_views(self, site: SublayerPosition) -> bool:
        """As the mixer of the stream."""
        return self.stream.splits_views(site)

    def controls(self) -> Controls:
        """The streams of its mixer."""
        return Controls(streams=self.stream.controls().streams)

    def prepare(self, stack: LayerStack) -> LayerStack:
        """Refuses a stack whose tokens are unknown, and what the mixer of the stream refuses."""
        if stack.vocab_size is None:
            remedy = "use it in a Decoder, or build one alone with vocab_size=..."
            raise ConfigError(problem("vocab_size", None, f"known to depth mixer {self.kind!r}", remedy))
        return self.stream.prepare(stack)

    def cost(self, site: SublayerPosition, shape: Shape) -> Cost:
        """The cost of the mixer of the stream."""
        return self.stream.cost(site, shape)

    def ends_cost(self, stack: LayerStack, shape: Shape) -> Cost:
        """The cost of its ends."""
        return self.stream.ends_cost(stack, shape)


class Around(DepthMixer):
    """Reads, mixes heads and writes as the mixer of the stream does."""

    def __init__(self, stream: DepthMixer) -> None:
        super().__init__()
        self.stream = stream

    def read(self, state: State, layout: Layout = None, cache: Any = None) -> tuple[Views, Any, Any]:
        """Returns its read."""
        return self.stream.read(state, layout, cache)

    def mix_heads(self, heads: Heads, context: Views, state: State, layout: Layout = None) -> tuple[Heads, State]:
        """Returns its heads."""
        return self.stream.mix_heads(heads, context, state, layout)

    def write(self, state: State, update: Tensor, context: Views, carry: Any) -> State:
        """Returns its state."""
        return self.stream.write(state, update, context, carry)

    def explain(self, done: Any) -> Explanation:
        """Returns its weights; none of a mixing of heads that it does not do."""
        return Explanation() if isinstance(done, Mix) and not self.stream.mixes_heads else self.stream.explain(done)


def check_one_stream(config: Any, stack: LayerStack) -> None:
    """Refuses a depth mixer whose state is not one stream that starts as the embeddings."""
    if not _is_one_stream(config, stack):
        allowed = "a depth mixer whose state is one stream"
        raise ConfigError(problem("stream", config.kind, allowed, "use 'residual'"))


@lru_cache(256)
def _is_one_stream(config: Any, stack: LayerStack) -> bool:
    with torch.device("meta"):
        return type(config.build(stack)[1]) is StreamEnds


def token_ids(layout: Layout, kind: str) -> Int[Tensor, "B T"]:
    """The ids of the tokens, for a mixer of this kind.

    Raises:
        ConfigError: only vectors are known.
    """
    if layout is None:
        raise ConfigError(f"{kind}: no layout, and so no token ids: must have them; use it in a Decoder, which passes them")
    return layout.ids(kind)
