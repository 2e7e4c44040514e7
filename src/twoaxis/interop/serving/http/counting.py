"""Counts every request once, however it ends."""

import time
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from twoaxis.interop.serving.metrics import Metrics

STATUS = "twoaxis_status"
"""Where the state of a request has the status that counts; a stream, whose headers are gone, puts there how it ended."""

OTHER = "other"
"""What all paths are counted as that are no route: clients may make up as many as they like."""


class CountRequests:
    """Takes the time and the status of each request.

    Args:
        app: answers it.
        metrics: take the counts.
        routes: paths that are counted by themselves, with what lies below them.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, routes: Sequence[str]) -> None:
        self._app, self._metrics, self._routes = app, metrics, routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        begin, state = time.monotonic(), scope.setdefault("state", {})
        # Whoever answers nothing has failed.
        state[STATUS] = 500

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                state[STATUS] = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            # Only what asks for work is timed: looks at the health would hide it.
            seconds = time.monotonic() - begin if scope["method"] == "POST" else None
            self._metrics.answered(self._route(scope["path"]), state[STATUS], seconds)

    def _route(self, path: str) -> str:
        return next((route for route in self._routes if path == route or path.startswith(f"{route}/")), OTHER)
