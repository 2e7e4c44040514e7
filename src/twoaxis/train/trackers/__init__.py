"""Where the numbers of a run are shown besides `metrics.jsonl`, which is always written and stays the truth.

One row per kind of tracker. A tracker never influences a run: losses, weights and checkpoints are bit-identical with and
without. It is told of a step after the step was timed; still, a library that sends from a thread of its own may slow the
steps a little, and the peak memory of the process counts it too, so measure speed and memory without one.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from twoaxis.core.errors import ConfigError
from twoaxis.core.table import Row, Table
from twoaxis.train.trackers.base import TrackedRun, Tracker, TrackerConfig, series
from twoaxis.train.trackers.tensorboard import TensorBoardConfig
from twoaxis.train.trackers.tracking import Tracking
from twoaxis.train.trackers.trackio import TrackioConfig
from twoaxis.train.trackers.wandb import WandbConfig

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
"""A kind, a table with `kind`, a configuration, or an object of your own with the methods of `Tracker`."""


def build_trackers(chosen: Iterable[AnyTracker]) -> dict[str, Tracker]:
    """Makes trackers by name: the kind of one from the table, the class of one of your own.

    Raises:
        ConfigError: an unknown kind, a package that is not installed, an object that is no tracker, or a name used twice.

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


__all__ = [
    "TRACKERS",
    "AnyTracker",
    "TensorBoardConfig",
    "TrackedRun",
    "Tracker",
    "TrackerConfig",
    "Tracking",
    "TrackioConfig",
    "WandbConfig",
    "build_trackers",
    "series",
]
