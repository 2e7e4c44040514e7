"""Trackio: a local database, or a server from the environment."""

import contextvars
from collections.abc import Mapping
from typing import Any, Literal

from twoaxis.train.trackers.base import TrackedRun, Tracker, TrackerConfig, load


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
