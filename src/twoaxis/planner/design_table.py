"""The table of methods: how each forms its weights, its costs at one shape, and its loss in valid studies."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from twoaxis.core.cost import Shape
from twoaxis.core.design import MixingDesign
from twoaxis.core.kept_reports import KeptReport, kept_reports
from twoaxis.depth import DEPTH
from twoaxis.ledger.decoder_memory import rotation_bytes
from twoaxis.local.places import PlacesConfig
from twoaxis.planner.coefficients import coefficients
from twoaxis.planner.evidence import Arm, PairVerdict, against_control, local_mixers, recorded_design
from twoaxis.planner.formulas.collectives import hop_bytes
from twoaxis.planner.formulas.counts import ends_saved_bytes, forward_counts, parameter_counts, saved_bytes_of
from twoaxis.planner.formulas.training_step import edges_of
from twoaxis.planner.methods import Axis, Method, Refusal, fitted, methods
from twoaxis.planner.model.part import NativeSublayer
from twoaxis.planner.model.read import read_model
from twoaxis.planner.model.shape import ModelShape

PRESET, TOKENS, ELEMENT_BYTES = "dense-7b", 2**13, 2
"""The model of the costs, tokens of a sequence, and the bytes of bfloat16."""

RANKS, CHUNKS, FORWARDING = 4, 2, "cached"
"""Its pipeline: ranks, stages on each, and a boundary that sends what the receiver does not hold yet."""


@dataclass(frozen=True)
class MethodCounts:
    """The counts of one method at the stated shape.

    Attributes:
        params: parameters, a count.
        flops_per_token: of a forward pass.
        saved_bytes_per_token: saved for backward, without recomputation.
        boundary_bytes_per_token: over the busiest stage boundary.
    """

    params: int
    flops_per_token: float
    saved_bytes_per_token: float
    boundary_bytes_per_token: float

    def __sub__(self, other: "MethodCounts") -> "MethodCounts":
        mine, theirs = vars(self), vars(other)
        return MethodCounts(**{name: mine[name] - theirs[name] for name in mine})


@dataclass(frozen=True)
class MethodRow:
    """One method.

    Attributes:
        name: as in plans.
        axis: on which it mixes.
        kind: of its mixer.
        design: how it forms its weights.
        counts: of the whole model for the control, else beyond the control's.
        losses: comparisons with the control in every valid study that has the method.
    """

    name: str
    axis: Axis
    kind: str
    design: MixingDesign
    counts: MethodCounts
    losses: tuple[tuple[str, PairVerdict], ...]

    def to_data(self) -> dict[str, Any]:
        """Plain JSON-ready data."""
        return {
            **{name: getattr(self, name) for name in ("name", "axis", "kind")},
            "design": self.design.to_data(),
            "counts": vars(self.counts),
            "losses": [{"study": study, **vars(pair), "sentence": pair.sentence} for study, pair in self.losses],
        }


def design_table(kept: tuple[KeptReport, ...] | None = None) -> tuple[MethodRow, ...]:
    """Every method of the depth axis, and those of the sequence axis that a plan names; the control comes first.

    Args:
        kept: reports of studies; None takes those that ship with the package.

    Example:
        >>> [row.name for row in design_table() if row.design.literal]
        ['Depth ShortSWA']
    """
    model = read_model(PRESET)
    valid = [each for each in (kept_reports() if kept is None else kept) if not each.withdrawn]
    rows: list[MethodRow] = []
    control: MethodCounts | None = None
    for method in _every_method():
        shape = fitted(method, model)
        if isinstance(shape, Refusal):
            raise AssertionError(f"{method.name} does not fit {PRESET}: {shape.reason}")
        counts, design = _counts(shape), _design(method, shape)
        added = counts if control is None else counts - control
        control = control or counts
        losses = tuple(found for each in valid for found in _losses(method, design, each))
        rows.append(MethodRow(method.name, method.axis, method.kind, design, added, losses))
    return tuple(rows)


def stated_shape() -> str:
    """The shape of the costs in words."""
    model = read_model(PRESET)
    return (
        f"{PRESET}: {model.n_layers} blocks, d_model {model.d_model}; one sequence of {TOKENS} tokens in bfloat16, nothing "
        f"recomputed; {RANKS} pipeline ranks with {CHUNKS} stages each, where a rank keeps the states that it has received"
    )


def _every_method() -> Iterator[Method]:
    """The methods of a plan, and the default form of every depth mixer that no plan names."""
    known = methods()
    yield from (method for method in known if method.axis == "depth")
    named = {method.kind for method in known}
    for row in DEPTH:
        if row.kind not in named:
            yield Method(
                row.kind, "depth", "shortcut", row.kind, lambda model, kind=row.kind: model.with_depth(DEPTH.parse(kind))
            )
    yield from (method for method in known if method.axis == "sequence")


def _design(method: Method, model: ModelShape) -> MixingDesign:
    if method.axis == "depth":
        return model.depth.design
    for part in model.parts:
        if not isinstance(part, NativeSublayer):
            continue
        inside = (part.config.input_local,) if isinstance(part.config, PlacesConfig) else ()
        for config in (part.config, *inside):
            if config is not None and config.kind == method.kind and (design := getattr(config, "design", None)):
                return design
    raise AssertionError(f"{method.name} declares no design; give {method.kind!r} one")


def _counts(model: ModelShape) -> MethodCounts:
    numbers = coefficients(model)
    saved = saved_bytes_of(numbers, 0, len(numbers["sublayers"]), TOKENS) + ends_saved_bytes(numbers, TOKENS, 1)
    edges = edges_of(numbers, {"pipeline": RANKS, "virtual": CHUNKS})
    return MethodCounts(
        params=parameter_counts(numbers)["all"],
        flops_per_token=forward_counts(numbers, 1, TOKENS)["all"] / TOKENS,
        saved_bytes_per_token=(saved + rotation_bytes(model, Shape(1, TOKENS, ELEMENT_BYTES))) / TOKENS,
        boundary_bytes_per_token=max(hop_bytes(numbers["leaves"], edges, RANKS, FORWARDING)),
    )


def _losses(method: Method, design: MixingDesign, kept: KeptReport) -> Iterator[tuple[str, PairVerdict]]:
    """Comparisons of arms that differ from the control of a study by this method alone."""

    def is_method(arm: Arm, control: Arm) -> bool:
        added = local_mixers(arm) - local_mixers(control)
        if method.axis == "depth":
            changed = not added and arm["depth"] != control["depth"] and arm["depth"]["kind"] == method.kind
            return changed and recorded_design(arm) == design
        # Methods of one kind differ in their places, which reports do not record.
        alone = sum(other.kind == method.kind for other in methods()) == 1
        return alone and arm["depth"] == control["depth"] and added == {method.kind}

    for pair in against_control(kept, is_method):
        yield kept.name, pair
