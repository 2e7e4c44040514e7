"""Toy models: float64, width 8, three layers, or two that mix nothing along depth; perturbed, so that no zero hides a fault.

Letters: B batch, T position, D width.
"""

import contextlib
import copy
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from twoaxis.core.cost import Cost, Shape
from twoaxis.core.errors import ConfigError
from twoaxis.core.layout import TokenLayout
from twoaxis.core.measure import noise, perturb
from twoaxis.core.parameters import initialise
from twoaxis.core.position import LayerStack, SublayerPosition
from twoaxis.depth import DepthConfig, ResidualConfig
from twoaxis.feed_forward import FeedForwardConfig, SwiGLUConfig
from twoaxis.local import LocalConfig
from twoaxis.model import Decoder, DecoderConfig
from twoaxis.sequence import AttentionConfig, SequenceConfig

AxisConfig = DepthConfig | SequenceConfig | FeedForwardConfig | LocalConfig
MixerConfig = SequenceConfig | FeedForwardConfig | LocalConfig

D_MODEL = 8
ODD_WIDTH = 7
N_LAYERS = 3
VOCAB = 11
TOKENS = 9
LOWEST_ID = 3

ATTENTION = AttentionConfig(n_heads=2, head_dim=4)
FEED_FORWARD = SwiGLUConfig(d_ff=16)


def odd_width(config: AxisConfig) -> int:
    """A width that is no power of two: `ODD_WIDTH`, or the smallest multiple of it that the mixer takes."""
    for width in range(ODD_WIDTH, 8 * ODD_WIDTH, ODD_WIDTH):
        with contextlib.suppress(ConfigError):
            return decoder_config(config, d_model=width).d_model
    return ODD_WIDTH


def decoder_config(config: AxisConfig, **changes: Any) -> DecoderConfig:
    """A small decoder around a mixer of any axis; blocks open with a sequence mixer and close with a feed-forward.

    A local mixer is at every place: in all sublayers, and behind the embedding.
    """
    depth: DepthConfig = ResidualConfig()
    # A layer between the first and the last one matters to what mixes along depth.
    layers = N_LAYERS if isinstance(config, DepthConfig) else 2
    sequence: SequenceConfig = ATTENTION
    feed_forward: FeedForwardConfig = FEED_FORWARD
    if isinstance(config, DepthConfig):
        depth = config
    elif isinstance(config, SequenceConfig):
        sequence = config
    elif isinstance(config, FeedForwardConfig):
        feed_forward = config
    else:
        places = {"input_local": config, "projected_local": config, "update_local": config}
        sequence, feed_forward = sequence.replace(**places), feed_forward.replace(**places)
        changes = {"embedding_local": config, **changes}
    # Small embeddings, so that the updates of mixers are not negligible.
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "d_model": D_MODEL, "n_layers": layers, "max_seq_len": 4096}
    sizes["embedding_std"] = 0.02
    return DecoderConfig(**{**sizes, "depth": depth, "blocks": ((sequence, feed_forward),), **changes})


def toy_decoder(
    config: AxisConfig, *, perturbed: bool = True, dtype: torch.dtype = torch.float64, seed: int = 0, **changes: Any
) -> Decoder:
    """Builds that decoder, by default away from its initial values."""
    wanted = decoder_config(config, **changes)
    if not perturbed:
        return Decoder.build(wanted, seed).to(dtype)
    return _twin(_perturbed_decoder(wanted, dtype, seed))  # type: ignore[arg-type]


@lru_cache(maxsize=32)
def _perturbed_decoder(config: DecoderConfig, dtype: torch.dtype, seed: int) -> Decoder:
    """Kept, for the checks of one mixer need the same few over and over."""
    return perturb(Decoder.build(config, seed).to(dtype))


def _twin(model: Decoder) -> Decoder:
    """A deep copy, several times as fast: most of what modules hold is empty tables of hooks, and values that never change."""
    memo: dict[int, Any] = {}
    # Children come first, so that the table that holds them finds their twins.
    for module in reversed(list(model.modules())):
        if id(module) in memo:
            continue
        # Some modules of other libraries have a `__new__` of their own.
        twin = memo[id(module)] = object.__new__(module.__class__)
        for name, value in vars(module).items():
            empty = isinstance(value, dict) and not value
            vars(twin)[name] = value.copy() if empty or name == "declarations" else copy.deepcopy(value, memo)
    return memo[id(model)]


def toy_mixer(config: MixerConfig, *, d_model: int = D_MODEL, dtype: torch.dtype = torch.float64) -> Any:
    """Builds one mixer alone, with perturbed values."""
    mixer: Any = (
        config.build(d_model, toy_site(d_model)) if isinstance(config, LocalConfig) else config.build(toy_site(d_model))
    )
    initialise(mixer, 0)
    return perturb(mixer.to(dtype))


def toy_site(d_model: int = D_MODEL) -> SublayerPosition:
    """The first sublayer of three blocks of two."""
    return LayerStack(d_model, 1e-6, (2,) * N_LAYERS, vocab_size=VOCAB).sites[0]


def toy_cost(config: MixerConfig, shape: Shape, *, d_model: int = D_MODEL) -> Cost:
    """The declared cost of that mixer."""
    site = toy_site(d_model)
    return config.cost(d_model, site, shape) if isinstance(config, LocalConfig) else config.cost(site, shape)


@torch.no_grad()
def hostile_initialisation(model: nn.Module) -> None:
    """Overwrites every nn.Linear and nn.Embedding, as many host models do."""
    names = {module: name for name, module in model.named_modules()}

    def overwrite(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            fresh = noise(tuple(module.weight.shape), f"host/{names[module]}")
            module.weight.copy_(0.5 * fresh)
            if isinstance(module, nn.Linear) and module.bias is not None:
                module.bias.zero_()

    model.apply(overwrite)


def toy_tokens(batch: int = 2, tokens: int = TOKENS, seed: int = 0) -> Int[Tensor, "B T"]:
    """Token ids from a seed."""
    return torch.randint(VOCAB, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def other_tokens(tokens: Int[Tensor, "*n"]) -> Int[Tensor, "*n"]:
    """Tokens of the same shape that differ everywhere."""
    return (tokens + 1 + torch.arange(tokens.shape[-1]) % (VOCAB - 2)) % VOCAB


def toy_layout(context: Float[Tensor, "B T D"], start: int = 0) -> TokenLayout:
    """Rows of one document each from an absolute position on, with the ids that every layout has at these positions."""
    return with_toy_ids(TokenLayout.contiguous(context.shape[1], start), context.shape[0])


def with_toy_ids(layout: TokenLayout, batch: int) -> TokenLayout:
    """The layout with token ids, for mixers that look tokens up; a token of the same position has the same id in every call.

    Ids below `LOWEST_ID` may be special, and do not occur.
    """
    drawn = _toy_ids()
    return layout.of(drawn[layout.positions % len(drawn)].expand(batch, -1))


@lru_cache(maxsize=1)
def _toy_ids() -> Int[Tensor, "positions"]:
    return torch.randint(LOWEST_ID, VOCAB, (4096,), generator=torch.Generator().manual_seed(0))


def toy_context(batch: int = 2, tokens: int = TOKENS, d_model: int = D_MODEL, name: str = "context") -> Float[Tensor, "B T D"]:
    """Inputs of one mixer."""
    return noise((batch, tokens, d_model), name)


class TooSteep(torch.autograd.Function):
    """The identity with a gradient that is 1% too large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Returns a copy."""
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        """Returns 1.01 times the gradient."""
        return grad_outputs[0] * 1.01
