"""What the rows of the scale page say: who stays under the limit, and what breaks the others."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from planner.scale.cases import CONTEXTS, SHAPES
from planner.scale.compute import CONTROL, LIMIT

Row = Mapping[str, Any]

BOUNDS = {"memory": "HBM traffic", "compute": "arithmetic of the depth operation", "launch": "kernel launches"}
RESOURCES = {
    "sublayers": "added sublayers and norms",
    "exposed": "boundary bytes",
    "idle": "uneven stages",
    "update": "more weights to update",
}


def treated(rows: Iterable[Row]) -> list[Row]:
    """The rows of methods that fit their shape, without the control."""
    return [row for row in rows if row["method"] != CONTROL and "refusal" not in row]


def under_limit(rows: Sequence[Row], value: Callable[[Row], float]) -> list[str]:
    """Methods that stay under the limit in every case that they fit, in the order of the rows."""
    over = {row["method"] for row in treated(rows) if value(row) > LIMIT}
    return [name for name in dict.fromkeys(row["method"] for row in treated(rows)) if name not in over]


def resource(row: Row) -> str:
    """What most of a training overhead is spent on."""
    training = row["training"]
    part = max(("depth", *RESOURCES), key=lambda name: training[name])
    return BOUNDS[training["depth_bound"]] if part == "depth" else RESOURCES[part]


def training_breaks(rows: Sequence[Row], method: str) -> str:
    """The cases in which a method is over the limit in training, by what breaks it; empty where there is none."""
    found: dict[str, list[Row]] = {}
    for row in treated(rows):
        if row["method"] == method and row["training"]["overhead"] > LIMIT:
            found.setdefault(resource(row), []).append(row)
    return "; ".join(f"{what}: {places(where)}" for what, where in found.items())


def memory_breaks(rows: Sequence[Row], method: str) -> str:
    """The cases in which a method does not fit into memory in training."""
    return places([row for row in treated(rows) if row["method"] == method and not row["training"]["fits"]])


def prefill_breaks(rows: Sequence[Row], method: str) -> str:
    """The cases in which the depth state of a prefill in one does not fit beside weights and cache, and whether chunks help."""
    own = [row for row in treated(rows) if row["method"] == method]
    full = [row for row in own if row["serving"]["state_bytes"] > row["serving"]["free_bytes"]]
    still = [row for row in full if row["serving"]["chunked_bytes"] > row["serving"]["free_bytes"]]
    return places(full) + (f"; also in chunks: {places(still)}" if still else "")


def generation_breaks(rows: Sequence[Row], method: str) -> str:
    """The cases in which a method is over the limit in generation."""
    return places([row for row in treated(rows) if row["method"] == method and row["serving"]["generation"] > LIMIT])


def places(rows: Iterable[Row]) -> str:
    """Cases by shape, such as "7B at 8k/1M"."""
    found: dict[str, list[str]] = {}
    for row in rows:
        found.setdefault(SHAPES[row["shape"]], []).append(CONTEXTS[row["tokens"]])
    return ", ".join(f"{shape} at {'/'.join(lengths)}" for shape, lengths in found.items())


def pick(rows: Iterable[Row], method: str, shape: str, tokens: int) -> Row:
    """The row of a method in a case."""
    return next(row for row in rows if (row["method"], row["shape"], row["tokens"]) == (method, shape, tokens))
