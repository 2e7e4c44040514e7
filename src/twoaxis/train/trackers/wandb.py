"""Weights & Biases: online or offline, as the user's environment says."""

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from twoaxis.core.errors import ConfigError
from twoaxis.train.trackers.base import TrackedRun, Tracker, TrackerConfig, load


class WandbConfig(TrackerConfig):
    """A run of Weights & Biases; needs the extra `twoaxis[wandb]`.

    What wandb reads from the environment counts here too: WANDB_MODE=offline keeps everything in the folder `wandb` of
    the run, for `wandb sync` or for nobody; WANDB_ENTITY, WANDB_RUN_GROUP and others say where it belongs. Only the recipe,
    the series and the result are sent: no code, no console output and no measurements of the machine.

    Attributes:
        project: where the run belongs; None is that of WANDB_PROJECT, and `twoaxis` without one.
    """

    kind: Literal["wandb"] = "wandb"
    project: str | None = None

    def build(self) -> Tracker:
        """Makes the tracker."""
        return WandbTracker(load("wandb", self.kind), self.project or os.environ.get("WANDB_PROJECT") or "twoaxis")


class WandbTracker:
    """See `WandbConfig`.

    Args:
        library: `wandb`.
        project: where the run belongs.
    """

    def __init__(self, library: Any, project: str) -> None:
        self._library, self._project = library, project
        self._run: Any = None

    def start(self, run: TrackedRun) -> None:
        """Begins or continues the run with this id.

        Raises:
            ConfigError: nobody is logged in, or the server cannot be reached.
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
            with _nobody_at_the_keyboard():
                self._run = self._library.init(
                    project=self._project,
                    id=run.id,
                    name=run.folder.name,
                    config=run.config,
                    dir=os.environ.get("WANDB_DIR") or str(run.folder),
                    resume="allow",
                    # A run that the caller may have open stays as it is.
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
        """Logs the values, and the tokens as a series that any chart can have as its axis."""
        self._run.log({**values, "tokens": tokens}, step=step, commit=True)

    def finish(self, result: Mapping[str, Any] | None) -> None:
        """Sends the result as the summary, and ends the run as failed unless it has finished."""
        if result is not None:
            self._run.summary.update(dict(result))
        self._run.finish(exit_code=0 if result is not None and result["status"] == "finished" else 1)


@contextlib.contextmanager
def _nobody_at_the_keyboard() -> Iterator[None]:
    """Makes standard input no terminal, where wandb would ask for a login and wait."""
    keyboard = sys.stdin
    with open(os.devnull, encoding="utf-8") as nobody:
        sys.stdin = nobody
        try:
            yield
        finally:
            sys.stdin = keyboard
