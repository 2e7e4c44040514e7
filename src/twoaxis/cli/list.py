"""`twoaxis list`: the mixers of each axis, and every method by its design."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twoaxis import DEPTH, FEED_FORWARD, LOCAL, SEQUENCE
from twoaxis.cli.models import depth_cost
from twoaxis.cli.output import Json, print_json
from twoaxis.core.errors import ConfigError, nearest, problem
from twoaxis.core.registry import source
from twoaxis.display.numbers import bytes_text, count_text
from twoaxis.display.tables import print_item, print_table

if TYPE_CHECKING:
    from twoaxis.model.block_patterns import BlockPattern
    from twoaxis.planner.design_table import MethodRow
    from twoaxis.planner.evidence import PairVerdict

NO_STUDY = "none of this form"

COSTS = ("parameters", "FLOPs", "saved", "sent")
"""Columns; all but parameters are per token."""


def list_designs(axis: str | None, as_json: bool) -> None:
    """Prints the table in four parts that fit 80 columns, or all of it as JSON.

    Args:
        axis: `depth` or `sequence`; None takes both.
        as_json: whether to print JSON.
    """
    from twoaxis.core.design import LETTERS
    from twoaxis.planner.design_table import design_table, stated_shape

    rows = [row for row in design_table() if axis in (None, row.axis)]
    if as_json:
        print_json({"shape": stated_shape(), "methods": [row.to_data() for row in rows]})
        return
    print_item(LETTERS, "")
    print()
    _print("Query, key and normaliser", ("query", "key", "normaliser"), rows)
    _print("Values, window and injection of the sum", ("value", "window", "injection"), rows)
    _print("What weights depend on, and how parameters are shared", ("weights", "earlier tokens", "sets of parameters"), rows)
    names = [row.name for row in rows if row.design.literal]
    print_item(f"Literal instance of arXiv:2603.16039, section 2.2: {', '.join(names) or 'none of these'}.", "")
    print()
    table = [(row.name, *cost_cells(row), loss_cell(row)) for row in rows]
    title = "Costs and loss beyond the control"
    print_table(title, ("method", *COSTS, "loss"), table, COSTS, whole=("method",))
    print_item(
        f"Costs: {stated_shape()}. FLOPs and bytes are per token; the first row is the control as a whole. --json gives all.",
        "",
    )


def _print(title: str, columns: Sequence[str], rows: "Sequence[MethodRow]") -> None:
    cells = [(row.name, *(design_cells(row)[name] for name in columns)) for row in rows]
    print_table(title, ("method", *columns), cells, whole=("method",))
    print()


def design_cells(row: "MethodRow") -> dict[str, str]:
    """The design of a method, by column."""
    design = row.design
    sets = {"none": "none", "model": "1 for the model", "block": "1 a block", "sublayer": "1 a sublayer"}
    return {
        "query": design.query,
        "key": design.key,
        "value": design.value,
        "normaliser": design.normaliser,
        "window": design.window,
        "sets of parameters": sets[design.sharing],
        "injection": design.injection,
        "weights": design.weights,
        "earlier tokens": "yes" if design.position else "no",
        "literal": "yes" if design.literal else "no",
    }


def cost_cells(row: "MethodRow") -> tuple[str, ...]:
    """Counts of a method, in the order of `COSTS`."""
    counts = row.counts
    return (
        count_text(counts.params),
        count_text(counts.flops_per_token),
        bytes_text(counts.saved_bytes_per_token),
        bytes_text(counts.boundary_bytes_per_token),
    )


def loss_cell(row: "MethodRow") -> str:
    """The loss of a method minus the control's, with the interval, in every valid study that has the method."""
    if row.kind == "residual":
        return "control"
    studies = [study for study, _ in row.losses]
    return "; ".join(f"{_label(study, pair, studies)}: {_difference(pair)}" for study, pair in row.losses) or NO_STUDY


def _label(study: str, pair: "PairVerdict", studies: list[str]) -> str:
    """The study, with the arm where it has several."""
    return study if studies.count(study) == 1 else f"{study} ({pair.arm})"


def _difference(pair: "PairVerdict") -> str:
    if pair.difference is None:
        return "no verdict"
    interval = "" if pair.low is None else f" ({pair.low:+.3f} to {pair.high:+.3f})"
    return f"{pair.difference:+.3f}{interval}, {pair.verdict}, n = {pair.replicates}".replace("-", "\N{MINUS SIGN}")


AXES: dict[str, Any] = {"depth": DEPTH, "sequence": SEQUENCE, "feed_forward": FEED_FORWARD, "local": LOCAL}


def complete_axis(incomplete: str) -> list[str]:
    """The axes that begin so, for completion in a shell."""
    return [axis for axis in AXES if axis.startswith(incomplete)]


def complete_mixer(context: typer.Context, incomplete: str) -> list[str]:
    """The mixers that begin so, of the axis that was given before where one was."""
    axis = context.params.get("axis")
    tables = [AXES[axis]] if axis in AXES else list(AXES.values())
    return [row.kind for table in tables for row in table if row.kind.startswith(incomplete)]


def complete_depth(incomplete: str) -> list[str]:
    """The depth mixers that begin so."""
    return [row.kind for row in DEPTH if row.kind.startswith(incomplete)]


TITLES = {"depth": "Depth axis", "sequence": "Sequence axis", "feed_forward": "Feed-forward", "local": "Inside a sublayer"}


def list_mixers(
    axis: Annotated[
        str | None,
        typer.Argument(
            help="depth, sequence, feed_forward or local, all of them when left out; or blocks: orders of layers.",
            autocompletion=complete_axis,
        ),
    ] = None,
    design: Annotated[
        bool, typer.Option("--design", help="Compare methods by weights, window, injection, cost and loss.")
    ] = False,
    as_json: Json = False,
) -> None:
    """List every mixer of both axes, the feed-forwards between them, and the local mixers inside a sublayer.

    Parameters are what a mixer adds to 12 blocks at d_model 256, in its default form. Evidence: a certified form equals public
    code in outputs and all gradients; a reconstructed one follows a text. `twoaxis show NAME` says more about one.
    `twoaxis list blocks` prints the orders of local and global layers of published models, for `model.blocks`.
    """
    if axis is not None and axis not in (*AXES, "blocks"):
        raise ConfigError(f"unknown axis {axis!r}; {nearest(axis, (*AXES, 'blocks'))}")
    if design:
        if axis in ("feed_forward", "local", "blocks"):
            raise ConfigError(problem("axis", axis, "depth or sequence with --design", "leave it out for both"))
        list_designs(axis, as_json)
        return
    if axis == "blocks":
        list_blocks(as_json)
        return
    tables = {name: [_row(name, row) for row in table] for name, table in AXES.items() if axis in (None, name)}
    if as_json:
        print_json(tables)
        return
    for name, rows in tables.items():
        columns = [column.replace("_", " ") for column in rows[0]]
        print_table(TITLES[name], columns, [list(_cells(row)) for row in rows], ("parameters",), whole=("kind",))
        print()


def list_blocks(as_json: bool) -> None:
    """Prints the published orders of layers.

    Args:
        as_json: whether to print JSON.
    """
    from twoaxis.model.block_patterns import EVIDENCE, LETTERS, PATTERNS

    rows = {name: asdict(pattern) for name, pattern in PATTERNS.items()}
    if as_json:
        print_json({"letters": LETTERS, "evidence": EVIDENCE, "blocks": rows})
        return
    columns = (
        "name",
        "models and layers",
        "order",
        "window",
        "sink",
        "rotation of L; G",
        "heads per kv-head",
        "source",
        "lacks",
    )
    table = [(name, *_pattern_cells(pattern)) for name, pattern in PATTERNS.items()]
    print_table("Orders of layers, for model.blocks", columns, table, ("window",), whole=("name",))
    letters = ", ".join(f"{letter} {meaning}" for letter, meaning in LETTERS.items())
    sources = "; ".join(f"{letter} {meaning}" for letter, meaning in EVIDENCE.items())
    print_item(f"Order: {letters}; (G) is the first or last layer. A window counts the current token. Source: {sources}.", "")


def _pattern_cells(pattern: "BlockPattern") -> Iterator[str]:
    """The cells of an order of layers."""
    local, others = ({**pattern.everywhere, **options} for options in (pattern.local, pattern.others))
    ends = [f"({end})" if end else "" for end in (pattern.first, pattern.last)]
    has_window = "L" in pattern.order
    yield pattern.models
    yield f"{ends[0]}{pattern.order}{ends[1]}"
    yield "" if not has_window else f"{pattern.window:,}" if pattern.window else "T/4"
    sinks = [letter for letter, options in (("L", local), ("G", others)) if "sink" in options]
    yield ", ".join(sinks)
    share = f" x {pattern.rotated:g}" if pattern.rotated < 1 else ""
    yield "; ".join(
        "none" if options.get("rope_dim") == 0 else f"{options.get('rope_theta', 10_000.0):,.0f}{part}"
        for options, part in ((local, share if pattern.rotated_everywhere else ""), (others, share))[not has_window :]
    )
    yield "; ".join(map(str, sorted(set(pattern.group))))
    yield pattern.evidence
    yield pattern.lacks


def _cells(row: Mapping[str, str | int]) -> Iterator[str]:
    """The cells of a row as text."""
    for name, value in row.items():
        yield f"{value:,}" if isinstance(value, int) else value.replace("_", " ") if name == "at_initialisation" else value


def _row(axis: str, row: Any) -> dict[str, str | int]:
    config = row.config()
    found: dict[str, str | int] = {"kind": row.kind, "summary": row.summary, "source": source(row.config)}
    if axis != "feed_forward":
        found["at_initialisation"] = config.init_equivalence.relation
    if axis == "depth":
        found["parameters"] = depth_cost(config).params
    return found | {"evidence": row.evidence, "status": row.status}
