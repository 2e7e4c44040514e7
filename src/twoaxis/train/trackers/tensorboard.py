"""TensorBoard: event files in the run folder."""

import json
from collections.abc import Mapping
from typing import Any, Literal

from twoaxis.train.trackers.base import TrackedRun, Tracker, TrackerConfig, load


class TensorBoardConfig(TrackerConfig):
    """Event files in the folder `tensorboard` of the run; needs the extra `twoaxis[tensorboard]`.

    Show them with `tensorboard --logdir runs`; nothing leaves the machine.
    """

    kind: Literal["tensorboard"] = "tensorboard"

    def build(self) -> Tracker:
        """Builds the tracker."""
        return TensorBoardTracker(load("torch.utils.tensorboard", self.kind))


class TensorBoardTracker:
    """Writes through `torch.utils.tensorboard`; see `TensorBoardConfig`."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._writer: Any = None

    def start(self, run: TrackedRun) -> None:
        """Opens a new event file, with the recipe in the first one."""
        self._writer = self._library.SummaryWriter(str(run.folder / "tensorboard"))
        if run.logged_steps is None:
            self._writer.add_text("config", _block(run.config), 0)

    def log(self, step: int, tokens: int, values: Mapping[str, float]) -> None:
        """Writes the values, and the tokens as a series, since TensorBoard has no token axis."""
        for name, value in {**values, "tokens": tokens}.items():
            self._writer.add_scalar(name, value, step)
        # The writer buffers for two minutes, which a killed run would lose.
        self._writer.flush()

    def finish(self, result: Mapping[str, Any] | None) -> None:
        """Writes the result and closes the file."""
        if result is not None:
            self._writer.add_text("result", _block(result), result["steps"])
        self._writer.close()


def _block(data: Mapping[str, Any]) -> str:
    """The data as a Markdown code block."""
    return f"```json\n{json.dumps(data, indent=1)}\n```"
