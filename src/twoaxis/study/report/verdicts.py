"""Sentences on the results of a study, for a reader who has not seen the design."""

from collections import Counter
from collections.abc import Sequence

from twoaxis.display import numbers as words
from twoaxis.statistics import MOST_REPLICATES, TARGET_POWER
from twoaxis.study.design import StudyConfig
from twoaxis.study.planning.study_plan import PlannedContrast, StudyPlan
from twoaxis.study.report.answer import at_equal
from twoaxis.study.report.validity import Pair
from twoaxis.study.report_data import ComparisonData
from twoaxis.study.running.study_folder import RunRecord
from twoaxis.study.statistics import family_size


def decision_rule(study: StudyConfig, plan: StudyPlan) -> str:
    """States the decision rule, which was fixed before the first run."""
    rule, n, arms, size = study.decision, len(study.replicates), len(study.treatments), family_size(plan)
    contrasts = f" and {size - arms} contrasts" if size > arms else ""
    level = f"{100 * (1 - rule.alpha):g} %"
    return (
        f"An arm is better (worse) than {study.control} when, {at_equal(rule.charge)}, the mean over {n} paired replicates of "
        f"its validation loss minus the control's is below (above) zero and a two-sided paired t test rejects a zero mean at "
        f"alpha = {rule.alpha:g} after Holm's correction over one family of {size}: {arms} arm{'s' if arms > 1 else ''} "
        f"against the control{contrasts}; otherwise it is undecided, and suggestive where its own 95 % interval excludes zero. "
        f"The intervals drawn are simultaneous: Bonferroni's at {level} over the family, ended at zero where Holm decides and "
        f"Bonferroni would not, so that they agree with every verdict. A difference of {rule.smallest_effect:g} nats per token "
        "is the smallest that matters. No verdict is given when the control does not beat a count bigram (a synthetic task: "
        "chance and majority) in every replicate, nor on an arm that equals the control exactly at step 0, takes as many "
        "steps, and ends worse in every replicate, nor at equal seconds unless the timings before and after the runs agree. "
        "Arms, number of replicates, budget and rule were fixed before the first run."
    )


def verdict_sentence(
    study: StudyConfig, name: str, comparison: ComparisonData | None, no_verdict: str, so_far: Sequence[float] = ()
) -> str:
    """States the result of one arm against the control; `so_far` are paired differences of an arm without comparison."""
    if comparison is None:
        each = ", ".join(map(words.signed, so_far))
        numbers = f" Differences so far: {each} nats per token." if each else ""
        return f"{name}: no verdict, {no_verdict}.{numbers}"
    if comparison.verdict is None:
        difference = f"mean difference {words.signed(comparison.mean_difference)} nats per token"
        return f"{name}: no verdict, {no_verdict} ({at_equal(study.decision.charge)}, {difference})."
    return f"{name}: {_found(study, study.control, comparison, f'{at_equal(study.decision.charge)}, ')}"


def contrast_sentence(study: StudyConfig, contrast: PlannedContrast, comparison: ComparisonData | None, no_verdict: str) -> str:
    """States the result of one contrast."""
    if comparison is None or comparison.verdict is None:
        return f"{contrast.arm} against {contrast.against}: no verdict, {no_verdict}."
    return f"{contrast.arm}: {_found(study, contrast.against, comparison, '')}"


def _found(study: StudyConfig, other: str, comparison: ComparisonData, equally: str) -> str:
    if comparison.ci95 is None:
        return (
            f"undecided. Every replicate differs from {other} by exactly {words.signed(comparison.mean_difference)} nats per "
            "token: the seeds change nothing, so they cannot tell chance from effect."
        )
    n, ends = len(comparison.paired_differences), comparison.simultaneous or comparison.ci95
    kind = f"simultaneous interval over {comparison.family}" if comparison.simultaneous else "95 % interval"
    found = (
        f"{equally}mean difference {words.signed(comparison.mean_difference)} nats per token, {kind} "
        f"{words.interval(*ends)}, {words.replicates(n)}, corrected p {words.probability(comparison.p_holm)}"
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
    if comparison.suggestive:
        sentences.append(
            f"Suggestive: its own 95 % interval, {words.interval(low, high)}, excludes zero; after correction for "
            f"{comparison.family} comparisons it does not."
        )
    least, most = comparison.simultaneous or comparison.ci95
    if -effect < least and most < effect:
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
        f"The standard deviation, {words.loss(comparison.sd_difference)} nats per token, comes from {n} differences"
        + (" and is uncertain." if n < 5 else ".")
    )
    return " ".join(sentences)


def pairing_sentence(pairs: Sequence[Pair]) -> str:
    """States whether compared runs are pairs."""
    broken = [pair for pair in pairs if pair.problems]
    if broken:
        problems = "; ".join(f"{pair.key}: {', '.join(pair.problems)}" for pair in broken)
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
    """Lists the limits of the evidence."""
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
        _learning_rates(plan, recipe.optimizer.lr, schedule),
        f"Validation on at most {words.count(recipe.validation_tokens)} tokens, the same for every run; how the loss would "
        "differ on other text is not in the interval.",
        "Seconds and memory are those of this machine, these versions and this implementation; a faster kernel moves an arm.",
    ]
    if study.budget.ladder:
        found.append(
            "Equal FLOPs and seconds: the control's loss at another cost is read off a curve through its own runs at "
            f"{len(study.budget.ladder) + 1} budgets, and never outside them."
        )
    elif any(change.of in ("flops", "seconds") for arm in plan.of_role("treatment") for change in arm.changes):
        found.append(
            "The control was run at one budget, so arms are compared with it only at costs that the design makes equal."
        )
    else:
        found.append("Arms are compared at equal tokens, not at equal FLOPs or seconds: the control was run at one budget.")
    different = _different_environments(records)
    return [*found, different] if different else found


def _learning_rates(plan: StudyPlan, lr: float, schedule: str) -> str:
    if trials := Counter(arm.tuned_as for arm in plan.of_role("trial")):
        n = " to ".join(map(str, sorted({min(trials.values()), max(trials.values())})))
        return (
            f"Recipe: the learning rate of each arm is the best of {n}, by one trial each with another seed; a finer grid or "
            f"other parts of the recipe (schedule '{schedule}') might move an arm."
        )
    return (
        f"Recipe: learning rate {lr:g} and schedule '{schedule}' of the control were given, not tuned for each arm alike, so "
        "an arm that needs another learning rate may be at a disadvantage."
    )


def overturn(study: StudyConfig) -> str:
    """States which evidence would change the conclusions."""
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
