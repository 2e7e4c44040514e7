"""Prints the plan of a model: its setting, its ledger, every method, and the recommendation with its evidence."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from twoaxis.display.numbers import bytes_text as _bytes
from twoaxis.display.numbers import change as _change
from twoaxis.display.numbers import count_text as _count
from twoaxis.display.numbers import percent
from twoaxis.display.numbers import seconds_text as _seconds
from twoaxis.display.tables import print_item, print_table

if TYPE_CHECKING:
    from twoaxis.planner.advice import Recommendation, WhatIf
    from twoaxis.planner.comparison import MethodCost
    from twoaxis.planner.evidence import Side, StudyEvidence
    from twoaxis.planner.model_plan import ModelPlan

METHODS = (
    *("method", "goal", "at init", "step", "prefill", "token", "memory/GPU", "parameters", "FLOPs/token"),
    *("boundary", "cache", "over"),
)
NUMBERS = METHODS[3:-1]
FLOPS = {
    "all": "in all",
    "matmul": "in matrix products",
    "pairs": "in attention (quadratic)",
    "elementwise": "elementwise",
    "depth": "in depth operations",
}
SHOWN_ALTERNATIVES = 3

TITLES: "dict[Side, str]" = {
    "for": "For it",
    "against": "Against it",
    "mixed": "For it in some comparisons, against it in others",
    "undecided": "Undecided",
    "withdrawn": "Withdrawn, so neither for nor against it",
}

SHOWN_PAIRS = 4


def print_model_plan(planned: "ModelPlan") -> None:
    """Prints a plan as text."""
    _print_setting(planned)
    print()
    _print_ledger(planned)
    print()
    _print_methods(planned)
    for each in planned.comparison.refused:
        print_item(f"refused: {each.method.name}: {each.reason}", "")
    print()
    if planned.recommendation is None:
        print_item("`--goal shortcut`, `local-mixing` or `both` adds the paper's recommendation, and what would change it.", "")
    else:
        _print_recommendation(planned.recommendation, planned.comparison.control)


def _print_setting(planned: "ModelPlan") -> None:
    from twoaxis.planner.search import RESERVE

    setting, layout, control = planned.setting, planned.setting.layout, planned.comparison.control
    size, held = setting.batch // (layout.data * layout.microbatches), setting.device.memory_bytes.value
    stages = f" with {layout.virtual} stages each" if layout.virtual > 1 else ""
    rows = [
        ("devices", f"{layout.gpus} x {setting.device.name}: {setting.device.description}"),
        ("layout", f"{layout.data} data x {layout.pipeline} pipeline{stages} x {layout.tensor} tensor"),
        ("schedule", f"{setting.run['schedule']}, depth state sent {setting.forwarding}"),
        (
            "training step",
            f"{setting.batch} sequences of {setting.tokens} tokens; {layout.microbatches} microbatches of {size}",
        ),
        ("memory saved by", f"sharding {setting.sharding}, sequence {layout.sequence}, recompute {setting.recompute}"),
        ("depth operations", setting.engine),
        (
            "generation",
            f"{planned.prompts} sequences after {setting.tokens} tokens, on {layout.tensor} tensor ranks; the same in prefill",
        ),
        ("control", f"{_seconds(control.step_seconds)} a step, {percent(planned.flops_share)} of peak FLOPs"),
        (
            "of that",
            f"{percent(control.bubble)} bubble, {_seconds(control.exposed_seconds)} exposed messages between stages",
        ),
        (
            "memory",
            f"{_bytes(control.memory_bytes)} of the {_bytes(held * (1 - RESERVE))} allowed: {_bytes(held)} less a reserve of "
            f"{percent(RESERVE)}",
        ),
    ]
    print_table(f"{planned.model.name}: where its plain residual stream trains fastest", ("setting", "value"), rows)


def _print_ledger(planned: "ModelPlan") -> None:
    counts, model = planned.ledger, planned.model
    params, flops, depth = counts.params, counts.forward_flops, counts.depth
    state, training = sorted(counts.state_bytes), counts.training_flops_per_token
    recomputed = counts.recomputed_training_flops_per_token
    stored = (counts.parameter_bytes, counts.gradient_bytes, counts.optimizer_bytes)
    traffic = f"{_bytes(depth.fused_bytes)} per token and sublayer in the mean, {_bytes(depth.largest_fused_bytes)} at most"
    rows = [
        (
            "parameters",
            f"{_count(params['all'])}, {_count(params['non_embedding'])} without embedding, head and tables of tokens, "
            f"{_count(params['used'])} used by a token, {_count(params['depth'])} for depth",
        ),
        ("forward FLOPs per token", ", ".join(f"{_count(flops[name])} {word}" for name, word in FLOPS.items())),
        ("training FLOPs per token", f"{_count(training)}; {_count(recomputed)} with recomputed blocks"),
        ("weights, gradients, optimizer", ", ".join(_bytes(each) for each in stored)),
        (
            "saved for backward",
            f"{_bytes(counts.saved_bytes)}; {_bytes(counts.recomputed_saved_bytes)} with recomputed blocks",
        ),
        ("cache", f"{_bytes(counts.cache_bytes_per_token)} per token, {_bytes(counts.cache_bytes)} per sequence"),
        ("depth state between blocks", f"{_bytes(state[0])} to {_bytes(state[-1])} per token"),
        ("depth traffic, fused", traffic),
        *([("depth traffic, eager", f"not counted: {depth.eager_refused}")] if depth.eager_refused else []),
    ]
    title = f"Ledger of {model.name} as given (depth {model.depth.kind}), one sequence of {counts.tokens} tokens"
    print_table(title, ("count", "value"), rows)


def _print_methods(planned: "ModelPlan") -> None:
    costs = planned.costs
    rows = [_row(cost) for cost in costs]
    # Columns of zeros or blanks alone are left out.
    kept = [at for at in range(len(METHODS)) if any(row[at] not in ("", "0") for row in rows)]
    columns = [METHODS[at] for at in kept]
    title = "Methods, cheapest training step first; percentages and parameters are beyond the control's"
    cells = [[row[at] for at in kept] for row in rows]
    print_table(title, columns, cells, [name for name in columns if name in NUMBERS], whole=("method",))
    exceeded = {name for cost in costs for name in cost.over}
    for name, text in _limits(planned).items():
        if name in exceeded:
            print_item(f"over {name}: {text}", "")
    if not planned.fits_budget:
        least, fastest = min(costs, key=lambda cost: cost.memory_bytes), min(costs, key=lambda cost: cost.token_seconds)
        print_item(
            f"Nothing fits the budget, the control included: the least memory is {_bytes(least.memory_bytes)} ({least.name}), "
            f"the shortest token takes {_seconds(fastest.token_seconds)} ({fastest.name}); raise the budget, or arrange the "
            "model on other devices.",
            "",
        )


def _limits(planned: "ModelPlan") -> dict[str, str]:
    from twoaxis.planner.search import RESERVE

    setting, budget = planned.setting, planned.budget
    held = f"{_bytes(setting.device.memory_bytes.value * (1 - RESERVE))} of a GPU"
    return {
        "device": f"more in training than {held}, in the arrangement of the control",
        "generation": f"weights and caches take more than {held} on {setting.layout.tensor} tensor ranks",
        "memory": f"more in training than the budget of {_bytes(budget.memory_bytes or 0)}",
        "latency": f"a token takes more than the budget of {_seconds(budget.latency_seconds or 0)}",
    }


def _row(cost: "MethodCost") -> Sequence[str]:
    control = cost.goal == "control"
    return (
        cost.name,
        cost.goal,
        cost.at_initialisation.replace("_", " "),
        _seconds(cost.step_seconds) if control else _change(cost.step_overhead),
        _seconds(cost.prefill_seconds) if control else _change(cost.prefill_overhead),
        _seconds(cost.token_seconds) if control else _change(cost.token_overhead),
        _bytes(cost.memory_bytes),
        _count(cost.params if control else cost.added_params),
        _count(cost.training_flops_per_token) if control else _change(cost.flops_overhead),
        _bytes(cost.boundary_bytes),
        _bytes(cost.cache_bytes),
        ", ".join(cost.over),
    )


def _print_recommendation(found: "Recommendation", control: "MethodCost") -> None:
    from twoaxis.planner.advice import SOURCE

    print_item(f"Recommended for {found.goal}: {found.method} ({SOURCE}: {found.reason})", "")
    if found.cost is None:
        print_item(f"It does not fit this model: {found.refusal}", "")
    else:
        _print_cost(found, found.cost, control)
        _print_what_ifs(found)
    print()
    print_evidence(found.studies)


def _print_cost(found: "Recommendation", cost: "MethodCost", control: "MethodCost") -> None:
    sent = f", {_bytes(cost.boundary_bytes)} of a microbatch over a stage boundary" if cost.boundary_bytes else ""
    sent += f", {_bytes(cost.data_bytes)} of gradients and weights sent by a GPU in a step" if cost.data_bytes else ""
    print_item(
        f"Here it adds {_change(cost.step_overhead)} to a training step, {_change(cost.prefill_overhead)} to prefill and "
        f"{_change(cost.token_overhead)} to a token, with {_change(cost.flops_overhead)} FLOPs and {_count(cost.added_params)} "
        f"parameters; {_bytes(cost.memory_bytes)} a GPU{sent}.",
        "",
    )
    said = [f"By the training step it is number {found.rank} of {found.of} for this goal."]
    for word, others in (("Cheaper", found.cheaper), ("More expensive", found.dearer)):
        if others:
            shown = ", ".join(f"{each.name} {_change(each.step_overhead)}" for each in others[:SHOWN_ALTERNATIVES])
            more = len(others) - SHOWN_ALTERNATIVES
            said.append(f"{word}: {shown}{f', and {more} more' if more > 0 else ''}.")
    print_item(" ".join(said), "")
    if cost.over:
        so_is = "; so is the control" if set(cost.over) <= set(control.over) else ""
        instead = (
            f"Within all limits, the cheapest for this goal is {found.instead.name}, {_change(found.instead.step_overhead)}."
            if found.instead
            else "No method of this goal is within all limits."
        )
        print_item(f"It is over: {', '.join(cost.over)}{so_is}. {instead}", "")
    if found.own is not None:
        own, layout = found.own, found.own.setting.layout
        print_item(
            f"Arranged for itself it fits, at {_change(own.step_overhead)} over the control and {_bytes(own.memory_bytes)}: "
            f"{layout.data} data x {layout.pipeline} pipeline x {layout.tensor} tensor, {layout.microbatches} microbatches, "
            f"recompute {own.setting.recompute}, sharding {own.setting.sharding}.",
            "",
        )


def _print_what_ifs(found: "Recommendation") -> None:
    changed = [each for each in found.what_ifs if each.matters]
    same = [each.change for each in found.what_ifs if not each.matters and not each.impossible]
    if changed:
        print("What would change that:")
    for each in changed:
        print_item(_what_if(each))
    if same:
        print_item(f"Neither its rank nor its verdict changes with: {'; '.join(same)}.", "")
    for each in found.what_ifs:
        if each.impossible:
            print_item(f"Not possible: {each.change}: {each.impossible}", "  ")


def _what_if(each: "WhatIf") -> str:
    rank = (
        f"number {each.rank_before} becomes {each.rank} of {each.of}"
        if each.rank != each.rank_before
        else f"still number {each.rank}"
    )
    verdict = ""
    if each.over != each.over_before:
        verdict = f"; over {', '.join(each.over)}" if each.over else "; within all limits"
    return f"{each.change}: {rank}, {_change(each.step_overhead)}{verdict}"


def print_evidence(studies: "Sequence[StudyEvidence]") -> None:
    """Prints the studies of a recommendation, grouped by what they support."""
    from twoaxis.planner.evidence import NATURE, NO_VALID_STUDY

    print_item(f"Evidence. {NATURE}", "")
    if all(study.withdrawn for study in studies):
        print_item(NO_VALID_STUDY, "")
    for side, title in TITLES.items():
        chosen = [study for study in studies if study.side == side]
        if chosen:
            print(f"{title}:")
        for study in chosen:
            _print_study(study)


def _print_study(study: "StudyEvidence") -> None:
    if study.withdrawn:
        print_item(f"{study.name}: {study.withdrawn}. {study.question}")
        return
    print_item(f"{study.name}: {study.question}")
    # Comparisons with the control come first, then decisive ones.
    pairs = sorted(study.pairs, key=lambda pair: (not pair.with_control, pair.verdict not in ("better", "worse")))
    for pair in pairs[:SHOWN_PAIRS]:
        print_item(f"{pair.sentence}.", "  - ")
    if rest := pairs[SHOWN_PAIRS:]:
        counts = {word: sum(pair.verdict == word for pair in rest) for word in ("better", "worse", "undecided", None)}
        said = ", ".join(f"{count} {word or 'without a verdict'}" for word, count in counts.items() if count)
        print_item(f"and {len(rest)} more comparisons: {said}.", "  - ")
    if study.forms:
        print_item(f"Not the form of this plan: {'; '.join(study.forms)}.", "  ")
    print_item(f"Gate passed: {study.gate}. Scale: {study.scale}. All numbers: {study.report}", "  ")
