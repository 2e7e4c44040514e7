"""Floor 5: one training recipe for every arm, and the loop that runs it.

`train` runs a `TrainConfig` in a run folder and resumes it bit for bit; `load_trained` reads what it has made.
"""

from twoaxis.train.loop import train
from twoaxis.train.metrics import StepRecord, read_metrics
from twoaxis.train.optim import GroupConfig, OptimizerConfig
from twoaxis.train.progress import PlainProgress, Progress, RichProgress, console_progress
from twoaxis.train.recipe import DataConfig, TrainConfig, read_recipe
from twoaxis.train.result import Result
from twoaxis.train.run_folder import RunFolder
from twoaxis.train.schedule import SCHEDULES, ConstantConfig, CosineConfig, ScheduleConfig, WSDConfig
from twoaxis.train.trackers import TRACKERS, TrackedRun, Tracker, TrackerConfig
from twoaxis.train.trained import Trained, load_trained, new_run, save_trained

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
]
