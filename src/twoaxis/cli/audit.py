"""`twoaxis audit RUN`: what a trained model does along both axes, and how much each part matters."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from twoaxis.audit.result import Ablation, Audit
from twoaxis.cli.models import Step
from twoaxis.cli.output import Json, name_of, print_json
from twoaxis.display.numbers import loss, signed, significant
from twoaxis.display.tables import print_item, print_table

ZERO, MEAN = (tuple(f"{by}{what}" for what in ("", " +-", " random")) for by in ("zero", "mean"))
"""The change of loss by either replacement, its standard error, and that of a random change of the same size."""


class AuditTable(NamedTuple):
    """One table.

    Attributes:
        title: what it shows.
        columns: their names.
        rows: cells as text.
        numbers: the columns that hold numbers.
    """

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    numbers: tuple[str, ...]


def audit_tables(audit: Audit) -> list[AuditTable]:
    """All tables that are not empty, ablations of sublayers first."""
    tables = [
        _sublayers(audit),
        _removed(audit, "sources taken out of one read, or the embedding out of all", ("source", "embedding")),
        _routing(audit),
        _removed(audit, "local mixers inside sublayers", ("local",)),
        _removed(audit, "streams of the state that enters a sublayer", ("stream",)),
        _gates(audit),
        _streams(audit),
        _attention(audit),
    ]
    return [table for table in tables if table.rows]


def _sublayers(audit: Audit) -> AuditTable:
    columns = ("sublayer", "reads", "writes", "state", "gradient", *ZERO, *MEAN)
    by = {(one.sublayer, one.replacement): one for one in audit.ablations if one.what == "sublayer"}
    rows = []
    for norms in audit.norms:
        cells = (significant(norms.read), significant(norms.update), significant(norms.state), significant(norms.gradient))
        zero, mean = _change(by[norms.sublayer, "zero"]), _change(by[norms.sublayer, "mean"])
        rows.append((audit.sublayer_name(norms.sublayer), *cells, *zero, *mean))
    title = "sublayers: what is read, written and held (rms), its gradient, and the loss change without the update"
    return AuditTable(title, columns, rows, columns[1:])


def _removed(audit: Audit, title: str, sorts: tuple[str, ...]) -> AuditTable:
    columns = ("sublayer", "without", "replaced by", "size", "loss change", "+-", "random")
    rows = []
    for one in audit.ablations:
        if one.what in sorts:
            where = "everywhere" if one.what == "embedding" else audit.sublayer_name(one.sublayer)
            target = f"{one.target} ({one.choice})" if one.choice else one.target
            rows.append((where, target, one.replacement, significant(one.change_norm), *_change(one)))
    return AuditTable(title, columns, rows, columns[3:])


def _routing(audit: Audit) -> AuditTable:
    columns = ("sublayer", "sum", "favourite", "share", "entropy", "most possible", "sources")
    rows = []
    for one in audit.routing:
        if one.role == "read":
            every, n = one.classes["all"], len(one.sources)
            share = one.share[one.sources.index(every.favourite)]
            name = f"{one.result} {one.part}".strip()
            cells = (significant(share), significant(every.entropy), significant(math.log(n)), str(n))
            rows.append((audit.sublayer_name(one.sublayer), name, every.favourite, *cells))
    return AuditTable("what is read, by mean weights", columns, rows, columns[3:])


def _gates(audit: Audit) -> AuditTable:
    columns = ("sublayer", "beta", "near 0", "between", "near 1", "above 1", "distance before", "after")
    rows = []
    for one in audit.gates:
        parts = (f"{part:.0%}" for part in (one.near_0, one.between, one.near_1, one.above_1))
        cells = (significant(one.mean), *parts, significant(one.before), significant(one.after))
        rows.append((audit.sublayer_name(one.sublayer), *cells))
    return AuditTable("delta writes: gates, and the distance of the component from its target", columns, rows, columns[1:])


def _streams(audit: Audit) -> AuditTable:
    columns = ("sublayer", "spread after it", "gain: rows", "columns", "spectral")
    rows = []
    if audit.streams is not None:
        for one in audit.streams.gain:
            cells = (audit.streams.spread[one.sublayer + 1], one.row, one.column, one.spectral)
            rows.append((audit.sublayer_name(one.sublayer), *map(significant, cells)))
    return AuditTable("streams: relative spread, and gain of all residual matrices so far", columns, rows, columns[1:])


def _attention(audit: Audit) -> AuditTable:
    bins = max((one.distances for one in audit.attention), key=len, default=())
    columns = ("attention", "window", "mean distance", *(f"{begin}+" if begin > 1 else str(begin) for begin in bins))
    rows = []
    for one in audit.attention:
        inside = "" if one.place == "mixer" else f" {one.place} ({one.kind})"
        mass = [f"{part:.0%}" for part in one.mass] + [""] * (len(bins) - len(one.mass))
        window = "all" if one.window is None else str(one.window)
        rows.append((audit.sublayer_name(one.sublayer) + inside, window, f"{one.mean_distance:.1f}", *mass))
    return AuditTable("attention by distance in tokens", columns, rows, columns[1:])


def _change(one: Ablation) -> Iterator[str]:
    yield _signed(one.loss_change)
    yield "" if one.standard_error is None else loss(one.standard_error)
    yield _signed(one.control_loss_change)


def _signed(change: float | None) -> str:
    return "not finite" if change is None else signed(change)


def audit(
    run: Annotated[Path, typer.Argument(help="The folder of a training run.")],
    tokens: Annotated[int, typer.Option(help="Tokens of validation text to read.")] = 8192,
    seed: Annotated[int, typer.Option(min=0, help="Seed of random changes and of the random sources.")] = 0,
    step: Step = None,
    as_json: Json = False,
) -> None:
    """Measure a trained model along depth and positions, and the change of its loss without each part.

    Weights over depth, gates, streams, norms, gradients and attention distance show what the model does. A large weight is no
    large effect, so each sublayer, stream, local mixer, and favourite source is also removed, and compared with a random change
    of the same size. The run's own validation text is read in float32 on the CPU. The result is also written to RUN/audit.json.

    Example: twoaxis audit runs/delta --tokens 4096
    """
    from twoaxis.audit import audit_run
    from twoaxis.train import console_progress

    progress = console_progress()
    try:
        found = audit_run(run, tokens, seed, progress, step)
    finally:
        progress.stop()
    if as_json:
        print_json(found.to_data())
    else:
        _print(found, name_of(run))


def _print(found: Audit, run: str) -> None:
    print_item(
        f"{run}: {found.depth} after {found.step:,} steps, loss {found.loss:.4f} nats per token over {found.targets:,} targets "
        f"in {found.sequences:,} sequences",
        "",
    )
    print_item(found.routing_note, "")
    print()
    for table in audit_tables(found):
        print_table(table.title, table.columns, table.rows, table.numbers, whole=table.columns[:1])
        print()
    effort = found.effort
    spent = effort.observe_seconds + effort.gradient_seconds + effort.ablation_seconds
    print_item("Changes are in nats per token; +- is a standard error over sequences; random is a change of equal size.", "")
    passes = f"{effort.ablation_seconds:.1f} of them for {effort.passes} ablation passes"
    print_item(f"{spent:.1f} seconds, {passes}: {run}/audit.json", "")
