"""A model as the numbers that the planner's formulas multiply: read off its declared costs, plain data, ready for JSON.

Every count of a model is made of few numbers: what grows with tokens, what grows with visible pairs of tokens, what is
there once. They are the same for all lengths and batches, so formulas over them run anywhere, a browser included.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Literal

import torch

from twoaxis.core.cost import Cost, Shape
from twoaxis.core.site import Site
from twoaxis.depth import DepthConfig
from twoaxis.model.cost import norm_cost
from twoaxis.planner.eager import EagerDepth, Kernels, eager_depth
from twoaxis.planner.model.part import Part
from twoaxis.planner.model.shape import ModelShape
from twoaxis.planner.precision import Precision

LONG = 2048
"""Tokens behind which activations are taken to grow evenly: engines that pad short sequences pad no more."""

DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}

Engine = Literal["fused", "eager"]
"""What runs the depth operations: one kernel for each read and write, or one for each operation of PyTorch."""

Data = dict[str, Any]


def coefficients(model: ModelShape, precision: Precision | None = None, engine: Engine = "fused") -> Data:
    """The numbers behind every count of a model.

    Args:
        model: the model.
        precision: bytes of one number of each sort.
        engine: that depth operations run on; only `eager` counts their kernels, which takes a moment.

    Returns:
        `d_model`, `vocab_size`, `tied`, bytes of each sort of number; `sublayers`, in order, with

        * `params`; `routed`: [experts, used by a token, parameters of one] or nothing;
        * FLOPs of one forward pass: `matmul` and `elementwise` per token; `pairs`: [FLOPs, window] per visible pair, 0 for no
          window;
        * `local`: [local mixers inside it, bytes per token that they write];
        * `saved`: bytes kept by autograd per token, with the input and the norm; `cache`: [bytes, tokens] per token up to so
          many, 0 for no bound; `cache_fixed`: bytes per sequence;
        * `depth`: the same of the depth operation, with `weights` (parameters that it reads, whoever counts them), `read`,
          `written` (the least traffic, bytes per token), `eager` and `eager_back`: [kernels, bytes per token, bytes once],
          with this engine;

        `ends`: as `depth`, of both ends of the stack, with `lent` (parameters of theirs that sublayers use, so that every
        pipeline rank holds them); `leaves`: [first boundary, last boundary, bytes per token, kept] of every tensor of the
        depth state, where boundary i lies before sublayer i.
    """
    precision = precision or Precision()
    stack, depth = model.stack, model.depth
    dtype = DTYPES.get(precision.activations, torch.bfloat16)
    operations = eager_depth(depth, stack, dtype) if engine == "eager" else (None,) * (stack.n_sublayers + 1)
    sublayers = [
        _sublayer(model, site, part, operations[site.index], precision)
        for site, part in zip(stack.sites, model.parts, strict=True)
    ]
    flow, norm = depth.ends_flow(stack), norm_cost(model.norm, model.d_model, Shape(1, 1))
    ends = _depth(lambda shape: depth.ends_cost(stack, shape), operations[-1], precision)
    between = flow.views.bytes(precision.activations) + model.d_model * precision.activations * flow.keeps_update
    ends["saved"] += between
    ends["lent"] = ends["params"] if any(depth.cost(site, Shape(1, 1)).shared_params for site in stack.sites) else 0
    ends["weights"] -= ends["lent"]
    return {
        "name": model.name,
        "depth_kind": depth.kind,
        "d_model": model.d_model,
        "vocab_size": model.vocab_size,
        "tied": int(model.tie_embeddings),
        "n_layers": model.n_layers,
        "norm_params": norm.params,
        "norm_elementwise": norm.elementwise_flops,
        **{f"{name}_bytes": value for name, value in precision.to_data().items()},
        "sublayers": sublayers,
        "ends": ends | _moved(flow.read.bytes(precision.activations), flow.written.bytes(precision.activations)),
        "leaves": leaves(depth, model, precision.activations),
    }


def coefficients_of_both_forms(
    model: ModelShape, precision: Precision | None = None, engine: Engine = "fused"
) -> tuple[Data, Data]:
    """The numbers of a model as it trains and reads prompts, and as it generates; mostly the same."""
    numbers, generating = coefficients(model, precision, engine), model.in_generation()
    return numbers, numbers if generating.parts == model.parts else coefficients(generating, precision, engine)


def leaves(depth: DepthConfig, model: ModelShape, element_bytes: int) -> list[list[int]]:
    """[first boundary, last boundary, bytes per token, kept] of every tensor of the depth state."""
    stack, found = model.stack, {}
    for index in range(stack.n_sublayers + 1):
        for leaf in depth.state(stack, index):
            first = found[leaf.name][0] if leaf.name in found else index
            found[leaf.name] = [first, index, leaf.numbers.bytes(element_bytes), int(leaf.kept)]
    return list(found.values())


def _sublayer(model: ModelShape, site: Site, part: Part, operation: EagerDepth | None, precision: Precision) -> Data:
    depth, routed = model.depth, part.routed
    norms = 3 if depth.splits_views(site) else 1
    flow = depth.flow(site)
    views = flow.views.bytes(precision.activations)
    update = model.d_model * precision.activations * flow.keeps_update
    own = _part(part, site, model.d_model, precision)
    return {
        "block": site.block,
        "kind": part.kind,
        "routed": [routed.experts, routed.used, routed.params] if routed else [],
        **own,
        "norms": norms,
        # The context that the mixer keeps, and one statistic per norm.
        "saved": own["saved"]
        + norms * (model.d_model * precision.activations + max(4, precision.activations))
        + views
        + update,
        "depth": _depth(lambda shape: depth.cost(site, shape), operation, precision)
        | _moved(flow.read.bytes(precision.activations), flow.written.bytes(precision.activations)),
    }


@lru_cache(maxsize=4096)
def _part_numbers(part: Part, site: Site, element_bytes: int, cache_bytes: int) -> tuple[tuple[str, Any], ...]:
    one, channels = part.cost(site, Shape(1, 1, element_bytes)), part.local_channels(site)

    def of(name: str, width: int) -> Callable[[int], int]:
        return lambda tokens: getattr(part.cost(site, Shape(1, tokens, width)), name)

    saved = _line(of("saved_bytes", element_bytes), LONG)
    flops = of("pair_flops", element_bytes)
    pairs = _steps(lambda tokens: flops(tokens) - flops(tokens - 1) if tokens else 0, part.windows)
    cache = of("cache_bytes", cache_bytes)
    return (
        ("params", one.params),
        ("matmul", one.matmul_flops),
        ("elementwise", one.elementwise_flops),
        ("pairs", pairs),
        ("saved", saved[0]),
        ("saved_fixed", saved[1]),
        ("cache", _steps(cache, part.windows)),
        ("cache_fixed", cache(0)),
        ("local", (len(channels), sum(channels) * element_bytes)),
    )


def _part(part: Part, site: Site, d_model: int, precision: Precision) -> Data:
    return {name: _plain(value) for name, value in _part_numbers(part, site, precision.activations, precision.cache)}


def _depth(cost: Callable[[Shape], Cost], operation: EagerDepth | None, precision: Precision) -> Data:
    """The numbers of a depth operation; everything in it is a line in the tokens."""
    width = precision.activations
    one, saved = cost(Shape(1, 1, width)), _line(lambda tokens: cost(Shape(1, tokens, width)).saved_bytes, 1)
    matmul = _line(lambda tokens: cost(Shape(1, tokens, width)).matmul_flops, 1)
    far = cost(Shape(1, LONG, precision.cache)).cache_bytes
    return {
        "params": one.params,
        "weights": one.params + one.shared_params,
        "matmul": matmul[0],
        "matmul_fixed": matmul[1],
        "elementwise": one.elementwise_flops,
        "saved": saved[0],
        "saved_fixed": saved[1],
        # A depth mixer remembers a few tokens at most.
        "cache_fixed": far,
    } | ({} if operation is None else {"eager": _counts(operation.forward), "eager_back": _counts(operation.backward)})


def _counts(kernels: Kernels) -> list[int]:
    return [kernels.count, kernels.bytes_per_token, kernels.fixed_bytes]


def _moved(read: int, written: int) -> Data:
    return {"read": read, "written": written}


def _line(function: Callable[[int], int], at: int) -> tuple[float, float]:
    """Slope and intercept of what is a line from `at` on."""
    slope = (function(2 * at) - function(at)) / at
    return slope, function(at) - slope * at


def _steps(function: Callable[[int], int], windows: Sequence[int]) -> tuple[tuple[float, int], ...]:
    """A function with f(n) - f(n - 1) constant between windows, as [amount per token, tokens up to which it grows].

    Example:
        >>> _steps(lambda n: 5 * n + 2 * min(n, 4), (4,))
        ((2, 4), (5, 0))
    """
    edges = [0, *sorted(windows)]
    slopes = [function(edge + 1) - function(edge) for edge in edges]
    found = [(a - b, edge) for a, b, edge in zip(slopes, slopes[1:], edges[1:], strict=False) if a != b]
    return (*found, *(((slopes[-1], 0),) if slopes[-1] else ()))


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, tuple) else value
