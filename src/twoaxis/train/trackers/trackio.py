"""Trackio: a database on this machine, or a server that the user's environment names."""

import contextvars
from collections.abc import Mapping
from typing import Any, Literal

from twoaxis.train.trackers.base import TrackedRun, Tracker, TrackerConfig, load


class TrackioConfig(TrackerConfig):
    """A run of Trackio; needs the extra `twoaxis[trackio]`.

    It stays on this machine, in the folder of TRACKIO_DIR, unless TRACKIO_SPACE_ID or TRACKIO_SERVER_URL is set. See it with
    `trackio show`.

    Attributes:
        project: where the run belongs.
    """

    kind: Literal["trackio"] = "trackio"
    project: str = "twoaxis"

    def build(self) -> Tracker:
        """Makes the tracker."""
        return TrackioTracker(load("trackio", self.kind), self.project)


class TrackioTracker:
    """See `TrackioConfig`.

    Args:
        library: `trackio`.
        project: where the run belongs.
    """

    def __init__(self, library: Any, project: str) -> None:
        self._library, self._project = library, project
        self._run: Any = None

    def start(self, run: TrackedRun) -> None:
        """Begins the run, or continues the one of the same name."""
        # In a context of its own, so that a run that the caller may have open is not ended.
        self._run = contextvars.Context().run(
            self._library.init,
            project=self._project,
            # Trackio finds a run again by its name alone.
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
        """Logs the result at the last step, since Trackio knows no summary, and waits until all is written."""
        if result is not None:
            self._run.log({f"result/{key}": value for key, value in result.items()}, step=result["steps"])
        self._run.finish()
