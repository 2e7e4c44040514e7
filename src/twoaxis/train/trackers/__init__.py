"""Trackers, which show the metrics of a run elsewhere; one row per kind. `metrics.jsonl` is always written as well.

A tracker never influences a run: losses, weights and checkpoints are bit-identical with and without. Its calls are not timed,
but a library that sends from another thread may slow steps a little, and its memory counts in the peak of the process: measure
speed and memory without trackers.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from twoaxis.core.errors import ConfigError
from twoaxis.core.registry import Row, Table
from twoaxis.train.trackers.services import TensorBoardConfig, TrackioConfig, WandbConfig
from twoaxis.train.trackers.tracking import TrackedRun, Tracker, TrackerConfig, Tracking

TRACKERS: Table[TrackerConfig] = Table(
    "tracker",
    TrackerConfig,
    "twoaxis.trackers",
    [
        Row(TensorBoardConfig, "event files in the run folder", {"default": {}}),
        Row(
            WandbConfig, "Weights & Biases, online or offline as WANDB_MODE says", {"default": {}, "project": {"project": "p"}}
        ),
        Row(TrackioConfig, "a local database, or a server of your own", {"default": {}, "project": {"project": "p"}}),
    ],
)
"""The kinds of tracker; other packages add rows through the entry point `twoaxis.trackers`."""

AnyTracker = str | Mapping[str, Any] | TrackerConfig | Tracker
"""A kind, a table with `kind`, a configuration, or any object with the methods of `Tracker`."""


def build_trackers(chosen: Iterable[AnyTracker]) -> dict[str, Tracker]:
    """Builds trackers by name, which is the kind, or the class of an object.

    Raises:
        ConfigError: an unknown kind, a missing package, an object that is no tracker, or a name used twice.

    Example:
        >>> build_trackers(["tensorbord"])
        Traceback (most recent call last):
        twoaxis.core.errors.ConfigError: unknown tracker 'tensorbord'; did you mean 'tensorboard'?
    """
    trackers: dict[str, Tracker] = {}
    for one in [chosen] if isinstance(chosen, str) else chosen:
        if isinstance(one, str | Mapping | TrackerConfig):
            config = TRACKERS.parse(one)
            name, tracker = config.to_data()["kind"], config.build()
        elif isinstance(one, Tracker):
            name, tracker = type(one).__name__, one
        else:
            raise ConfigError(
                f"tracker {type(one).__name__}: must be a kind, a table, or an object with the methods start, log and finish; "
                f"choose one of {', '.join(row.kind for row in TRACKERS)}"
            )
        if name in trackers:
            raise ConfigError(f"tracker {name!r} is named twice: must be named once; leave one out")
        trackers[name] = tracker
    return trackers


__all__ = ["TRACKERS", "AnyTracker", "TrackedRun", "Tracker", "TrackerConfig", "Tracking", "build_trackers"]
