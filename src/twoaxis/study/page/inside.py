"""Audits of the arms: routing, gates and streams, with loss changes under ablation."""

from twoaxis.audit.result import Ablation, Audit
from twoaxis.display import numbers as words
from twoaxis.display.html import Cell, Number, details, figure, number, paragraph, section, table
from twoaxis.study.figures.audits import audit_name, read_audit
from twoaxis.study.page.results import Figures
from twoaxis.study.report_data import ReportData

COLUMNS = ("without", "in", "replaced by", "loss change", "standard error", "random change", "standard error ")


def inside(data: ReportData, figures: Figures) -> str:
    """One part per audited arm, the control last; the first is open."""
    parts = []
    for name, arm in sorted(data.arms.items(), key=lambda item: item[1].control):
        audit = read_audit(arm)
        if audit is None:
            unread = "an audit of another version, which this report cannot read" if arm.audit else ""
            parts.append(details(f"{name}: {unread}", paragraph("Run `twoaxis audit` again.")) if unread else "")
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
    return section("inside", "Inside the arms", *parts, lead=lead if any(parts) else "")


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
