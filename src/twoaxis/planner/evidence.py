"""Evidence of kept studies on the method that is recommended for a goal; a plan itself states cost only."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from twoaxis.core.design import MixingDesign
from twoaxis.core.kept_reports import KeptReport, kept_reports
from twoaxis.depth import DEPTH
from twoaxis.display.numbers import short_count, signed
from twoaxis.planner.methods import Goal

Verdict = Literal["better", "undecided", "worse"]
Arm = Mapping[str, Any]
"""One arm of a kept report."""

Wanted = Callable[[Arm, Arm], bool]

Side = Literal["for", "against", "mixed", "undecided", "withdrawn"]

SHORTCUT_KIND, LOCAL_KIND = "deep_delta", "short_swa"
"""The mixers that the paper recommends, on the depth axis and on the sequence axis."""

TURNED: dict[Verdict, Verdict] = {"better": "worse", "worse": "better", "undecided": "undecided"}

PARTS: dict[Goal, tuple[Goal, ...]] = {"both": ("both", "shortcut", "local-mixing")}
"""Goals that a study may test one by one."""

NATURE = (
    "A plan states cost and no quality. Only studies whose control passed the validity gate say anything about quality. "
    "Verdicts and simultaneous intervals are corrected for all comparisons of a family, own intervals are not."
)

NO_VALID_STUDY = "No valid study yet: nothing is known here for or against this recommendation."


@dataclass(frozen=True)
class PairVerdict:
    """An arm with the recommended method against another arm of the same study.

    Attributes:
        arm: with the method.
        against: the other arm.
        matched: the cost that is equal for both; `tokens` against the control unless the design names another.
        verdict: on the arm with the method; None where the study gives none.
        difference: mean of its validation loss minus the other's, in nats per token; below zero is better.
        low: lower end of the 95 % interval of the verdict, or in an old report of this comparison alone; None when the
            replicates do not vary.
        high: upper end.
        replicates: pairs.
        family: comparisons that the interval is corrected for; 0 where it is that of one comparison.
        with_control: whether the other arm is the control of the study.
        no_verdict: why there is none, as the study says it.
    """

    arm: str
    against: str
    matched: str
    verdict: Verdict | None
    difference: float | None
    low: float | None
    high: float | None
    replicates: int
    family: int
    with_control: bool
    no_verdict: str = ""

    @property
    def sentence(self) -> str:
        """The comparison in words."""
        if self.verdict is None or self.difference is None:
            return f"{self.arm} against {self.against}: no verdict" + (f" ({self.no_verdict})" if self.no_verdict else "")
        which = f"simultaneous 95 % interval (family of {self.family})" if self.family else "own 95 % interval"
        interval = "" if self.low is None or self.high is None else f", {which} {signed(self.low)} to {signed(self.high)}"
        equal = f" at equal {self.matched.replace('flops', 'FLOPs')}" if self.matched else ""
        verdict = "undecided against" if self.verdict == "undecided" else f"{self.verdict} than"
        found = f"{self.arm} is {verdict} {self.against}{equal}: {signed(self.difference)} nats per token"
        return f"{found}{interval}, {self.replicates} replicates"


@dataclass(frozen=True)
class StudyEvidence:
    """One study that has an arm with the recommended method.

    Attributes:
        name: of its page in `docs/studies`.
        question: what it asks.
        withdrawn: why it is no evidence; "" if it is.
        gate: the result of its validity gate; "" without one.
        forms: arms with another form of the method than the plan's, and the difference.
        scale: sizes of its models and budget of a run.
        pairs: every comparison of an arm that has the method; empty if the study is withdrawn.
        report: the path of the whole report, in the repository.
    """

    name: str
    question: str
    withdrawn: str
    gate: str
    forms: tuple[str, ...]
    scale: str
    pairs: tuple[PairVerdict, ...]
    report: str

    @property
    def side(self) -> Side:
        """Whether it supports the recommendation, by the comparisons with the control if there are any."""
        if self.withdrawn:
            return "withdrawn"
        decisive = {pair.verdict for pair in self.decisive}
        if "better" in decisive:
            return "mixed" if any(pair.verdict == "worse" for pair in self.pairs) else "for"
        return "against" if "worse" in decisive else "undecided"

    @property
    def decisive(self) -> tuple[PairVerdict, ...]:
        """The comparisons with the control if there are any, else all."""
        # A method that beats another explanation of its gain, and not the control, has no gain to explain.
        return tuple(pair for pair in self.pairs if pair.with_control) or self.pairs

    def to_data(self) -> dict[str, Any]:
        """Plain JSON-ready data."""
        return asdict(self) | {"forms": list(self.forms), "pairs": [asdict(pair) for pair in self.pairs], "side": self.side}


def evidence(goal: Goal, kept: tuple[KeptReport, ...] | None = None) -> tuple[StudyEvidence, ...]:
    """Returns the studies with an arm that has the method recommended for a goal, decisive ones first.

    Args:
        goal: of the reader.
        kept: reports; None takes those that ship with the package.

    Example:
        >>> "local_mixing" in [study.name for study in evidence("local-mixing")]
        True
    """
    found = [study for each in (kept_reports() if kept is None else kept) if (study := _study(goal, each)) is not None]
    order: tuple[Side, ...] = ("for", "against", "mixed", "undecided", "withdrawn")
    return tuple(sorted(found, key=lambda study: order.index(study.side)))


def against_control(kept: KeptReport, wanted: Wanted) -> Iterator[PairVerdict]:
    """Compares arms of a study with its control; nothing for a withdrawn study.

    Args:
        kept: the study.
        wanted: whether an arm is compared, given arm and control.
    """
    control, own = _chosen(kept.report, wanted)
    charge = kept.report.get("charge", "tokens")
    for name in () if kept.withdrawn else own:
        arm = kept.report["arms"][name]
        # A companion was generated for another comparison.
        if arm.get("role") != "companion":
            comparison = (arm.get("charged", {}).get(charge) or {}).get("comparison")
            yield _pair((name, control, charge), comparison, arm, with_control=True)


def local_mixers(arm: Arm) -> frozenset[str]:
    """Kinds of the sublayers of an arm and of the local mixers inside them."""
    return frozenset(kind for name in arm["mixers"] for kind in name.split("+"))


def recorded_design(arm: Arm) -> MixingDesign:
    """The design of the depth mixer of an arm; options newer than its record have their earlier meaning."""
    return DEPTH[arm["depth"]["kind"]].config.from_record(arm["depth"]).design


def _chosen(report: Mapping[str, Any], wanted: Wanted) -> tuple[str, list[str]]:
    """The control of a study and the arms to compare."""
    arms = report["arms"]
    control = next(name for name, arm in arms.items() if arm["control"])
    base = arms[control]
    # An arm without a run has no mixers in the record and no result.
    known = {name: arm for name, arm in arms.items() if name != control and "depth" in arm and "depth" in base}
    return control, [name for name, arm in known.items() if arm.get("role") not in ("rung", "trial") and wanted(arm, base)]


def _study(goal: Goal, kept: KeptReport) -> StudyEvidence | None:
    def wanted(arm: Arm, control: Arm) -> bool:
        return any(_recommended(part, arm, control) for part in PARTS.get(goal, (goal,)))

    _, own = _chosen(kept.report, wanted)
    if not own:
        return None
    return StudyEvidence(
        name=kept.name,
        question=kept.question,
        withdrawn=kept.withdrawn,
        gate=str(kept.gate.get("sentence", "")).rstrip("."),
        forms=() if kept.withdrawn else tuple(_forms(kept.report, own)),
        scale=_scale(kept.report),
        pairs=() if kept.withdrawn else (*against_control(kept, wanted), *_contrasts(kept.report, own)),
        report=kept.path,
    )


def _recommended(goal: Goal, arm: Arm, control: Arm) -> bool:
    """Whether an arm differs from the control by the recommended method alone."""
    depth, plain = arm["depth"], control["depth"]
    mixers, local = local_mixers(arm), local_mixers(control)
    shortcut = depth["kind"] == SHORTCUT_KIND and depth.get("update_rule", "delta") == "delta" and depth != plain
    if goal == "both":
        return shortcut and LOCAL_KIND in mixers - local
    if goal == "shortcut":
        return shortcut and mixers == local
    return depth == plain and LOCAL_KIND in mixers - local


def _contrasts(report: Mapping[str, Any], own: list[str]) -> Iterator[PairVerdict]:
    """The contrasts of these arms with others."""
    for contrast in report.get("contrasts", ()):
        arm, against, matched = contrast["arm"], contrast["against"], contrast["matched"]
        if arm in own and against not in own:
            yield _pair((arm, against, matched), contrast["comparison"], contrast)
        elif against in own and arm not in own:
            yield _pair((against, arm, matched), contrast["comparison"], contrast, turned=True)


def _pair(
    names: tuple[str, str, str],
    comparison: Mapping[str, Any] | None,
    said: Mapping[str, Any],
    turned: bool = False,
    with_control: bool = False,
) -> PairVerdict:
    """One comparison, or the reason why the study gives no verdict."""
    refused = said.get("no_verdict") or ""
    if comparison is None or comparison["verdict"] is None or refused:
        return PairVerdict(*names, None, None, None, None, 0, 0, with_control, refused)
    simultaneous = comparison.get("simultaneous")
    low, high = simultaneous or comparison["ci95"] or (None, None)
    family, n = comparison["family"] if simultaneous else 0, len(comparison["paired_differences"])
    verdict, difference = comparison["verdict"], comparison["mean_difference"]
    if turned:
        verdict, difference = TURNED[verdict], -difference
        low, high = (None, None) if low is None or high is None else (-high, -low)
    return PairVerdict(*names, verdict, difference, low, high, n, family, with_control)


def _forms(report: Mapping[str, Any], own: list[str]) -> Iterator[str]:
    planned = DEPTH.parse(SHORTCUT_KIND).design
    for name in own:
        if report["arms"][name]["depth"]["kind"] == SHORTCUT_KIND:
            made = recorded_design(report["arms"][name])
            parts = [
                f"{part}: {made.to_data()[part]}"
                for part in ("value", "window")
                if made.to_data()[part] != planned.to_data()[part]
            ]
            if parts:
                yield f"{name} ({', '.join(parts)})"


def _scale(report: Mapping[str, Any]) -> str:
    arms = [arm for arm in report["arms"].values() if arm.get("role", "treatment") in ("control", "treatment")]
    sizes = [arm["parameters"] for arm in arms if arm.get("parameters")]
    tokens = sorted({arm["tokens"] for arm in arms if arm.get("tokens")})
    said = f"models of {short_count(min(sizes))} to {short_count(max(sizes))} parameters" if sizes else "models of unknown size"
    return f"{said}, {' or '.join(short_count(each) for each in tokens)} tokens a run" if tokens else said
