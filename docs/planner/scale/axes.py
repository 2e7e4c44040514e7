"""The same read along depth and along positions: equal operators, and what each asks of a system."""

from typing import Any

from planner.scale.cases import Case, case
from planner.scale.compute import numbers_of_model, serving_row, shape_of, training_row
from twoaxis.depth import DEPTH
from twoaxis.planner.coefficients import Data
from twoaxis.planner.formulas.collectives import hop_bytes
from twoaxis.planner.formulas.counts import cache_bytes_of, forward_counts, parameter_counts, state_bytes
from twoaxis.planner.formulas.roofline import mixer_operators
from twoaxis.planner.formulas.training_step import edges_of, work_of
from twoaxis.planner.model.shape import ModelShape
from twoaxis.sequence import SEQUENCE

SHAPE, TOKENS, WINDOW = "dense-7b", 2**13, 8

Row = dict[str, Any]


def axes() -> list[Row]:
    """One row for each operator on the shape of 7B, as what it adds to the residual stream.

    Returns:
        `operator`, `axis`; per token of one forward pass over the whole stack: `params` (once), `flops`, `traffic_bytes`;
        per token at the worst stage boundary: `cached_bytes` and `naive_bytes`; `halo_bytes`: what the first token behind a
        cut of the sequence asks of the part before it, once for each cut; `cache_bytes`: kept from token to token in
        generation; `passing_bytes`: the most state while a token passes; overheads of `training` and `generation`.
    """
    at, plain = case(SHAPE, TOKENS), shape_of(SHAPE)
    control = numbers_of_model(plain)
    return [
        {"operator": name, "axis": axis} | _row(at, numbers_of_model(model), control) for name, axis, model in _operators(plain)
    ]


def _operators(plain: ModelShape) -> list[tuple[str, str, ModelShape]]:
    depth = DEPTH.parse({"kind": "depth_attention", "window": WINDOW})
    short = {"kind": "short_swa", "window": WINDOW}
    usual = SEQUENCE.parse(short | {"n_heads": plain.d_model // 128, "head_dim": 128})
    # The heads of the depth read, which stands once in every block too.
    equal = SEQUENCE.parse(short | {"n_heads": 4, "n_kv_heads": 4, "head_dim": plain.d_model // 4})
    return [
        ("AttnRes full", "depth", plain.with_depth(DEPTH.parse("attention_residuals"))),
        (f"Depth ShortSWA w={WINDOW}", "depth", plain.with_depth(depth)),
        (f"ShortSWA w={WINDOW}, equal heads", "sequence", plain.with_sublayer(equal)),
        (f"ShortSWA w={WINDOW}, one kv-head", "sequence", plain.with_sublayer(usual)),
    ]


def _row(at: Case, pair: tuple[Data, Data], control: tuple[Data, Data]) -> Row:
    numbers, plain = pair[0], control[0]

    def added(count: Any) -> float:
        return count(numbers) - count(plain)

    run = at.run(at.training())
    # The halo and the cache of a window hold the same: the keys and values of w - 1 tokens in every layer.
    cache = added(lambda each: cache_bytes_of(each, at.tokens, 1))
    return {
        "params": added(lambda each: parameter_counts(each)["all"]),
        "flops": added(lambda each: forward_counts(each, 1, at.tokens)["all"]) / at.tokens,
        "traffic_bytes": added(lambda each: _traffic(each, run)),
        "cached_bytes": added(lambda each: max(hop_bytes(each["leaves"], edges_of(each, run), run["pipeline"], "cached"))),
        "naive_bytes": added(lambda each: max(hop_bytes(each["leaves"], edges_of(each, run), run["pipeline"], "naive"))),
        "halo_bytes": cache,
        "cache_bytes": cache,
        "passing_bytes": added(lambda each: max(state_bytes(each, index) for index in range(len(each["sublayers"]) + 1))),
        "training": training_row(at, numbers, plain)["overhead"],
        "generation": serving_row(at, pair[1], control[1])["generation"],
    }


def _traffic(numbers: Data, run: Data) -> float:
    """Bytes per token that depth operations and mixers move in one forward pass on one rank that holds everything."""
    work = work_of(run) | {"batch": 1, "tensor": 1, "sequence": "none"}
    total = 0.0
    for sublayer in numbers["sublayers"]:
        moved = sum(operation["bytes"] for operation in mixer_operators(numbers, sublayer, work))
        total += moved / work["tokens"] + sublayer["depth"]["read"] + sublayer["depth"]["written"]
    return total
