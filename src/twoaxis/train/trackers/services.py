"""Trackers of TensorBoard, Trackio, and Weights & Biases, as the user's environment configures them."""

import contextlib
import contextvars
import json
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from twoaxis.core.errors import ConfigError
from twoaxis.train.trackers.tracking import TrackedRun, Tracker, TrackerConfig, load


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


class TrackioConfig(TrackerConfig):
    """A run of Trackio; needs the extra `twoaxis[trackio]`.

    It stays on this machine, in the folder of TRACKIO_DIR, unless TRACKIO_SPACE_ID or TRACKIO_SERVER_URL is set. Show it with
    `trackio show`.

    Attributes:
        project: of the run.
    """

    kind: Literal["trackio"] = "trackio"
    project: str = "twoaxis"

    def build(self) -> Tracker:
        """Builds the tracker."""
        return TrackioTracker(load("trackio", self.kind), self.project)


class TrackioTracker:
    """Logs through `trackio`; see `TrackioConfig`."""

    def __init__(self, library: Any, project: str) -> None:
        self._library, self._project = library, project
        self._run: Any = None

    def start(self, run: TrackedRun) -> None:
        """Begins the run, or continues the one of the same name."""
        # In a new context, so that an open run of the caller is not ended.
        self._run = contextvars.Context().run(
            self._library.init,
            project=self._project,
            # Trackio identifies a run by its name.
            name=f"{run.folder.name}-{run.id}",
            config=run.config,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, tokens: int, values: Mapping[str, float]) -> None:
        """Logs the values, and the tokens as a series."""
        self._run.log({**values, "tokens": tokens}, step=step)

    def finish(self, result: Mapping[str, Any] | None) -> None:
        """Logs the result at the last step, since Trackio has no summary, and waits until all is written."""
        if result is not None:
            self._run.log({f"result/{key}": value for key, value in result.items()}, step=result["steps"])
        self._run.finish()


class WandbConfig(TrackerConfig):
    """A run of Weights & Biases; needs the extra `twoaxis[wandb]`.

    The environment variables of wandb apply: WANDB_MODE=offline keeps everything in the folder `wandb` of the run, for
    `wandb sync`; WANDB_ENTITY and WANDB_RUN_GROUP set entity and group. Only the recipe, the series and the result are sent: no
    code, no console output and no measurements of the machine.

    Attributes:
        project: of the run; None takes WANDB_PROJECT, or `twoaxis` without it.
    """

    kind: Literal["wandb"] = "wandb"
    project: str | None = None

    def build(self) -> Tracker:
        """Builds the tracker."""
        return WandbTracker(load("wandb", self.kind), self.project or os.environ.get("WANDB_PROJECT") or "twoaxis")


class WandbTracker:
    """Logs through `wandb`; see `WandbConfig`."""

    def __init__(self, library: Any, project: str) -> None:
        self._library, self._project = library, project
        self._run: Any = None

    def start(self, run: TrackedRun) -> None:
        """Begins or continues the run with this id.

        Raises:
            ConfigError: no login, or no connection to the server.
        """
        try:
            settings = self._library.Settings(
                console="off",
                disable_code=True,
                disable_git=True,
                save_code=False,
                x_disable_machine_info=True,
                x_disable_meta=True,
                x_disable_stats=True,
                x_save_requirements=False,
            )
            with _no_terminal_input():
                self._run = self._library.init(
                    project=self._project,
                    id=run.id,
                    name=run.folder.name,
                    config=run.config,
                    dir=os.environ.get("WANDB_DIR") or str(run.folder),
                    resume="allow",
                    # An open run of the caller stays open.
                    reinit="create_new",
                    force=True,
                    settings=settings,
                )
        except self._library.Error as error:
            raise ConfigError(
                f"tracker 'wandb': cannot be started ({' '.join(str(error).split())}); "
                "run `wandb login`, or set WANDB_MODE=offline to keep everything on this machine"
            ) from None

    def log(self, step: int, tokens: int, values: Mapping[str, float]) -> None:
        """Logs the values, and the tokens as a series that charts can use as an axis."""
        self._run.log({**values, "tokens": tokens}, step=step, commit=True)

    def finish(self, result: Mapping[str, Any] | None) -> None:
        """Sends the result as the summary, and ends the run as failed unless it has finished."""
        if result is not None:
            self._run.summary.update(dict(result))
        self._run.finish(exit_code=0 if result is not None and result["status"] == "finished" else 1)


@contextlib.contextmanager
def _no_terminal_input() -> Iterator[None]:
    """Replaces standard input: at a terminal, wandb would prompt for a login and wait."""
    before = sys.stdin
    with open(os.devnull, encoding="utf-8") as empty:
        sys.stdin = empty
        try:
            yield
        finally:
            sys.stdin = before
