"""Companions: arms generated to rule out other explanations of a difference.

Each isolates one cause: static weights the dependence on the input, write-only the erasure, an unmixed mixer the mixing of
streams, a wider plain stream their number, wider feed-forwards the number of parameters, a softmax temperature and norms of
queries and keys the scale of scores, residual scalars everything beyond two learned scalars, ShortSWA at equal cost the axis
along which it is spent.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Literal, NamedTuple

from twoaxis.model import DecoderConfig
from twoaxis.study.design.rules import CompanionKind, CompanionMatch
from twoaxis.study.planning.equal_cost import CostOfStep, closest, closest_in_order, flops_per_step, parameters, vocab_size
from twoaxis.study.report_data import ChangeData
from twoaxis.train.recipe import TrainConfig

SWA_WINDOW = 16
"""Window of a generated ShortSWA in tokens: short, as in the note that proposes it."""

SWA_HEADS = (1, 2, 4)
SWA_HEAD_DIMS = (4, 8, 16, 32, 64)

WIDTHS = range(2, 257, 2)
"""Channels that a wider plain stream may add to the control's."""

FINE = 128
"""Steps in which feed-forwards widen to twice their width, and hidden numbers that are added one by one."""

LARGEST_ERROR = 0.5
"""Largest deviation of a companion's extra cost from the arm's, as a fraction."""


class Companion(NamedTuple):
    """A generated arm.

    Attributes:
        kind: of companion.
        why: its purpose in one line.
        recipe: with the steps of its arm.
        matched: the cost that equals the arm's; "" for none.
        size: key of the chosen size, its value in the control, and its value here.
    """

    kind: CompanionKind
    why: str
    recipe: TrainConfig
    matched: CompanionMatch | Literal[""] = ""
    size: tuple[str, Any, Any] = ("", None, None)

    def name(self, arm: str) -> str:
        """A name that no arm of a design can have; the arm "" means all arms."""
        return f"{arm}~{self.kind}" + (f"@{self.matched}" if self.matched else "")

    def changes(self, arm: str, wanted: float, got: float) -> tuple[ChangeData, ...]:
        """The choice of the size that matches the arm, for the report."""
        if not self.matched:
            return ()
        path, before, after = self.size
        return (ChangeData(path=path, before=before, after=after, of=self.matched, to=arm, wanted=wanted, got=got),)


class Sized(NamedTuple):
    """A candidate for a companion: key of its size, value in the control, value here, recipe."""

    path: str
    before: Any
    after: Any
    recipe: TrainConfig


class Sizes(NamedTuple):
    """The candidates for a companion, cheapest first, each built when it is asked for.

    Attributes:
        total: number of them.
        at: makes a candidate from its number.
    """

    total: int
    at: Callable[[int], Sized]

    def all(self) -> list[Sized]:
        """All candidates."""
        return [self.at(number) for number in range(self.total)]


WHY: Mapping[CompanionKind, str] = {
    "static_weights": "sums over depth with weights that do not depend on the input",
    "write_only": "the same write without the erasure before it",
    "unmixed": "the same mixer with its mixing off: streams that are never mixed, or plain attention",
    "softmax_temperature": "the same read with another softmax temperature of each head",
    "qk_norm": "the same read with the other choice of norms of queries and keys",
    "wider_stream": "the extra cost spent on a wider plain stream instead",
    "wider_feed_forward": "the extra parameters spent on wider feed-forwards instead",
    "residual_scalars": "learned scalars on the stream and on the embedding: the cheap baseline to beat",
    "short_swa": "the extra cost spent on ShortSWA along positions instead",
}


def unmatched_companions(kinds: Sequence[CompanionKind], recipe: TrainConfig, control: TrainConfig) -> Iterator[Companion]:
    """Generates the companions of an arm that are not matched by cost."""
    controls = recipe.decoder(vocab_size(recipe)).depth.controls()
    other: dict[CompanionKind, Mapping[str, Any] | None] = {
        "static_weights": controls.static,
        "write_only": controls.write_only,
        "unmixed": controls.unmixed,
        "softmax_temperature": controls.temperature,
        "qk_norm": controls.qk_norm,
    }
    for kind, depth in other.items():
        if kind in kinds and depth is not None:
            yield Companion(kind, WHY[kind], _with_model(recipe, depth=dict(depth)))
    if "residual_scalars" in kinds:
        yield Companion("residual_scalars", WHY["residual_scalars"], _with_model(control, depth={"kind": "residual_scalars"}))


def matched_companion(
    kind: CompanionKind,
    arm: TrainConfig,
    control: TrainConfig,
    sizes: Sizes,
    cost: CostOfStep,
    unit: CompanionMatch,
) -> Companion | str:
    """Returns the companion that costs as much as an arm, or the reason why none of the sizes does."""
    extra = cost(arm) - cost(control)

    def cost_of_size(number: int) -> float:
        return cost(sizes.at(number).recipe)

    if not sizes.total:
        return f"no {kind} at equal {unit}: the control has nothing to widen"
    if unit == "seconds":
        number = closest(range(sizes.total), cost_of_size, cost(arm))
    else:
        allowed = LARGEST_ERROR * extra if extra > 0 else math.inf
        number = closest_in_order(sizes.total, cost_of_size, cost(arm), allowed) or 0
    best, got = sizes.at(number), cost_of_size(number) - cost(control)
    if extra <= 0 or abs(got - extra) > LARGEST_ERROR * extra:
        return (
            f"no {kind} at equal {unit}: the arm takes {100 * extra / cost(control):+.2f} % to the control, and the nearest "
            f"size that was tried {100 * got / cost(control):+.2f} %"
        )
    return Companion(kind, WHY[kind], best.recipe.replace(steps=arm.steps), unit, best[:3])


def sizes_of(kind: CompanionKind, control: TrainConfig) -> Sizes:
    """The candidate sizes of a companion, cheapest first."""
    return {"short_swa": _swa_sizes, "wider_stream": _wider_sizes, "wider_feed_forward": _feed_forward_sizes}[kind](control)


def applies(kind: CompanionKind, recipe: TrainConfig, control: TrainConfig) -> bool:
    """Whether a matched companion isolates a cause of an arm's difference."""
    if kind == "wider_feed_forward":
        return parameters(recipe) > parameters(control)
    return kind == "short_swa" or recipe.decoder(vocab_size(recipe)).depth.controls().streams > 1


def _swa_sizes(control: TrainConfig) -> Sizes:
    """The control with a ShortSWA before the other sublayers of its first blocks."""
    model, window = control.decoder(vocab_size(control)), min(SWA_WINDOW, control.data.seq_len)
    found = list[Sized]()
    for n_blocks in range(1, model.n_layers + 1):
        for n_heads in SWA_HEADS:
            for head_dim in SWA_HEAD_DIMS:
                swa = {"kind": "short_swa", "window": window, "n_heads": n_heads, "head_dim": head_dim, "output_init": "zero"}
                words = f"in the first {n_blocks} of {model.n_layers} blocks, {n_heads} x {head_dim} wide, window {window}"
                found.append(Sized("short_swa", None, words, _with_model(control, blocks=_blocks_with(model, swa, n_blocks))))
    found.sort(key=lambda size: flops_per_step(size.recipe))
    return Sizes(len(found), found.__getitem__)


def _wider_sizes(control: TrainConfig) -> Sizes:
    """The control with a wider stream and sublayers of the same inner widths."""
    model = control.decoder(vocab_size(control))
    blocks = [[_with_inner_widths(sublayer, model.d_model) for sublayer in block] for block in model.blocks]

    @cache
    def at(number: int) -> Sized:
        d_model = model.d_model + WIDTHS[number]
        return Sized("model.d_model", model.d_model, d_model, _with_model(control, d_model=d_model, blocks=blocks))

    return Sizes(len(WIDTHS), at)


def _feed_forward_sizes(control: TrainConfig) -> Sizes:
    """The control with as many more hidden numbers in every feed-forward, up to twice as many."""
    model = control.decoder(vocab_size(control))
    blocks = [[_with_inner_widths(sublayer, model.d_model) for sublayer in block] for block in model.blocks]
    most = max((data.get("d_ff", 0) for block in blocks for data in block), default=0)
    added = sorted({*range(1, min(FINE, most) + 1), *range(1 + most // FINE, most + 1, 1 + most // FINE)})

    @cache
    def at(number: int) -> Sized:
        more = added[number]
        wider = [[data | ({"d_ff": data["d_ff"] + more} if "d_ff" in data else {}) for data in block] for block in blocks]
        return Sized("model.blocks.*.d_ff", most, most + more, _with_model(control, blocks=wider))

    return Sizes(len(added), at)


def _with_model(recipe: TrainConfig, **changes: Any) -> TrainConfig:
    return recipe.replace(model={**recipe.model, **changes})


def _blocks_with(model: DecoderConfig, swa: dict[str, Any], n_blocks: int) -> list[list[Any]]:
    return [([swa] if number < n_blocks else []) + list(block) for number, block in enumerate(model.layers)]


def _with_inner_widths(sublayer: Any, d_model: int) -> dict[str, Any]:
    """The data of a sublayer, with default widths made explicit so that they do not follow the model's."""
    data = sublayer.to_data()
    if "head_dim" in data:
        data["head_dim"] = sublayer.head_shape(d_model).head_dim
    if "d_ff" in data:
        data["d_ff"] = sublayer.hidden_width(d_model)
    return data
