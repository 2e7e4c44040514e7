"""How a claim about training is decided: by the kept studies that bear on it, under a rule fixed before their results."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from twoaxis.claims.claim import EvidenceTable, Finding
from twoaxis.claims.differences import Arm, Outcome, Wanted, judge, paired, planned
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
    """A baseline that an arm has to beat.

    Attributes:
        name: in words.
        is_rival: of (arm, other), whether the other is such a baseline of the arm.
    """

    name: str
    is_rival: Callable[[Arm, Arm], bool]


def any_cost(arm: Arm, other: Arm) -> str:
    """Fair whatever both cost."""
    return ""


@dataclass(frozen=True)
class Question:
    """What a claim asks of a study.

    Attributes:
        arms: which arms speak for the claim.
        rivals: what each of them has to beat.
        beyond: baselines that are reported but decide nothing.
        unfair: why a pair cannot be compared, such as unequal cost; "" where it can.
        every: whether all arms of a study have to win, or some.
        wanted: `better`, or `as good`: not worse by the smallest effect that matters.
    """

    arms: Callable[[Arm], bool]
    rivals: tuple[Rival, ...]
    beyond: tuple[Rival, ...] = ()
    unfair: Callable[[Arm, Arm], str] = any_cost
    every: bool = False
    wanted: Wanted = "better"


class Pair(NamedTuple):
    """An arm, one of its rivals, and what came out.

    Attributes:
        arm: the name of the arm.
        rival: the name of the rival's kind.
        against: the name of the rival, or empty where the study has none.
        outcome: for the claim.
        detail: the difference, or why there is none.
    """

    arm: str
    rival: str
    against: str
    outcome: Outcome
    detail: str


class Hearing(NamedTuple):
    """What one study says about a question.

    Attributes:
        kept: the study.
        pairs: comparisons that decide.
        beyond: comparisons that are reported.
        outcome: whether it speaks for the claim, against it, or is undecided, if it counts.
    """

    kept: KeptReport
    pairs: tuple[Pair, ...]
    beyond: tuple[Pair, ...]
    outcome: Literal["for", "against", "undecided"]


def decide(question: Question) -> Finding:
    """The verdict of all kept studies, with a row for every comparison that bears on the question."""
    try:
        kept = kept_reports()
    except (OSError, ValueError) as error:
        return Finding("no study yet", evidence=(f"The kept reports cannot be read: {KEPT} ({type(error).__name__}).",))
    hearings, damaged = [], []
    for one in kept:
        try:
            hearings += [hearing] if (hearing := hear(question, one)) else []
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            damaged.append(f"{one.path} cannot be read ({type(error).__name__}: {error}); write it anew.")
    count = [hearing for hearing in hearings if not hearing.kept.withdrawn]
    said = [hearing.outcome for hearing in count]
    rows = tuple(row for hearing in hearings for row in _rows(hearing))
    columns = ("study", "counts", "comparison", "outcome", "difference in nats per token")
    table = EvidenceTable(columns, rows) if rows else None
    links = tuple(hearing.kept.path for hearing in hearings)
    evidence = (*_census(hearings, len(kept)), *damaged)
    if "for" in said:
        bound = "in " + ", ".join(hearing.kept.name for hearing in count if hearing.outcome == "for") + _beyond(count)
        return Finding("holds", bound, evidence, table, links)
    if not count:
        return Finding("no study yet", "", evidence, table, links)
    verdict = "does not hold at this scale" if set(said) == {"against"} else "undecided"
    return Finding(verdict, "", evidence, table, links)


def _census(hearings: Sequence[Hearing], known: int) -> Iterator[str]:
    withdrawn: dict[str, list[str]] = {}
    for kept in (hearing.kept for hearing in hearings):
        if kept.withdrawn:
            withdrawn.setdefault(kept.withdrawn, []).append(kept.name)
    counting = len(hearings) - sum(map(len, withdrawn.values()))
    yield f"Of {known} reports that ship with twoaxis, {len(hearings)} bear on this claim, and {counting} of these count."
    if withdrawn:
        reasons = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in withdrawn.items())
        yield f"Shown for the record, and no evidence either way: {reasons}."


def _beyond(hearings: Sequence[Hearing]) -> str:
    """What the reported baselines come to in the studies that decide; a gain over one of them in any arm is a gain."""
    found: dict[str, list[Outcome]] = {}
    for pair in (pair for hearing in hearings if hearing.outcome == "for" for pair in hearing.beyond):
        found.setdefault(pair.rival, []).append(pair.outcome)
    order: tuple[Outcome, ...] = ("better", "as good", "undecided", "no better", "not compared")
    return "".join(f"; against {rival}: {min(outcomes, key=order.index)}" for rival, outcomes in found.items())


def _rows(hearing: Hearing) -> Iterator[tuple[str, ...]]:
    if not hearing.kept.withdrawn:
        counts, pairs = "yes", (*hearing.pairs, *hearing.beyond)
    else:
        counts, pairs = "no", tuple(pair for pair in hearing.pairs if pair.against)
    for pair in pairs:
        yield (
            hearing.kept.name,
            counts,
            f"{pair.arm} against {pair.against or f'{pair.rival}: no such arm'}",
            pair.outcome,
            pair.detail,
        )


def hear(question: Question, kept: KeptReport) -> Hearing | None:
    """What a study says; None where it has no arm of the claim, or no rival of one."""
    report = kept.report
    arms = [Arm(name, data) for name, data in report["arms"].items() if data.get("role") not in ("rung", "trial")]

    def met(arm: Arm, rivals: Sequence[Rival]) -> list[tuple[Rival, list[Arm]]]:
        return [(rival, _to_compare(question, report, arm, rival, arms)) for rival in rivals]

    # An arm without any of its rivals has nothing to say here.
    speakers = [arm for arm in arms if question.arms(arm) and any(others for _, others in met(arm, question.rivals))]
    if not speakers:
        return None
    tests = [(arm, other) for arm in speakers for _, others in met(arm, question.rivals) for other in others]
    unplanned = sum(not question.unfair(*test) and planned(report, *test) is None for test in tests)

    def pairs(arm: Arm, rivals: Sequence[Rival]) -> tuple[Pair, ...]:
        absent = [Pair(arm.name, rival.name, "", "not compared", "") for rival, others in met(arm, rivals) if not others]
        found = [(rival, other) for rival, others in met(arm, rivals) for other in others]
        return (*(_pair(question, report, arm, rival, other, unplanned) for rival, other in found), *absent)

    decisive = [pairs(arm, question.rivals) for arm in speakers]
    beyond = tuple(pair for arm in speakers for pair in pairs(arm, question.beyond))
    return Hearing(kept, tuple(pair for one in decisive for pair in one), beyond, _outcome(question, decisive))


def _to_compare(question: Question, report: Mapping[str, Any], arm: Arm, rival: Rival, arms: Sequence[Arm]) -> list[Arm]:
    """The rivals of one kind: those that the study planned to compare, else all that can be compared fairly, else all.

    A companion was generated for one comparison, and takes part in no other.
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


def _pair(question: Question, report: Mapping[str, Any], arm: Arm, rival: Rival, other: Arm, unplanned: int) -> Pair:
    if reason := question.unfair(arm, other):
        return Pair(arm.name, rival.name, other.name, "not compared", reason)
    found = planned(report, arm, other) or paired(arm, other, unplanned)
    if found is None:
        return Pair(arm.name, rival.name, other.name, "not compared", "fewer than two shared seeds")
    smallest = report["design"]["decision"]["smallest_effect"]
    return Pair(arm.name, rival.name, other.name, judge(found, smallest, question.wanted), str(found))
