"""What a study has found, in sentences for a reader who has not seen the design."""

from collections.abc import Sequence

from twoaxis.study import words
from twoaxis.study.design import StudyConfig
from twoaxis.study.folder import RunRecord
from twoaxis.study.pairing import Pair
from twoaxis.study.plan import PlannedContrast, StudyPlan
from twoaxis.study.report_data import ArmData, Charge, ComparisonData, ReportData
from twoaxis.study.statistics import MOST_REPLICATES, TARGET_POWER

EQUALLY: dict[Charge, str] = {"tokens": "at equal tokens", "flops": "at equal FLOPs", "seconds": "at equal seconds"}

NAMED = 3
"""Arms that an answer names of each verdict; more are counted."""


def decision_rule(study: StudyConfig) -> str:
    """The rule by which the verdicts are reached, as it was fixed before the first run."""
    rule, n, arms = study.decision, len(study.replicates), len(study.treatments)
    return (
        f"An arm is better (worse) than {study.control} when, {EQUALLY[rule.charge]}, the mean over {n} paired replicates of "
        f"its validation loss minus the control's is below (above) zero and a two-sided paired t test rejects a zero mean at "
        f"alpha = {rule.alpha:g} after Holm's correction for {arms} comparison{'s' if arms > 1 else ''}; otherwise it is "
        f"undecided. A difference of {rule.smallest_effect:g} nats per token is the smallest that matters. Arms, number of "
        "replicates, budget and rule were fixed before the first run. Generated companions are corrected among themselves."
    )


def answer(report: ReportData) -> str:
    """What came out, in one or two sentences with intervals."""
    treatments = {name: arm for name, arm in report.arms.items() if arm.role == "treatment"}
    open_arms = [name for name, arm in treatments.items() if arm.verdict is None]
    if len(open_arms) == len(treatments):
        return f"No answer yet: all {len(open_arms)} arms lack a verdict, since runs are missing or cannot be charged."
    first = _answer_by(report, treatments, report.charge)
    others: list[Charge] = [charge for charge in EQUALLY if charge != report.charge]
    sentences = [first, *(_beside(treatments, charge) for charge in others)]
    if open_arms:
        sentences.append(f"No verdict on {', '.join(open_arms)}.")
    if len({contrast.why for contrast in report.contrasts}) == 1:
        # A study with one kind of companion asks about it, and not about the control.
        sentences = _against_companions(report) or sentences
    return " ".join(sentence for sentence in sentences if sentence)


def _against_companions(report: ReportData) -> list[str]:
    """What the arms come to against their companions, by what was matched."""
    found = []
    for matched in dict.fromkeys(contrast.matched for contrast in report.contrasts):
        by: dict[str, list[str]] = {"better": [], "worse": [], "undecided": []}
        for one in report.contrasts:
            if one.matched == matched and one.comparison is not None:
                told = "" if one.comparison.verdict == "undecided" else f" ({_numbers(one.comparison)})"
                by[one.comparison.verdict].append(one.arm + told)
        said = "; ".join(f"{verdict} for {', '.join(names)}" for verdict, names in by.items() if names)
        if said:
            equal = {"flops": " at equal FLOPs", "seconds": " at equal seconds"}.get(matched, "")
            found.append(f"Against its companion{equal} ({report.contrasts[0].why}), an arm is {said}.")
    return found


def _answer_by(report: ReportData, arms: dict[str, ArmData], charge: Charge) -> str:
    found = {name: one.comparison for name, arm in arms.items() if (one := arm.charged.get(charge)) and one.comparison}
    parts = []
    for verdict, word in (("better", "lower"), ("worse", "higher")):
        chosen = sorted(
            ((name, one) for name, one in found.items() if one and one.verdict == verdict),
            key=lambda pair: abs(pair[1].mean_difference),
            reverse=True,
        )
        if chosen:
            named = "; ".join(f"{name} ({_numbers(one)})" for name, one in chosen[:NAMED])
            more = f"; and {len(chosen) - NAMED} more" if len(chosen) > NAMED else ""
            parts.append(f"{word} for {named}{more}")
    undecided = [name for name, one in found.items() if one and one.verdict == "undecided"]
    start = f"{_capital(EQUALLY[charge])}, "
    if not parts:
        widest = max((one.ci95[1] - one.ci95[0] for one in found.values() if one and one.ci95), default=None)
        width = "" if widest is None else f" (95 % intervals up to {words.loss(widest)} nats per token wide)"
        return f"{start}no arm is told apart from {report.control}{width}: all {len(undecided)} are undecided."
    tail = "" if not undecided else f"; undecided for {', '.join(undecided)}"
    return f"{start}the validation loss is {', and '.join(parts)}{tail}, each against {report.control} in nats per token."


def _beside(arms: dict[str, ArmData], charge: Charge) -> str:
    found = {name: one.comparison for name, arm in arms.items() if (one := arm.charged.get(charge)) and one.comparison}
    if not found:
        return ""
    by = {
        verdict: [name for name, one in found.items() if one.verdict == verdict] for verdict in ("better", "worse", "undecided")
    }
    said = [f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} {verdict}" for verdict, names in by.items() if names]
    return f"{_capital(EQUALLY[charge])}, {'; '.join(said)}."


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _numbers(one: ComparisonData) -> str:
    low, high = one.ci95 or (one.mean_difference, one.mean_difference)
    return f"{words.signed(one.mean_difference)}, 95 % interval {words.interval(low, high)}"


def verdict_sentence(study: StudyConfig, name: str, comparison: ComparisonData | None, no_verdict: str) -> str:
    """What was found about one arm against the control, by the charge that decides."""
    if comparison is None:
        return f"{name}: no verdict, {no_verdict}."
    return f"{name}: {_found(study, study.control, comparison, f'{EQUALLY[study.decision.charge]}, ')}"


def contrast_sentence(study: StudyConfig, contrast: PlannedContrast, comparison: ComparisonData | None, no_verdict: str) -> str:
    """What was found about an arm against one of its companions."""
    if comparison is None:
        return f"{contrast.arm} against {contrast.against}: no verdict, {no_verdict}."
    return f"{contrast.arm}: {_found(study, contrast.against, comparison, '')}"


def _found(study: StudyConfig, other: str, comparison: ComparisonData, charged: str) -> str:
    if comparison.ci95 is None:
        return (
            f"undecided. Every replicate differs from {other} by exactly {words.signed(comparison.mean_difference)} nats per "
            "token: the seeds change nothing, so they cannot tell chance from effect."
        )
    n = len(comparison.paired_differences)
    found = (
        f"{charged}mean difference {words.signed(comparison.mean_difference)} nats per token, 95 % interval "
        f"{words.interval(*comparison.ci95)}, {words.replicates(n)}, corrected p {words.probability(comparison.p_holm)}"
    )
    if comparison.verdict == "undecided":
        return f"undecided against {other} ({found}). {_what_would_decide(study, comparison)}"
    direction = "lower" if comparison.mean_difference < 0 else "higher"
    small = abs(comparison.mean_difference) < study.decision.smallest_effect
    tail = " The difference is smaller than the smallest that matters here." if small else ""
    return f"{comparison.verdict} than {other}, its validation loss is {direction} ({found}).{tail}"


def _what_would_decide(study: StudyConfig, comparison: ComparisonData) -> str:
    assert comparison.ci95 is not None
    (low, high), effect, n = comparison.ci95, study.decision.smallest_effect, len(comparison.paired_differences)
    sentences = []
    if low > 0 or high < 0:
        sentences.append(
            "The interval of this arm alone leaves zero out, but not with the certainty that several comparisons ask for."
        )
    if -effect < low and high < effect:
        sentences.append(f"Any difference is smaller than {effect:g} nats per token, the smallest that matters here.")
    needed = comparison.replicates_needed or MOST_REPLICATES
    if needed >= MOST_REPLICATES:
        sentences.append(f"No practical number of replicates would find a difference of {effect:g} nats per token.")
    elif needed > n:
        sentences.append(
            f"About {words.replicates(needed)} would find a true difference of {effect:g} nats per token with power "
            f"{TARGET_POWER:g}; {n} find it with power {words.probability(comparison.power)}."
        )
    else:
        sentences.append(
            f"{words.replicates(n)} find a true difference of {effect:g} nats per token with power "
            f"{words.probability(comparison.power)}, so the true one is probably smaller."
        )
    sentences.append(
        f"This rests on the standard deviation of {n} differences, {words.loss(comparison.sd_difference)} nats per token"
        + (", which so few know only roughly." if n < 5 else ".")
    )
    return " ".join(sentences)


def pairing_sentence(pairs: Sequence[Pair]) -> str:
    """Whether the runs that were compared are pairs."""
    broken = [pair for pair in pairs if pair.problems]
    if broken:
        problems = "; ".join(f"{pair.place}: {', '.join(pair.problems)}" for pair in broken)
        return f"ERROR: the pairing is broken, so these arms get no verdict. {problems}."
    if not pairs:
        return "No pair of runs has finished yet, so the pairing could not be verified."
    shared = sorted({pair.shared for pair in pairs})
    range_ = f"{shared[0]}" if len(shared) == 1 else f"{shared[0]} to {shared[-1]}"
    return (
        f"Verified for all {len(pairs)} pairs of finished runs: same corpus, tokenizer and order of the data, and the "
        f"same initial values of the {range_} parameter tensors that an arm shares with the control."
    )


def limits(study: StudyConfig, plan: StudyPlan, records: Sequence[RunRecord]) -> list[str]:
    """What the evidence does not reach."""
    recipe = plan.control.train_config(plan.control.seeds[0])
    kinds = recipe.to_data()
    corpus, schedule = kinds["data"]["corpus"]["kind"], kinds["schedule"]["kind"]
    shown = plan.of_role("control", "treatment", "companion")
    parameters = [arm.parameters for arm in shown]
    tokens = sorted({arm.tokens for arm in shown})
    read = words.count(tokens[0]) if len(tokens) == 1 else f"{words.count(tokens[0])} to {words.count(tokens[-1])}"
    found = [
        f"Scale: models of {words.count(min(parameters))} to {words.count(max(parameters))} parameters, {read} tokens per run "
        f"on the corpus '{corpus}'. Rankings at this scale need not hold at another.",
        f"Seeds: {words.replicates(len(study.replicates))} per arm. The interval covers other seeds of the same recipe, not "
        "other recipes, corpora or sizes.",
        _learning_rates(study, recipe.optimizer.lr, schedule),
        f"Validation on at most {words.count(recipe.validation_tokens)} tokens, the same for every run; how the loss would "
        "differ on other text is not in the interval.",
        "Seconds and memory are those of this machine, these versions and this implementation; a faster kernel moves an arm.",
    ]
    if study.budget.ladder:
        found.append(
            "Equal FLOPs and seconds: the control's loss at another cost is read off a curve through its own runs at "
            f"{len(study.budget.ladder) + 1} budgets, and never outside them."
        )
    else:
        found.append("Equal tokens, not equal compute: the control was run at one budget, so other charges are not available.")
    different = _different_environments(records)
    return [*found, different] if different else found


def _learning_rates(study: StudyConfig, lr: float, schedule: str) -> str:
    if study.tuning is not None:
        n = len(study.tuning.lr)
        return (
            f"Recipe: the learning rate of each arm is the best of {n}, by one trial each with another seed; a finer grid or "
            f"other parts of the recipe (schedule '{schedule}') might move an arm."
        )
    return (
        f"Recipe: learning rate {lr:g} and schedule '{schedule}' of the control were given, not tuned for each arm alike, so "
        "an arm that needs another learning rate may be at a disadvantage."
    )


def overturn(study: StudyConfig) -> str:
    """What would change the conclusions."""
    tuned = (
        "a finer search of the learning rate"
        if study.tuning
        else "a learning rate tuned for the control and for each arm alike"
    )
    return (
        f"Another study with the same rule and other seeds whose interval lies on the other side of zero; {tuned} that "
        "reverses a difference; or the same comparison at more tokens, with a larger model, or on other text."
    )


def _different_environments(records: Sequence[RunRecord]) -> str:
    environments = [run.environment for run in records if run.environment]
    keys = sorted({key for environment in environments for key in environment})
    differing = [key for key in keys if any(environment.get(key) != environments[0].get(key) for environment in environments)]
    return f"Environment: the runs were not made in the same one; {', '.join(differing)} differ." if differing else ""
