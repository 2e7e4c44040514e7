"""The models that run in inference engines with their own attention, as vLLM and SGLang have through transformers.

Such an engine keeps the keys and values of one attention per block, all of one shape, and nothing else from token to token. One
call holds tokens of several requests, so any other state of a model would mix requests. Depth mixers that treat each token
alone need nothing from the engine.
"""

from typing import Any, NamedTuple, cast

import torch

from twoaxis.core.errors import ConfigError
from twoaxis.local.places import Places
from twoaxis.model import Decoder, DecoderConfig
from twoaxis.model.block import Block
from twoaxis.sequence.heads import AttentionCache, SoftmaxAttention

HISTORY = "an engine keeps keys and values from token to token, and no recurrent state or last tokens"
SINK = "a learned sink takes part in the softmax, which is the engine's"
COUNT = "an engine computes one attention in each block, no more and no fewer"
HEADS = "an engine makes every attention with the same heads"
WINDOWS = "an engine knows full attention and one window"
KEYS = "a depth mixer adds a key to the softmax, which is the engine's"

REASONS = (HISTORY, SINK, COUNT, HEADS, WINDOWS, KEYS)
"""Why an engine cannot run a model."""


class Obstacle(NamedTuple):
    """Why an engine cannot run a model.

    Attributes:
        reason: one of `REASONS`.
        where: the part of the model, as its configuration names it.
        remedy: what to change.
    """

    reason: str
    where: str
    remedy: str


def obstacles(decoder: Decoder) -> list[Obstacle]:
    """All reasons why an engine cannot run this model, in the order of its sublayers; empty if it can.

    Example:
        >>> config = DecoderConfig(vocab_size=8, d_model=8, n_layers=1, blocks=[["kv_shift", "swiglu"]])
        >>> [obstacle.where for obstacle in obstacles(Decoder(config))]
        ["'kv_shift' in block 0"]
    """
    attentions = [attention for block in attentions_of_blocks(decoder) for attention in block]
    found = list[Obstacle]()
    if decoder.config.depth.design.position:
        found.append(_history(f"depth mixer {decoder.config.depth.kind!r}"))
    found += [
        Obstacle(KEYS, f"depth mixer {decoder.config.depth.kind!r} in block {site.block}", "choose another depth mixer")
        for site in decoder.config.stack.sites
        if site.slot.more_keys
    ]
    if decoder.embedding_local is not None:
        found.append(_history("embedding_local"))
    windows = [attention.config.span for attention in attentions if attention.config.span is not None]
    for index, (block, parts) in enumerate(zip(decoder.blocks, decoder.config.layers, strict=True)):
        for sublayer, part in zip(cast(Block, block).sublayers, parts, strict=True):
            mixer, where = sublayer.mixer, f"{part.kind!r} in block {index}"
            if isinstance(mixer, SoftmaxAttention):
                found += _obstacles(mixer, where, attentions[0], windows[:1])
            elif _carries(mixer.new_cache()):
                found.append(_history(where))
        if (here := len(attentions_of_blocks(decoder)[index])) != 1:
            split = "give each a block of its own, as in blocks=[['short_swa'], ['attention', 'swiglu']]"
            found.append(
                Obstacle(COUNT, f"{here} attentions in block {index}", split if here else "join it with the next block")
            )
    return found


def _obstacles(attention: SoftmaxAttention, where: str, first: SoftmaxAttention, windows: list[int]) -> list[Obstacle]:
    found, cache, window = list[Obstacle](), attention.new_cache(), attention.config.span
    # Another class of cache holds more than keys and values.
    if type(cache) is not AttentionCache or _carries(cache.local):
        found.append(_history(where))
    if attention.config.unseen_keys:
        found.append(Obstacle(SINK, where, "leave out sink"))
    if _heads(attention) != _heads(first):
        found.append(Obstacle(HEADS, f"{_heads(attention)} of {where}, others {_heads(first)}", "give them the same heads"))
    if window is not None and window not in windows:
        found.append(Obstacle(WINDOWS, f"window={window} of {where}, others window={windows[0]}", "give them the same window"))
    return found


def check_obstacles(found: list[Obstacle]) -> None:
    """Raises ConfigError with the first obstacle, if any."""
    if found:
        first, *others = found
        more = f" (and {len(others)} more)" if others else ""
        raise ConfigError(f"{first.where}: cannot run in another engine, since {first.reason}; {first.remedy}{more}")


def check_engine(config: DecoderConfig) -> None:
    """Checks that an engine can run models of this configuration.

    Raises:
        ConfigError: it cannot, with the reason.
    """
    # Built on the meta device, since only modules know what they carry from token to token.
    with torch.device("meta"):
        check_obstacles(obstacles(Decoder(config)))


def number_attentions(decoder: Decoder) -> None:
    """Sets `layer_idx` of every attention, the index of its block, by which the attention of an engine is found."""
    for index, block in enumerate(attentions_of_blocks(decoder)):
        for attention in block:
            numbered: Any = attention
            numbered.layer_idx = index


def attentions_of_blocks(decoder: Decoder) -> list[list[SoftmaxAttention]]:
    """The attentions of each block."""
    blocks = [cast(Block, block).sublayers for block in decoder.blocks]
    return [[part.mixer for part in block if isinstance(part.mixer, SoftmaxAttention)] for block in blocks]


def _history(where: str) -> Obstacle:
    return Obstacle(HISTORY, where, "choose options or a mixer without")


def _heads(attention: SoftmaxAttention) -> str:
    config = attention.config
    return f"{config.n_heads} heads and {config.kv_heads} kv-heads of {attention.head_dim}"


def _carries(cache: Any) -> bool:
    """Whether anything is carried: the places inside a sublayer have a cache only where there is a local mixer."""
    return any(local is not None for local in cache) if isinstance(cache, Places) else cache is not None
