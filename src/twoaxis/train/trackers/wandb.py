"""Weights & Biases, online or offline as the environment says."""

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from twoaxis.core.errors import ConfigError
from twoaxis.train.trackers.base import TrackedRun, Tracker, TrackerConfig, load


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
