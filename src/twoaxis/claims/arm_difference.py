"""The difference of two arms of a stored report, as planned by the study or computed from shared seeds, and its outcome."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from twoaxis.statistics import half_width, paired_test

ALPHA = 0.05
"""Probability of a false verdict among the comparisons of a claim in one study."""

Outcome = Literal["better", "as good", "no better", "undecided", "not compared"]
Wanted = Literal["better", "as good"]


class Arm(NamedTuple):
    """An arm of a stored report.

    Attributes:
        name: in the report.
        data: its stored data.
    """

    name: str
    data: Mapping[str, Any]

    @property
    def depth(self) -> Mapping[str, Any]:
        """The configuration of its depth mixer."""
        return self.data.get("depth") or {}

    @property
    def mixers(self) -> Mapping[str, int]:
        """The number of sublayers of each mixer."""
        return self.data.get("mixers") or {}

    def has(self, mixer: str) -> bool:
        """Whether any sublayer has this mixer."""
        return mixer in self.mixers


class Difference(NamedTuple):
    """The loss of an arm minus that of a rival, over shared seeds; below zero the arm is better.

    Attributes:
        mean: nats per token.
        low: lower end of the uncorrected interval.
        high: upper end.
        n: replicates.
        verdict: `better`, `worse` or `undecided`.
        planned: whether the study made the comparison itself.
    """

    mean: float
    low: float
    high: float
    n: int
    verdict: str
    planned: bool

    def __str__(self) -> str:
        planned = "" if self.planned else ", not planned"
        numbers = f"{self.mean:+.4f} ({self.low:+.4f} to {self.high:+.4f}), n = {self.n}{planned}"
        return numbers.replace("-", "\N{MINUS SIGN}")


def judge(found: Difference, smallest: float, wanted: Wanted) -> Outcome:
    """The outcome of a difference, given the smallest effect that matters.

    Example:
        >>> judge(Difference(-0.001, -0.01, 0.008, 5, "undecided", True), 0.02, "better")
        'no better'
    """
    if found.verdict == "better":
        return "better"
    if wanted == "as good" and found.verdict != "worse" and found.high < smallest:
        return "as good"
    if found.verdict == "worse" or (wanted == "better" and found.low > -smallest):
        return "no better"
    return "undecided"


def planned(report: Mapping[str, Any], arm: Arm, other: Arm) -> Difference | None:
    """The comparison planned by the study: with its control, or a contrast, in either order."""
    if other.data.get("control"):
        charged = arm.data.get("charged", {}).get(report.get("charge", "tokens")) or {}
        found = _difference(charged.get("comparison"), arm.data.get("verdict"))
        if found is None and "charged" not in arm.data and (own := paired(arm, other, 1)):
            # Reports of the first version contain the verdict without its comparison.
            return own._replace(verdict=arm.data.get("verdict") or "undecided", planned=True)
        return found
    if arm.data.get("control"):
        reverse = planned(report, other, arm)
        return reverse and _reversed(reverse)
    for contrast in report.get("contrasts", ()):
        names = contrast["arm"], contrast["against"]
        comparison = contrast["comparison"]
        found = _difference(comparison, comparison and comparison["verdict"])
        if found is not None and names in ((arm.name, other.name), (other.name, arm.name)):
            return found if names[0] == arm.name else _reversed(found)
    return None


def withheld(report: Mapping[str, Any], arm: Arm, other: Arm) -> str:
    """The reason why the study gives no verdict on two arms of which it has all runs, or ""."""
    untrained = (report.get("gate") or {}).get("not_trained", ())
    if names := [one.name for one in (arm, other) if one.name in untrained]:
        return f"not trained: {', '.join(names)}"
    for one, rival in ((arm, other), (other, arm)):
        if rival.data.get("control") and one.data.get("role") == "treatment":
            return one.data.get("no_verdict", "")
    pair = {arm.name, other.name}
    return next((c.get("no_verdict", "") for c in report.get("contrasts", ()) if {c["arm"], c["against"]} == pair), "")


def _difference(comparison: Mapping[str, Any] | None, verdict: str | Literal[False] | None) -> Difference | None:
    if not comparison or not comparison.get("ci95"):
        return None
    low, high = comparison["ci95"]
    n = len(comparison["paired_differences"])
    return Difference(comparison["mean_difference"], low, high, n, verdict or "undecided", True)


def _reversed(found: Difference) -> Difference:
    verdict = {"better": "worse", "worse": "better"}.get(found.verdict, found.verdict)
    return found._replace(mean=-found.mean, low=-found.high, high=-found.low, verdict=verdict)


def paired(arm: Arm, other: Arm, comparisons: int) -> Difference | None:
    """Student's interval of the paired difference, with a verdict corrected for the number of such comparisons."""
    losses, rivals = arm.data["losses"], other.data["losses"]
    differences = [losses[seed] - rivals[seed] for seed in losses if seed in rivals]
    if len(differences) < 2:
        return None
    test = paired_test(differences, 1 - ALPHA)
    verdict = "undecided"
    if test.varies:
        corrected = half_width(test.sd, test.n, 1 - ALPHA / max(1, comparisons))
        verdict = "better" if test.mean + corrected < 0 else "worse" if test.mean - corrected > 0 else "undecided"
    return Difference(test.mean, test.low, test.high, test.n, verdict, False)
