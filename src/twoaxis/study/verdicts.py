"""What a study has found, in sentences for a reader who has not seen the design."""

from twoaxis.study import words
from twoaxis.study.analysis import Analysis, ArmSummary
from twoaxis.study.statistics import MOST_REPLICATES, TARGET_POWER, Comparison


def decision_rule(analysis: Analysis) -> str:
    """The rule by which the verdicts were reached, as it was fixed before the first run."""
    study, rule = analysis.study, analysis.study.decision
    n, arms = len(study.replicates), len(study.treatments)
    return (
        f"An arm is better (worse) than {study.control} when the mean over {n} paired replicates of its validation loss "
        f"minus the control's is below (above) zero and a two-sided paired t test rejects a zero mean at alpha = "
        f"{rule.alpha:g} after Holm's correction for {arms} comparison{'s' if arms > 1 else ''}; otherwise it is undecided. "
        f"A difference of {rule.smallest_effect:g} nats per token is the smallest that matters here. Number of replicates, "
        "budget and rule were fixed before the first run."
    )


def verdict_sentence(analysis: Analysis, arm: ArmSummary) -> str:
    """What was found about one arm."""
    control, comparison = analysis.study.control, arm.comparison
    if comparison is None:
        return f"{arm.name}: no verdict, {arm.no_verdict}. Run the study again to complete it."
    test = comparison.test
    if not test.varies:
        return (
            f"{arm.name}: undecided. Every replicate differs from {control} by exactly {words.signed(test.mean)} nats per "
            "token: the seeds change nothing, so they cannot tell chance from effect."
        )
    found = (
        f"mean difference {words.signed(test.mean)} nats per token, 95 % interval {words.interval(test.low, test.high)}, "
        f"{words.replicates(test.n)}, corrected p {words.probability(comparison.p_holm)}"
    )
    if comparison.verdict == "undecided":
        return f"{arm.name}: undecided against {control} ({found}). {_what_would_decide(analysis, comparison)}"
    direction = "lower" if test.mean < 0 else "higher"
    small = abs(test.mean) < analysis.study.decision.smallest_effect
    tail = " The difference is smaller than the smallest that matters here." if small else ""
    return f"{arm.name}: {comparison.verdict} than {control}, its validation loss is {direction} ({found}).{tail}"


def _what_would_decide(analysis: Analysis, comparison: Comparison) -> str:
    test, effect = comparison.test, analysis.study.decision.smallest_effect
    sentences = []
    if test.low > 0 or test.high < 0:
        sentences.append(
            "The interval of this arm alone leaves zero out, but not with the certainty that several comparisons ask for."
        )
    if -effect < test.low and test.high < effect:
        sentences.append(f"Any difference is smaller than {effect:g} nats per token, the smallest that matters here.")
    needed = comparison.replicates_needed or MOST_REPLICATES
    if needed >= MOST_REPLICATES:
        sentences.append(f"No practical number of replicates would find a difference of {effect:g} nats per token.")
    elif needed > test.n:
        sentences.append(
            f"About {words.replicates(needed)} would find a true difference of {effect:g} nats per token with power "
            f"{TARGET_POWER:g}; {test.n} find it with power {words.probability(comparison.power)}."
        )
    else:
        sentences.append(
            f"{words.replicates(test.n)} find a true difference of {effect:g} nats per token with power "
            f"{words.probability(comparison.power)}, so the true one is probably smaller."
        )
    sentences.append(
        f"This rests on the standard deviation of {test.n} differences, {words.loss(test.sd)} nats per token"
        + (", which so few know only roughly." if test.n < 5 else ".")
    )
    return " ".join(sentences)


def pairing_sentence(analysis: Analysis) -> str:
    """Whether the runs that were compared are pairs."""
    broken = [pair for pair in analysis.pairs if pair.problems]
    if broken:
        problems = "; ".join(f"{pair.place}: {', '.join(pair.problems)}" for pair in broken)
        return f"ERROR: the pairing is broken, so these arms get no verdict. {problems}."
    if not analysis.pairs:
        return "No pair of runs has finished yet, so the pairing could not be verified."
    shared = sorted({pair.shared for pair in analysis.pairs})
    range_ = f"{shared[0]}" if len(shared) == 1 else f"{shared[0]} to {shared[-1]}"
    return (
        f"Verified for all {len(analysis.pairs)} pairs of finished runs: same corpus, tokenizer and order of the data, and the "
        f"same initial values of the {range_} parameter tensors that an arm shares with the control."
    )


def limits(analysis: Analysis) -> list[str]:
    """What the evidence does not reach."""
    study = analysis.study
    recipe = study.recipe(study.control, study.replicates[0])
    kinds = recipe.to_data()
    corpus, schedule = kinds["data"]["corpus"]["kind"], kinds["schedule"]["kind"]
    parameters = [arm.parameters for arm in analysis.arms if arm.parameters is not None]
    size = f"{words.count(min(parameters))} to {words.count(max(parameters))} parameters" if parameters else "one small size"
    found = [
        f"Scale: models of {size}, {words.count(study.tokens_per_run)} tokens per run on the corpus "
        f"'{corpus}'. Rankings at this scale need not hold at another.",
        f"Seeds: {words.replicates(len(study.replicates))} per arm. The interval covers other seeds of the same recipe, not "
        "other recipes, corpora or sizes.",
        f"Recipe: learning rate {recipe.optimizer.lr:g} and schedule '{schedule}' of the control were given, not tuned for "
        "each arm alike, so an arm that needs another learning rate may be at a disadvantage.",
        "Equal tokens, not equal compute: FLOPs per token, speed and memory differ between arms and are charged nowhere in "
        "the verdict; the cost figure shows them.",
        f"Validation on at most {words.count(recipe.validation_tokens)} tokens, the same for every run; how the loss would "
        "differ on other text is not in the interval.",
        "Speed and memory are those of this machine and these versions, one run per replicate; differences of a few percent "
        "may be noise.",
    ]
    different = _different_environments(analysis)
    return [*found, different] if different else found


def overturn(analysis: Analysis) -> str:
    """What would change the conclusions."""
    return (
        "Another study with the same rule and other seeds whose interval lies on the other side of zero; a learning rate "
        f"tuned for {analysis.study.control} and for each arm alike that reverses a difference; or the same comparison at more "
        "tokens, a larger model, equal FLOPs or equal seconds."
    )


def _different_environments(analysis: Analysis) -> str:
    environments = [run.environment for run in analysis.runs if run.environment]
    keys = sorted({key for environment in environments for key in environment})
    differing = [key for key in keys if any(environment.get(key) != environments[0].get(key) for environment in environments)]
    return f"Environment: the runs were not made in the same one; {', '.join(differing)} differ." if differing else ""
