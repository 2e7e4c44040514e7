"""The answer of a study in one sentence of about 20 words, and its findings in detail."""

from collections.abc import Mapping, Sequence, Set

from twoaxis.display import numbers as words
from twoaxis.study.report_data import DONE, UNITS, ArmData, Charge, ComparisonData, ReportData

NAMED = 3
"""Arms of each verdict named by a finding; more are counted."""

COMPLETE = "Run the study again to complete it; what has finished is kept."
"""What to do about runs that have neither finished nor diverged."""

MOST_WORDS = 20
"""Length limit of an answer that names every arm; else arms are counted."""

Compared = Mapping[str, ComparisonData]


def answer(report: ReportData) -> str:
    """The result in one short sentence."""
    gate, arms = report.gate, _treatments(report)
    if gate is not None and gate.passed is False:
        return _untrained(report)
    if all(arm.verdict is None for arm in arms.values()) and not _decided_contrasts(report):
        return _nothing_yet(report, arms)
    if _is_about_companions(report):
        return _by_contrasts(report)
    return _by_arms(report, arms)


def findings(report: ReportData) -> tuple[str, ...]:
    """The results in sentences with intervals: at equal cost of every kind, and against companions."""
    arms = _treatments(report)
    if all(arm.verdict is None for arm in arms.values()) and not _decided_contrasts(report):
        return ()
    others: list[Charge] = [charge for charge in UNITS if charge != report.charge]
    said = [_with_numbers(report, arms), *(_in_words(arms, charge) for charge in others), *_against_companions(report)]
    without = [f"{name} ({arm.no_verdict})" for name, arm in arms.items() if arm.verdict is None]
    return tuple(filter(None, [*said, f"No verdict on {', '.join(without)}." if without else ""]))


def outlook(report: ReportData) -> tuple[str, str]:
    """What would decide the undecided comparisons, and what to do next; "" where there is nothing to say."""
    found = _compared(_treatments(report), report.charge)
    found |= {f"{one.arm} against {one.against}": one.comparison for one in report.asked if one.comparison is not None}
    by, n, tuning = _by_verdict(found), report.arms[report.control].replicates_planned, report.tuning
    needed = {name: found[name].replicates_needed or 0 for name in by["undecided"]}
    ranked = sorted((more, name) for name, more in needed.items() if more > n)
    decided = all(arm.verdict for arm in _treatments(report).values()) and not any(one.no_verdict for one in report.asked)
    decide = "Every comparison is decided." if decided and not by["undecided"] else ""
    if ranked:
        ends = dict((ranked[-1], ranked[0]))
        some = " to ".join(
            f"{more:,}{f' ({ends[more]})' if len(ranked) == 1 or len(ends) > 1 else ''}" for more in sorted(ends)
        )
        effect = report.design.get("decision", {}).get("smallest_effect", 0)
        decide = f"About {some} replicates, now {n}, to find a difference of {effect:g} nats with power 0.8."
    steps = [report.gate.change] if report.gate is not None and report.gate.change else []
    if not all(run.status in DONE for run in report.runs):
        steps.append(COMPLETE)
    if diverged := _diverged(report):
        steps.append(f"Try lower learning rates for {_listed(diverged)}, which diverged.")
    if tuning is not None and tuning.at_edge:
        steps.append(f"Widen the grid of learning rates of {_listed(tuning.at_edge)}, whose best rate is at its end.")
    if by["better"]:
        best = by["better"][0]
        steps.append(f"Repeat {best} at another size and budget: the sign has to hold there.")
    elif ranked:
        more, name = ranked[0]
        suggestive = _listed([name for name in by["undecided"] if found[name].suggestive] or [name])
        few = f"{2 * n} replicates, new seeds" if suggestive != name else f"{more:,} replicates"
        steps.append(f"Run {few}, to decide {suggestive}; or repeat all at a larger budget.")
    elif by["worse"]:
        steps.append(f"Search the learning rate of {_listed(by['worse'][:NAMED])} more finely, or drop it at this size.")
    return decide, " ".join(steps[:2])


def finished_replicates(report: ReportData) -> tuple[int, int]:
    """The numbers of replicates whose runs have all ended, and of planned ones."""
    planned = report.arms[report.control].replicates_planned
    open_seeds = {run.seed for run in report.runs if run.role != "trial" and run.status not in DONE}
    seeds = {run.seed for run in report.runs if run.role == "control"}
    return len(seeds - open_seeds), planned


def at_equal(charge: Charge) -> str:
    """The condition of a comparison in words.

    Example:
        >>> at_equal("flops")
        'at equal FLOPs'
    """
    return f"at equal {UNITS[charge]}"


def _treatments(report: ReportData) -> dict[str, ArmData]:
    return {name: arm for name, arm in report.arms.items() if arm.role == "treatment"}


def _decided_contrasts(report: ReportData) -> bool:
    return any(one.comparison is not None and one.comparison.verdict for one in report.contrasts)


def _is_about_companions(report: ReportData) -> bool:
    """A study with one kind of companion is about that comparison, not about the control."""
    return any(report.arms[one.against].role == "companion" for one in report.asked)


def _untrained(report: ReportData) -> str:
    gate = report.gate
    assert gate is not None and gate.control is not None
    if gate.bigram is None:
        return "No verdict: the control was not trained; its answers are no better than guesses."
    if gate.control < gate.bigram:
        return "No verdict: the control was not trained; it does not beat a count bigram in every replicate."
    return (
        f"No verdict: the control was not trained; at {gate.control:.2f} nats it does not beat a count bigram "
        f"({gate.bigram:.2f})."
    )


def _diverged(report: ReportData) -> list[str]:
    """The arms with a replicate that diverged."""
    return list(dict.fromkeys(run.arm for run in report.runs if run.role != "trial" and run.status == "diverged"))


def _nothing_yet(report: ReportData, arms: Mapping[str, ArmData]) -> str:
    done, planned = finished_replicates(report)
    if done < planned:
        return f"No verdict yet: {done} of {words.replicates(planned)} {'has' if planned == 1 else 'have'} finished so far."
    gate = report.gate
    if gate is None or gate.passed is None:
        return "No verdict: whether the control was trained is not known."
    reasons = {arm.no_verdict for arm in arms.values()}
    said = f"No verdict: {'; '.join(reasons)}."
    return said if len(reasons) == 1 and _fits(said) else f"No verdict on any of {len(arms)} arms."


def _by_arms(report: ReportData, arms: Mapping[str, ArmData]) -> str:
    found, equal = _compared(arms, report.charge), at_equal(report.charge)
    by = _by_verdict(found)
    without = [name for name in arms if name not in found or found[name].verdict is None]
    if not by["better"] and not by["worse"]:
        n = report.arms[report.control].replicates_planned
        if len(found) == 1 and not without:
            ((name, one),) = found.items()
            return f"{_capital(equal)}, {name} against {report.control} is undecided ({_effect(one)} nats, {n} replicates)."
        if not by["undecided"]:
            decided = sum(one.comparison is not None and bool(one.comparison.verdict) for one in report.contrasts)
            against = f"No verdict on any arm against {report.control}"
            return f"{against}; {decided} of {len(report.contrasts)} contrasts between arms have one."
        rest = f"; {len(without)} without verdict" if without else ""
        undecided = f"all {len(by['undecided'])}" if len(by["undecided"]) > 1 else by["undecided"][0]
        return (
            f"{_capital(equal)}, no arm differs detectably from {report.control}: {undecided} undecided with "
            f"{words.replicates(n)}{rest}."
        )
    parts = [f"{word} for {_listed([_named(name, found[name]) for name in by[kind]])}" for kind, word in _WORDS if by[kind]]
    parts += [f"undecided for {_listed(by['undecided'])}"] if by["undecided"] else []
    parts += [f"no verdict on {_listed(without)}"] if without else []
    # Writes the unit once, with the first number.
    found_so = "the loss is" if by["better"] else f"{_NONE_LOWERS}: it is"
    full = f"{_capital(equal)} {found_so} {', '.join(parts)}.".replace(")", " nats)", 1)
    return full if _fits(full) else _counted(found, by, len(arms), len(without), equal, {one.arm for one in report.asked})


_WORDS = (("better", "lower"), ("worse", "higher"))
_NONE_LOWERS = "no arm is shown to lower the loss"


def _counted(found: Compared, by: Mapping[str, Sequence[str]], n: int, without: int, equal: str, asked: Set[str]) -> str:
    """The numbers of arms by verdict, behind that of the one arm that all contrasts of the study ask about."""
    better, worse, undecided = (by[kind] for kind in ("better", "worse", "undecided"))
    lower = f"{len(better)} of {n} arms {_verb('lower', better)} the loss"
    parts = [f"{lower}{_most(found, better)}" if better else _NONE_LOWERS]
    parts += [f"{len(worse)} {_verb('raise', worse)} it{'' if better else _most(found, worse)}"] if worse else []
    rest = [f"{len(undecided)} undecided"] if undecided else []
    rest += [f"{without} without verdict"] if without else []
    start, subject = _capital(equal), next(iter(asked), "")
    said = [[*parts, *rest], [*parts, f"{len(undecided) + without} open"]]
    if len(asked) == 1 and subject in found and (verdict := found[subject].verdict):
        one = f"{subject} is {verdict} ({_effect(found[subject])})"
        # Arms that lose are not left out for the name of the best.
        counts = [f"{lower}, {len(worse)} {_verb('raise', worse)} it"] if better and worse else []
        said = [[one, *parts, *rest], [one, *parts], [one, *(counts or parts[:1])], *said]
    sentences = [f"{start}, {'; '.join(each)}.".replace(")", " nats)", 1) for each in said]
    return next(filter(_fits, sentences), sentences[-1])


def _fits(sentence: str) -> bool:
    return len(sentence.split()) <= MOST_WORDS


def _verb(verb: str, arms: Sequence[str]) -> str:
    return f"{verb}s" if len(arms) == 1 else verb


def _most(found: Compared, names: Sequence[str]) -> str:
    """The arm with the largest difference."""
    return f"{', most' if len(names) > 1 else ':'} {_named(names[0], found[names[0]])}" if names else ""


def _by_contrasts(report: ReportData) -> str:
    found = [one.comparison for one in report.contrasts if one.comparison is not None]
    by = {kind: sum(one.verdict == kind for one in found) for kind in ("better", "worse", "undecided")}
    return (
        f"Of {len(report.contrasts)} comparisons with a companion, {by['better']} favour the arm, {by['worse']} its companion, "
        f"and {by['undecided']} are undecided."
    )


def _with_numbers(report: ReportData, arms: Mapping[str, ArmData]) -> str:
    found = _compared(arms, report.charge)
    by, parts = _by_verdict(found), []
    for kind, word in _WORDS:
        if by[kind]:
            named = "; ".join(f"{name} ({_numbers(found[name])})" for name in by[kind][:NAMED])
            more = f"; and {len(by[kind]) - NAMED} more" if len(by[kind]) > NAMED else ""
            parts.append(f"{word} for {named}{more}")
    start, suggestive = f"{_capital(at_equal(report.charge))}, ", [name for name, one in found.items() if one.suggestive]
    tail = f" Suggestive: {', '.join(suggestive)}, whose own 95 % interval excludes zero." if suggestive else ""
    if not parts:
        if not by["undecided"]:
            return ""
        widest = max((ends[1] - ends[0] for one in found.values() if (ends := one.simultaneous)), default=None)
        width = "" if widest is None else f" (simultaneous intervals up to {words.loss(widest)} nats per token wide)"
        return f"{start}no arm differs detectably from {report.control}{width}.{tail}"
    undecided = f"; undecided for {', '.join(by['undecided'])}" if by["undecided"] else ""
    return f"{start}the validation loss is {', and '.join(parts)}{undecided}, each against {report.control}.{tail}"


def _in_words(arms: Mapping[str, ArmData], charge: Charge) -> str:
    by = _by_verdict(_compared(arms, charge))
    said = [f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} {kind}" for kind, names in by.items() if names]
    return f"{_capital(at_equal(charge))}, {'; '.join(said)}." if said else ""


def _against_companions(report: ReportData) -> list[str]:
    """The results against companions, by matched cost."""
    found = []
    for matched in dict.fromkeys(one.matched for one in report.contrasts):
        by: dict[str, list[str]] = {"better": [], "worse": [], "undecided": []}
        for one in report.contrasts:
            if one.matched == matched and one.comparison is not None and one.comparison.verdict:
                numbers = "" if one.comparison.verdict == "undecided" else f" ({_numbers(one.comparison)})"
                by[one.comparison.verdict].append(f"{one.arm} against {one.against}{numbers}")
        said = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in by.items() if names)
        if said:
            equal = next((f" {at_equal(charge)}" for charge in UNITS if charge == matched), "")
            found.append(f"Arm against arm{equal}: {said}.")
    return found


def _compared(arms: Mapping[str, ArmData], charge: Charge) -> dict[str, ComparisonData]:
    return {name: one.comparison for name, arm in arms.items() if (one := arm.charged.get(charge)) and one.comparison}


def _by_verdict(found: Compared) -> dict[str, list[str]]:
    """The arms of each verdict, the largest difference first."""
    order = sorted(found, key=lambda name: abs(found[name].mean_difference), reverse=True)
    return {kind: [name for name in order if found[name].verdict == kind] for kind in ("better", "worse", "undecided")}


def _named(name: str, one: ComparisonData) -> str:
    return f"{name} ({_effect(one)})"


def _effect(one: ComparisonData) -> str:
    # A decided effect keeps its sign, however small.
    shown = round(one.mean_difference, 3) or one.mean_difference
    return words.signed(shown).rstrip("0").rstrip(".") if shown else "0"


def _numbers(one: ComparisonData) -> str:
    low, high = one.simultaneous or one.ci95 or (one.mean_difference, one.mean_difference)
    kind = "simultaneous interval" if one.simultaneous else "95 % interval"
    return f"{words.signed(one.mean_difference)} nats per token, {kind} {words.interval(low, high)}"


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
