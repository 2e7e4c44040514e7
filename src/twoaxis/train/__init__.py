"""Floor 5: one training recipe for every arm, and the loop that runs it.

`train` runs a `TrainConfig` in a run folder and resumes it bit for bit; `load_trained` reads its model. The module
itself may be called: `twoaxis.train(recipe)`.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from twoaxis.train.loop import train
from twoaxis.train.metrics import Result, StepRecord, read_metrics
from twoaxis.train.optim import GroupConfig, OptimizerConfig
from twoaxis.train.progress import PlainProgress, Progress, RichProgress, console_progress
from twoaxis.train.recipe import DataConfig, TrainConfig, read_recipe
from twoaxis.train.run_folder import RunFolder
from twoaxis.train.schedule import SCHEDULES, ConstantConfig, CosineConfig, ScheduleConfig, WSDConfig
from twoaxis.train.trackers import TRACKERS, TrackedRun, Tracker, TrackerConfig
from twoaxis.train.trained import Run, Trained, load_trained, new_run, save_trained, train_recipe

__all__ = [
    "SCHEDULES",
    "TRACKERS",
    "ConstantConfig",
    "CosineConfig",
    "DataConfig",
    "GroupConfig",
    "OptimizerConfig",
    "PlainProgress",
    "Progress",
    "Result",
    "RichProgress",
    "Run",
    "RunFolder",
    "ScheduleConfig",
    "StepRecord",
    "TrackedRun",
    "Tracker",
    "TrackerConfig",
    "TrainConfig",
    "Trained",
    "WSDConfig",
    "console_progress",
    "load_trained",
    "new_run",
    "read_metrics",
    "read_recipe",
    "save_trained",
    "train",
    "train_recipe",
]


class TrainModule(ModuleType):
    """The module, which can be called.

    `twoaxis.train` is this package whenever anything has imported it, so a function of that name in `twoaxis` would be there
    or not depending on the order of imports. A module of a class of its own is a module to Python in every other way.
    """

    def __call__(
        self,
        recipe: TrainConfig | Mapping[str, Any] | Path | str,
        run: Path | str | None = None,
        overrides: Sequence[str] = (),
        progress: Progress | None = None,
    ) -> Run:
        """Trains a recipe; see `train_recipe`."""
        return train_recipe(recipe, run, overrides, progress)


sys.modules[__name__].__class__ = TrainModule
