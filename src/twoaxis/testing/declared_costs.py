"""Checks of declared costs against measured ones: equal, not close."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from twoaxis.core.cost import Cost, Shape
from twoaxis.core.layout import TokenLayout
from twoaxis.depth import DepthConfig
from twoaxis.local.places import PlacesConfig
from twoaxis.ops.local_attention import visible
from twoaxis.sequence import SequenceConfig
from twoaxis.testing.conformance import check, exactly
from twoaxis.testing.measured import product_flops, read_and_write, sublayer_list, tensors, trace
from twoaxis.testing.toy import (
    D_MODEL,
    TOKENS,
    MixerConfig,
    odd_width,
    toy_context,
    toy_cost,
    toy_decoder,
    toy_layout,
    toy_mixer,
    toy_site,
    toy_tokens,
)

BYTES = 8
"""Bytes of a float64 number."""


@check
def depth_params_are_exact(config: DepthConfig) -> None:
    """Every sublayer and the two ends have exactly the declared parameters."""
    for width in (D_MODEL, odd_width(config)):
        model = toy_decoder(config, d_model=width)
        stack, shape = model.config.stack, Shape(2, TOKENS, BYTES)
        for site, sublayer in zip(stack.sites, sublayer_list(model), strict=True):
            exactly(f"parameters of sublayer {site.index}", _count(sublayer.depth), config.cost(site, shape).params)
        exactly("parameters of the ends", _count(model.ends), config.ends_cost(stack, shape).params)


@check
def depth_flops_are_exact(config: DepthConfig) -> None:
    """Reads and writes run exactly the declared multiply-adds in matrix products."""
    for name, declared, run in _parts(config):
        exactly(f"matrix product flops of {name}", product_flops(run)[0], declared.matmul_flops)


Run = Callable[[], list[Tensor]]
"""One part of a pass; returns its parameters, inputs and outputs."""


def _parts(config: DepthConfig, dtype: torch.dtype = torch.float64) -> list[tuple[str, Cost, Run]]:
    """(name, declared cost, run) of every sublayer and of the ends."""
    model, tokens = toy_decoder(config, dtype=dtype), toy_tokens()
    run = trace(model, tokens)
    stack, shape = model.config.stack, Shape(tokens.shape[0], tokens.shape[1], dtype.itemsize)
    parameters = list(model.parameters())
    parts: list[tuple[str, Cost, Run]] = []
    for site, sublayer in zip(stack.sites, sublayer_list(model), strict=True):
        inputs = (run.states[site.index], run.updates[site.index], run.contexts[site.index], run.heads[site.index], run.layout)

        def one(mixer: Any = sublayer.depth, inputs: Any = inputs) -> list[Tensor]:
            return [*parameters, *tensors((inputs, read_and_write(mixer, *inputs)))]

        parts.append((f"sublayer {site.index}", config.cost(site, shape), one))

    def enter_and_leave() -> list[Tensor]:
        embeddings = model.embed(tokens)
        ends = (model.ends.enter(embeddings)[0], model.ends.leave(run.states[-1])[0])
        return [*parameters, tokens, embeddings, *tensors((run.states[-1], *ends))]

    return [*parts, ("the ends", config.ends_cost(stack, shape), enter_and_leave)]


@check
def mixer_costs_are_exact(config: MixerConfig) -> None:
    """Parameters, products with weights, and products over exactly the visible pairs are as declared."""
    for width in sorted({D_MODEL, odd_width(config)}):
        mixer, pair_flops = toy_mixer(config, d_model=width), _pair_flops(config, width)
        exactly("parameters", _count(mixer), toy_cost(config, Shape(1, 1, BYTES), d_model=width).params)
        for batch, tokens in ((1, 1), (2, TOKENS), (1, 40)):
            declared = toy_cost(config, Shape(batch, tokens, BYTES), d_model=width)
            products, pairs = _measured(mixer, toy_context(batch, tokens, width))
            exactly(f"matrix product flops of {batch} x {tokens} tokens", products - pairs, declared.matmul_flops)
            expected = pair_flops(Shape(batch, tokens, BYTES))
            exactly(f"pair flops of {batch} x {tokens} tokens", expected, declared.pair_flops)


def _measured(mixer: Any, context: Tensor, layout: TokenLayout | None = None, cache: Any = None) -> tuple[int, int]:
    layout = layout or toy_layout(context)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        return product_flops(lambda: mixer(context, layout, cache))


def _pair_flops(config: MixerConfig, width: int) -> Callable[[Shape], int]:
    """Measured FLOPs of one query and its own key, and of one more key, times those that the declared window leaves visible."""
    # Places have their own windows; the checks of local mixers compare their declarations with measurements.
    own = config.without_local() if isinstance(config, PlacesConfig) else config
    window = own.pair_window if isinstance(own, SequenceConfig) else own.receptive_field
    mixer = toy_mixer(own, d_model=width)
    alone = _measured(mixer, toy_context(1, 1, width))[1]
    second = _second(mixer, width) - alone

    def expected(shape: Shape) -> int:
        inside = config.local_cost(toy_site(width), shape).pair_flops if isinstance(config, PlacesConfig) else 0
        earlier = int(visible(shape.tokens, shape.tokens, window).sum()) - shape.tokens
        return shape.batch * (shape.tokens * alone + earlier * second) + inside

    return expected


def _second(mixer: Any, width: int) -> int:
    """Measured FLOPs of a token behind one other, in products between activations."""
    context = toy_context(1, 2, width)
    with torch.no_grad():
        _, cache = mixer(context[:, :1], toy_layout(context[:, :1]), mixer.new_cache())
    return _measured(mixer, context[:, 1:], toy_layout(context[:, 1:], start=1), cache)[1]


def _count(module: Any) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
