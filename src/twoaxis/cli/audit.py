"""`twoaxis audit RUN`: what a trained model does along both axes, and what of it matters."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from twoaxis.cli.models import Step
from twoaxis.cli.output import Json, name_of, print_json
from twoaxis.display.tables import print_item, print_table

if TYPE_CHECKING:
    from twoaxis.audit import Audit


def audit(
    run: Annotated[Path, typer.Argument(help="The folder of a training run.")],
    tokens: Annotated[int, typer.Option(help="Tokens of validation text to read.")] = 8192,
    seed: Annotated[int, typer.Option(min=0, help="Seed of random changes and of the random sources.")] = 0,
    step: Step = None,
    as_json: Json = False,
) -> None:
    """Measure a trained model along depth and positions, and what its loss loses without each part.

    Weights over depth, gates, streams, norms, gradients and attention distance show what the model does. A large weight is no
    large effect, so each sublayer, stream, local mixer, and favourite source is also taken away, beside a random change of the
    same size. The run's own validation text is read in float32 on the CPU. The result is also written to RUN/audit.json.

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


def _print(found: "Audit", run: str) -> None:
    from twoaxis.cli.audit_tables import audit_tables

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
