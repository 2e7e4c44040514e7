"""Decides claims about training from the stored studies, by a rule fixed before their results."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from twoaxis.claims.arm_difference import Arm, Outcome, Wanted, judge, paired, planned, withheld
from twoaxis.claims.claim import EvidenceTable, Finding
from twoaxis.core.kept_reports import KEPT, KeptReport, kept_reports

FIXED_ON = "Fixed on 2026-11-29"
FIXED = f"{FIXED_ON}, when no report had a validity gate and so none counted."

RULE = (
    "A study counts if its report is complete, its control has passed the validity gate, and no later design has replaced it. "
    "The arm is better than a rival by the verdict of the study, where it planned that comparison; else by the paired t "
    "interval over shared seeds at 95 %, with Bonferroni's correction for all such comparisons of the claim in that study. "
    "It is no better if that says worse, or if its own 95 % interval excludes a gain of the smallest effect that matters. "
)
SOME = (
    "The claim holds if some arm of some study that counts is better than every rival named here; it does not hold at this "
    "scale if in every such study every arm is no better than one of them; otherwise it is undecided. "
)
EVERY = (
    "The claim holds if in some study that counts every arm is better than every rival named here; it does not hold at this "
    "scale if in every such study every arm is no better than one of them; otherwise it is undecided. "
)

GOOD: tuple[Outcome, ...] = ("better", "as good")


class Rival(NamedTuple):
    """A baseline that an arm has to beat; `is_rival(arm, other)` tests whether the other is this baseline of the arm."""

    name: str
    is_rival: Callable[[Arm, Arm], bool]


@dataclass(frozen=True)
class Question:
    """The comparisons that test a claim.

    Attributes:
        arms: selects the arms of the claim.
        rivals: baselines that each of them has to beat.
        reported: baselines that are reported but do not decide.
        unfair: reason why a pair cannot be compared, such as unequal cost, or "".
        every: whether all arms of a study have to win, or some.
        wanted: `better`, or `as good`: not worse by the smallest effect that matters.
    """

    arms: Callable[[Arm], bool]
    rivals: tuple[Rival, ...]
    reported: tuple[Rival, ...] = ()
    unfair: Callable[[Arm, Arm], str] = lambda arm, other: ""
    every: bool = False
    wanted: Wanted = "better"


class Pair(NamedTuple):
    """A comparison of an arm with a baseline, by name; `against` is the rival arm, or empty where the study has none."""

    arm: str
    rival: str
    against: str
    outcome: Outcome
    detail: str


class StudyEvidence(NamedTuple):
    """The evidence of one study on a claim: comparisons that decide (`pairs`), other ones, and the outcome if it counts."""

    kept: KeptReport
    pairs: tuple[Pair, ...]
    reported: tuple[Pair, ...]
    outcome: Literal["for", "against", "undecided"]


def decide(question: Question) -> Finding:
    """Decides a claim from all stored studies, with a row of evidence for every comparison."""
    try:
        kept = kept_reports()
    except (OSError, ValueError) as error:
        return Finding("no study yet", evidence=(f"The kept reports cannot be read: {KEPT} ({type(error).__name__}).",))
    found, damaged = [], []
    for one in kept:
        try:
            found += [study] if (study := evidence_of(question, one)) else []
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            damaged.append(f"{one.path} cannot be read ({type(error).__name__}: {error}); write it anew.")
    count = [study for study in found if not study.kept.withdrawn]
    outcomes = {study.outcome for study in count}
    rows = tuple(row for study in found for row in _rows(study))
    columns = ("study", "counts", "comparison", "outcome", "difference in nats per token, own 95 % interval")
    table = EvidenceTable(columns, rows) if rows else None
    links = tuple(study.kept.path for study in found)
    evidence = (*_census(found, len(kept)), *damaged)
    if "for" in outcomes:
        bound = "in " + ", ".join(study.kept.name for study in count if study.outcome == "for") + _reported(count)
        return Finding("holds", bound, evidence, table, links)
    if not count:
        return Finding("no study yet", "", evidence, table, links)
    verdict = "does not hold at this scale" if outcomes == {"against"} else "undecided"
    return Finding(verdict, "", evidence, table, links)


def _census(studies: Sequence[StudyEvidence], known: int) -> Iterator[str]:
    withdrawn: dict[str, list[str]] = {}
    for kept in (study.kept for study in studies):
        if kept.withdrawn:
            withdrawn.setdefault(kept.withdrawn, []).append(kept.name)
    counting = len(studies) - sum(map(len, withdrawn.values()))
    yield f"Reports that ship with twoaxis: {known}; that bear on this claim: {len(studies)}; that count: {counting}."
    if withdrawn:
        reasons = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in withdrawn.items())
        yield f"Shown for the record, and no evidence either way: {reasons}."


def _reported(studies: Sequence[StudyEvidence]) -> str:
    """The best outcome against each baseline that does not decide, over the arms of studies in favour."""
    found: dict[str, list[Outcome]] = {}
    for pair in (pair for study in studies if study.outcome == "for" for pair in study.reported):
        found.setdefault(pair.rival, []).append(pair.outcome)
    order: tuple[Outcome, ...] = ("better", "as good", "undecided", "no better", "not compared")
    return "".join(f"; against {rival}: {min(outcomes, key=order.index)}" for rival, outcomes in found.items())


def _rows(study: StudyEvidence) -> Iterator[tuple[str, ...]]:
    if not study.kept.withdrawn:
        counts, pairs = "yes", (*study.pairs, *study.reported)
    else:
        counts, pairs = "no", tuple(pair for pair in study.pairs if pair.against)
    for pair in pairs:
        compared = f"{pair.arm} against {pair.against or f'{pair.rival}: no such arm'}"
        yield study.kept.name, counts, compared, pair.outcome, pair.detail


def evidence_of(question: Question, kept: KeptReport) -> StudyEvidence | None:
    """The evidence of a study; None without an arm of the claim and one of its rivals."""
    report = kept.report
    arms = [Arm(name, data) for name, data in report["arms"].items() if data.get("role") not in ("rung", "trial")]

    def opponents(arm: Arm, rivals: Sequence[Rival]) -> list[tuple[Rival, list[Arm]]]:
        return [(rival, _to_compare(question, report, arm, rival, arms)) for rival in rivals]

    tested = [arm for arm in arms if question.arms(arm) and any(others for _, others in opponents(arm, question.rivals))]
    if not tested:
        return None
    tests = [(arm, other) for arm in tested for _, others in opponents(arm, question.rivals) for other in others]
    unplanned = sum(not _obstacle(question, report, *test) and planned(report, *test) is None for test in tests)

    def pairs(arm: Arm, rivals: Sequence[Rival]) -> tuple[Pair, ...]:
        absent = [Pair(arm.name, rival.name, "", "not compared", "") for rival, others in opponents(arm, rivals) if not others]
        found = [(rival, other) for rival, others in opponents(arm, rivals) for other in others]
        return (*(_pair(question, report, arm, rival, other, unplanned) for rival, other in found), *absent)

    decisive = [pairs(arm, question.rivals) for arm in tested]
    reported = tuple(pair for arm in tested for pair in pairs(arm, question.reported))
    return StudyEvidence(kept, tuple(pair for one in decisive for pair in one), reported, _outcome(question, decisive))


def _to_compare(question: Question, report: Mapping[str, Any], arm: Arm, rival: Rival, arms: Sequence[Arm]) -> list[Arm]:
    """The rivals of one kind: those of planned comparisons, else those with fair comparisons, else all.

    A companion takes part only in the comparison it was generated for.
    """
    others = [other for other in arms if other is not arm and rival.is_rival(arm, other)]
    made = [other for other in others if planned(report, arm, other) is not None]
    if arm.data.get("role") == "companion":
        return made
    others = [other for other in others if other in made or other.data.get("role") != "companion"]
    fair = [other for other in others if not question.unfair(arm, other)]
    return [other for other in fair if other in made] or fair or others


def _outcome(question: Question, arms: Sequence[Sequence[Pair]]) -> Literal["for", "against", "undecided"]:
    won = [all(pair.outcome in GOOD for pair in pairs) for pairs in arms]
    lost = [any(pair.outcome == "no better" for pair in pairs) for pairs in arms]
    if all(won) if question.every else any(won):
        return "for"
    return "against" if all(lost) else "undecided"


def _obstacle(question: Question, report: Mapping[str, Any], arm: Arm, other: Arm) -> str:
    return question.unfair(arm, other) or withheld(report, arm, other)


def _pair(question: Question, report: Mapping[str, Any], arm: Arm, rival: Rival, other: Arm, unplanned: int) -> Pair:
    if reason := _obstacle(question, report, arm, other):
        return Pair(arm.name, rival.name, other.name, "not compared", reason)
    found = planned(report, arm, other) or paired(arm, other, unplanned)
    if found is None:
        return Pair(arm.name, rival.name, other.name, "not compared", "fewer than two shared seeds")
    smallest = report["design"]["decision"]["smallest_effect"]
    return Pair(arm.name, rival.name, other.name, judge(found, smallest, question.wanted), str(found))
