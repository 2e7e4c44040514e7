"""The results of a study: differences by arm, at equal cost, speedups, companions, losses along training, and audits."""

from collections.abc import Mapping, Sequence

from twoaxis.audit.result import Ablation, Audit
from twoaxis.display import numbers as words
from twoaxis.display.html import (
    Cell,
    Markup,
    Number,
    Reason,
    alternatives,
    breakable,
    bullets,
    details,
    figure,
    joined,
    number,
    paragraph,
    table,
)
from twoaxis.study.figures import Figure
from twoaxis.study.figures.audits import audit_name, read_audit
from twoaxis.study.report.text_tables import ACCURACY_COLUMNS
from twoaxis.study.report_data import UNITS, Charge, ComparisonData, ContrastData, ReportData, SpeedupData

COMPARED = ("difference", "simultaneous interval", "verdict", "family", "own 95 %", "bootstrap", "p, corrected", "power")
"""The columns of a comparison."""

Figures = Mapping[str, Figure]


def result(data: ReportData) -> str:
    """Every arm against the control, by the decision rule."""
    rows = []
    for name, arm in data.arms.items():
        found = arm.charged.get(data.charge)
        compared = _compared(found.comparison if found else None, "control" if arm.control else arm.no_verdict or "no verdict")
        replicates = f"{arm.replicates} of {arm.replicates_planned}"
        rows.append((name, number(arm.mean_loss, words.loss), Number(replicates, arm.replicates), *compared))
    columns = ("arm", "validation loss", "replicates", *COMPARED)
    caption = (
        f"Result by arm at equal {UNITS[data.charge]}. Losses and differences in nats per token; difference: mean over "
        "replicates of the arm's loss minus the control's with the same seed, below zero is better."
    )
    sentences = [one.sentence for one in (*data.arms.values(), *data.asked) if one.sentence]
    parts = [(f"equal {name}", _equal_cost_table(data, charge)) for charge, name in UNITS.items()]
    return joined(
        table(caption, columns, rows, text=("verdict",)),
        _contrasts(data.asked, "Arms minus arms, as the study asks, in nats per token; below zero the first is better."),
        _accuracies(data),
        alternatives("charged at", parts),
        details("The verdicts in sentences", bullets((*data.findings, *sentences))),
    )


def cost(data: ReportData, figures: Figures) -> str:
    """The arms at equal tokens, FLOPs and seconds, and the fronts of loss against cost."""
    return joined(figure(figures.get("charged")), figure(figures.get("pareto")))


def speedups(data: ReportData, figures: Figures) -> str:
    """Effective speedups, and the control's curve."""
    rows = []
    for name, arm in data.arms.items():
        if arm.speedup:
            cells = [cell for by in ("flops", "seconds") for cell in _speedup(arm.speedup.get(by))]
            rows.append((name, *cells))
    columns = ("arm", "speedup", "95 % interval", "bootstrap", "speedup ", "95 % interval ", "bootstrap ")
    words_in = [column for column in columns if "interval" in column or "bootstrap" in column]
    caption = (
        f"Effective speedup: the cost at which {data.control} reaches the loss of an arm, over the cost of the arm. "
        "Nothing outside the measured budgets is extrapolated."
    )
    groups = (("", 1), ("by FLOPs", 3), ("by seconds", 3))
    fits = [f"By {UNITS[by]} of training: {curve.sentence}" for by, curve in data.curves.items()]
    return joined(
        figure(figures.get("speedup"), heading="none"),
        table(caption, columns, rows, text=words_in, groups=groups) if rows else "",
        figure(figures.get("control-curve")),
        bullets(fits),
    )


def training(figures: Figures) -> str:
    """Losses along training."""
    return figure(figures.get("losses"), heading="none")


def companions(data: ReportData, figures: Figures) -> str:
    """Contrasts with companions, which rule out other explanations."""
    left = [one for one in data.contrasts if one not in data.asked]
    lead = (
        "Each companion isolates one explanation: it lacks the feature in question, or spends the same cost in another way. "
        "Its name in report.json is ARM~KIND@COST."
    )
    caption = "Arms minus their companions, nats per token; below zero means that the arm is better than the companion."
    return joined(
        paragraph(lead if left else "", "lead"),
        figure(figures.get("contrasts"), heading="none"),
        _contrasts(left, caption),
        bullets(found.sentence for found in left if found.comparison is None),
    )


def _contrasts(contrasts: Sequence[ContrastData], caption: str) -> str:
    rows = []
    for found in contrasts:
        compared = _compared(found.comparison, found.no_verdict or "no verdict")
        pair = Markup("{} {}<br>{}").format(breakable(found.arm), words.MINUS, breakable(found.against))
        rows.append((pair, found.why, _matched(found.matched), *compared))
    columns = ("difference of", "what it tells", "matched", *COMPARED)
    return table(caption, columns, rows, text=("matched", "verdict"), long=("what it tells",)) if rows else ""


def _matched(matched: str) -> Cell:
    return {"": "nothing", "flops": "FLOPs"}.get(matched, matched)


def _compared(comparison: ComparisonData | None, why: str) -> tuple[Cell, ...]:
    if comparison is None:
        return (None, None, why if why == "control" else Reason(why), None, None, None, None, None)
    pairs = (comparison.simultaneous, comparison.ci95, comparison.bootstrap95)
    ends = [Number(words.interval(*pair), pair[0]) if pair else None for pair in pairs]
    return (
        number(comparison.mean_difference, words.signed),
        ends[0],
        comparison.remark or Reason(why or "no verdict"),
        number(comparison.family or None, str),
        ends[1] or "no variation",
        ends[2],
        number(comparison.p_holm, words.probability),
        number(comparison.power, words.probability),
    )


def _equal_cost_table(data: ReportData, charge: Charge) -> str:
    rows, written = [], {"tokens": words.count, "flops": words.count, "seconds": words.duration}[charge]
    for name, arm in data.arms.items():
        found = arm.charged.get(charge)
        if found is not None:
            cost = (number(found.cost, written), number(found.cost_ratio, words.ratio))
            rows.append((name, *cost, *_compared(found.comparison, found.unavailable or arm.no_verdict or "no verdict")))
    columns = ("arm", f"{UNITS[charge]} of a run", "to control", *COMPARED)
    caption = f"Every arm against {data.control} at equal {UNITS[charge]}; differences in nats per token, below zero is better."
    return table(caption, columns, rows, text=("verdict",)) if rows else ""


def _speedup(found: SpeedupData | None) -> tuple[Cell, Cell, Cell]:
    if found is None:
        return None, None, None
    value, pair = number(found.value, words.ratio) or found.outside, found.bootstrap95
    return value, _between(found.low, found.high), _between(*pair) if pair else None


def _between(low: float | None, high: float | None) -> Cell:
    if low is None or high is None:
        known = low if low is not None else high
        return None if known is None else f"{'above' if high is None else 'below'} {words.ratio(known)}"
    return f"{words.ratio(low)} to {words.ratio(high)}"


def _accuracies(data: ReportData) -> str:
    rows = [
        (
            name,
            number(sum(arm.accuracies.values()) / len(arm.accuracies), words.percentage),
            ", ".join(map(words.percentage, arm.accuracies.values())),
        )
        for name, arm in data.arms.items()
        if arm.accuracies
    ]
    note = "Share of the answers that were the most likely token, after the last step. It does not affect the verdicts."
    return paragraph(note, "note") + table("Accuracy by arm", ACCURACY_COLUMNS, rows) if rows else ""


COLUMNS = ("without", "in", "replaced by", "loss change", "standard error", "random change", "standard error ")


def inside(data: ReportData, figures: Figures) -> str:
    """One part per audited arm, the control last; the first is open."""
    parts = []
    for name, arm in sorted(data.arms.items(), key=lambda item: item[1].control):
        audit = read_audit(arm)
        if audit is None:
            unread = "an audit of another version, which this report cannot read" if arm.audit else ""
            parts.append(details(f"{name}: {unread}", paragraph("Run twoaxis audit again.")) if unread else "")
            continue
        state = "closed" if any(parts) else "open"
        summary = f"{name}: {_summary(audit)}"
        effort = audit.effort.observe_seconds + audit.effort.gradient_seconds + audit.effort.ablation_seconds
        said = f"{audit.routing_note.rstrip('.')}. " if audit.routing_note else ""
        note = f"{said}The audit took {words.duration(effort)}."
        drawn = figure(figures.get(audit_name(name)), heading="none")
        parts.append(
            details(
                summary, drawn, paragraph(note, "note"), details("All ablations", _ablations(audit)), state=state, kind="card"
            )
        )
    lead = "A large weight need not be a large effect, so sources are also removed and the loss change is shown."
    return joined(paragraph(lead if any(parts) else "", "lead"), *parts)


def _summary(audit: Audit) -> str:
    """Names the ablation with the largest loss change."""
    zeroed = [one for one in audit.ablations if one.what == "sublayer" and one.replacement == "zero"]
    found = [one for one in zeroed if one.loss_change is not None]
    if not found:
        return f"{words.count(audit.tokens)} tokens"
    most = max(found, key=lambda one: one.loss_change or 0.0)
    return f"most needs {audit.sublayer_name(most.sublayer)}, {words.signed(most.loss_change or 0.0)} nats per token without it"


def _ablations(audit: Audit) -> str:
    rows = [_ablation(audit, one) for one in audit.ablations]
    caption = (
        f"Loss change in nats per token when a component is removed, over {audit.sequences} sequences; the random change has "
        "the same norm at every token."
    )
    return table(caption, COLUMNS, rows, text=("in", "replaced by")) if rows else ""


def _ablation(audit: Audit, one: Ablation) -> tuple[Cell, ...]:
    target = f"{one.what} {one.target}" + (f" ({one.choice})" if one.choice else "")
    where = "all sums" if one.what == "embedding" else audit.sublayer_name(one.sublayer)
    change: Cell = "not finite" if one.loss_change is None else Number(words.signed(one.loss_change), one.loss_change)
    random = number(one.control_loss_change, words.signed)
    errors = (number(one.standard_error, words.loss), number(one.control_standard_error, words.loss))
    by = {"mean": "its mean"}.get(one.replacement, one.replacement)
    return (target, where, by, change, errors[0], random, errors[1])
