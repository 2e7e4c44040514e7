"""A model as the numbers that the planner's formulas multiply: declared FLOPs and measured bytes, plain data, ready for JSON.

Every count of a model has three parts: per token, per visible pair of tokens, and constant. The coefficients hold for all
lengths and batches, so formulas over them also run in a browser.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Literal

import torch

from twoaxis.core.cost import Cost, Shape
from twoaxis.core.position import SublayerPosition
from twoaxis.depth.base import build_stack
from twoaxis.ledger.lines import depth_lines, part_lines
from twoaxis.model.cost import behind_embedding_cost, factor_cost, norm_cost, norms_before
from twoaxis.planner.model.part import Part, count_matrices
from twoaxis.planner.model.shape import ModelShape
from twoaxis.planner.quantities import Precision

Engine = Literal["fused", "eager"]
"""The engine of depth operations: one kernel for each read and write, or one for each operation of PyTorch."""

MOMENT_BYTES = 4
"""Of a second moment, which Muon does not keep, in float32."""

Data = dict[str, Any]


def coefficients(model: ModelShape, precision: Precision | None = None, engine: Engine = "fused") -> Data:
    """Returns the coefficients of every count of a model.

    Args:
        model: the model.
        precision: bytes per number.
        engine: of depth operations; only `eager` counts their kernels, which takes seconds.

    Returns:
        `d_model`, `vocab_size`, `tied`, bytes per number; `sublayers`, in order, with

        * `params`, `tables` of them in tables of tokens, `matrices` of them updated by Muon (0 without it, as in `depth` and
          `ends`); `routed`: [experts, used by a token, parameters of one] or nothing;
        * FLOPs of one forward pass: `matmul` and `elementwise` per token; `pairs`: [FLOPs, window] per visible pair, 0 for no
          window;
        * `local`: [local mixers inside it, bytes per token that they write];
        * `saved`: bytes kept by autograd per token, with the input and the norm; `cache`: [bytes, tokens] per token up to so
          many, 0 for no bound; `cache_fixed`: bytes per sequence;
        * `depth`: the same of the depth operation, with `weights` (parameters that it reads, shared ones included, and without
          tables, of which a token reads one row), `read`, `written` (the least traffic, bytes per token), `eager` and
          `eager_back`: [kernels, bytes per token, bytes once], with this engine;

        `ends`: as `depth`, of both ends of the stack, with `lent` (parameters of theirs that sublayers use, so that every
        pipeline rank holds them); `leaves`: [first boundary, last boundary, bytes per token, kept] of every tensor of the
        depth state, where boundary i lies before sublayer i.
    """
    precision = precision or Precision()
    stack, depth = model.stack, model.depth
    found = depth_lines(model, precision.activations, precision.cache, kernels=engine == "eager")
    sublayers = [
        _sublayer(model, site, part, measured, precision)
        for site, part, measured in zip(stack.sites, model.parts, found["sublayers"], strict=True)
    ]
    norm = norm_cost(model.norm, model.d_model, Shape(1, 1))
    *mixers, of_ends = _depth_matrices(model)
    for sublayer, matrices in zip(sublayers, mixers, strict=True):
        sublayer["depth"]["matrices"] = matrices
    ends = _depth(lambda shape: _ends_cost(model, shape), found["ends"])
    ends["saved"] += found["ends"]["handed_over"] + found["embedding_saved"]
    ends["lent"] = ends["params"] if any(depth.cost(site, Shape(1, 1)).shared_params for site in stack.sites) else 0
    ends["weights"] -= ends["lent"]
    ends["matrices"] = of_ends
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
        "moment_bytes": MOMENT_BYTES,
        "sublayers": sublayers,
        "ends": ends,
        "leaves": found["leaves"],
    }


def coefficients_of_both_forms(
    model: ModelShape, precision: Precision | None = None, engine: Engine = "fused"
) -> tuple[Data, Data]:
    """Returns the coefficients in training and prefill, and those in generation; most models have the same."""
    numbers, generating = coefficients(model, precision, engine), model.in_generation()
    return numbers, numbers if generating.parts == model.parts else coefficients(generating, precision, engine)


def _sublayer(model: ModelShape, site: SublayerPosition, part: Part, measured: Data, precision: Precision) -> Data:
    depth, routed = model.depth, part.routed
    own = _part(part, site, precision)
    if measured["heads_saved"]:
        own["saved"], own["saved_fixed"] = measured["heads_saved"]
    own["elementwise"] += factor_cost(site.stack.update_scale, model.d_model, Shape(1, 1)).elementwise_flops
    return {
        "block": site.block,
        "kind": part.kind,
        "routed": [routed.experts, routed.used, routed.params] if routed else [],
        **own,
        "matrices": part.matrices(site) if model.optimizer == "muon" else 0,
        "norms": norms_before(depth, site),
        # With the context that the mixer saves, and the statistics of its norms.
        "saved": own["saved"] + measured["handed_over"],
        "depth": _depth(lambda shape: depth.cost(site, shape), measured),
    }


def _ends_cost(model: ModelShape, shape: Shape) -> Cost:
    cost = model.depth.ends_cost(model.stack, shape) + behind_embedding_cost(model, shape)
    return cost + factor_cost(model.logit_scale, model.d_model, shape)


def _depth_matrices(model: ModelShape) -> list[int]:
    """Numbers in matrices of each depth mixer and of the ends, as far as Muon updates them; shared ones count once.

    A local mixer behind the embedding counts with the ends.
    """
    stack, local = model.stack, model.embedding_local
    if model.optimizer != "muon":
        return [0] * (stack.n_sublayers + 1)
    with torch.device("meta"):
        mixers, ends = build_stack(model.depth, stack)
        behind = local and local.build(model.d_model, stack.sites[0])
    *of_mixers, of_ends = (count_matrices(module) for module in (*mixers, ends))
    return [*of_mixers, of_ends + (0 if behind is None else count_matrices(behind))]


@lru_cache(maxsize=4096)
def _part_numbers(part: Part, site: SublayerPosition, element_bytes: int, cache_bytes: int) -> tuple[tuple[str, Any], ...]:
    one, channels = part.cost(site, Shape(1, 1, element_bytes)), part.local_channels(site)

    def flops(tokens: int) -> int:
        return part.cost(site, Shape(1, tokens, element_bytes)).pair_flops

    # A mixer may cache the last token alone, and count its own key otherwise than earlier ones.
    windows = tuple(sorted({1, *part.windows}))
    asked = tuple(sorted({n for edge in (0, *windows) for n in (edge, edge + 1)}))
    measured = part_lines(part, site, element_bytes, cache_bytes, asked)
    caches = dict(zip(asked, measured["caches"], strict=True))
    return (
        ("params", one.params),
        ("tables", one.table_params),
        ("matmul", one.matmul_flops),
        ("elementwise", one.elementwise_flops),
        ("pairs", _steps(lambda tokens: flops(tokens) - flops(tokens - 1) if tokens else 0, windows)),
        ("saved", measured["saved"][0]),
        ("saved_fixed", measured["saved"][1]),
        ("cache", _steps(caches.__getitem__, windows)),
        ("cache_fixed", caches[0]),
        ("local", (len(channels), sum(channels) * element_bytes)),
    )


def _part(part: Part, site: SublayerPosition, precision: Precision) -> Data:
    return {name: _plain(value) for name, value in _part_numbers(part, site, precision.activations, precision.cache)}


def _depth(cost: Callable[[Shape], Cost], measured: Data) -> Data:
    """The coefficients of a depth operation, whose counts are linear in the tokens."""
    one = cost(Shape(1, 1))
    matmul = _line(lambda tokens: cost(Shape(1, tokens)).matmul_flops, 1)
    return {
        "params": one.params,
        "tables": one.table_params,
        "weights": one.params + one.shared_params - one.table_params,
        "matmul": matmul[0],
        "matmul_fixed": matmul[1],
        "elementwise": one.elementwise_flops,
        "saved": measured["saved"][0],
        "saved_fixed": measured["saved"][1],
        # A depth mixer caches a few tokens at most.
        "cache_fixed": measured["cache"],
        **{name: measured[name] for name in ("read", "written", "eager", "eager_back") if name in measured},
    }


def _line(function: Callable[[int], int], at: int) -> tuple[float, float]:
    """Slope and intercept of a function that is linear from `at` on."""
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
