"""Counts of requests and tokens in the Prometheus text format."""

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from twoaxis.interop.serve.scheduler import Engine

CLIENT_LEFT = 499
"""The status of a request whose client left before the end of the answer."""

BOUNDS_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

STATUS = "twoaxis_status"
"""The key of the counted status in the state of a request; a stream sets it at its end, after its headers."""

OTHER = "other"
"""The label of all paths that are no route, whose number is unbounded."""


class Metrics:
    """Counts of one server and its engine, updated by the thread that answers requests."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._requests: Counter[tuple[str, int]] = Counter()
        self._buckets = [0] * (len(BOUNDS_SECONDS) + 1)
        self._seconds = 0.0

    def answered(self, route: str, status: int, seconds: float | None) -> None:
        """Counts a request at its end, and the seconds of its answer in the histogram unless they are None."""
        self._requests[route, status] += 1
        if status == 200 and seconds is not None:
            self._buckets[bisect_left(BOUNDS_SECONDS, seconds)] += 1
            self._seconds += seconds

    def text(self) -> str:
        """All counts as text."""
        counts = self._engine.counts
        left = sum(number for (_, status), number in self._requests.items() if status == CLIENT_LEFT)
        lines = ["# HELP twoaxis_requests_total Requests by path and HTTP status.", "# TYPE twoaxis_requests_total counter"]
        for (route, status), number in sorted(self._requests.items()):
            lines.append(f'twoaxis_requests_total{{path="{route}",status="{status}"}} {number}')
        for name, kind, text, number in (
            ("disconnects_total", "counter", "Requests whose client left before the answer.", left),
            ("prompt_tokens_total", "counter", "Tokens of prompts that were read.", counts.prompt_tokens),
            ("new_tokens_total", "counter", "Tokens that were made.", counts.new_tokens),
            ("steps_total", "counter", "Steps of the batch.", counts.steps),
            ("row_steps_total", "counter", "Rows in all steps; divided by the steps, the mean batch.", counts.row_steps),
            ("faults_total", "counter", "Generations that ended in an error.", counts.faults),
            ("queue_generations", "gauge", "Generations that wait.", self._engine.waiting),
            ("batch_generations", "gauge", "Generations that run.", self._engine.running),
        ):
            lines += [f"# HELP twoaxis_{name} {text}", f"# TYPE twoaxis_{name} {kind}", f"twoaxis_{name} {number}"]
        name = "twoaxis_request_seconds"
        lines += [f"# HELP {name} Time from a request to the end of its answer.", f"# TYPE {name} histogram"]
        total = list(accumulate(self._buckets))
        for bound, number in zip((*BOUNDS_SECONDS, "+Inf"), total, strict=True):
            lines.append(f'{name}_bucket{{le="{bound}"}} {number}')
        return "\n".join([*lines, f"{name}_sum {self._seconds:.6f}", f"{name}_count {total[-1]}", ""])


class CountRequests:
    """Middleware that counts requests, with status and time, by the routes that begin their paths."""

    def __init__(self, app: ASGIApp, metrics: Metrics, routes: Sequence[str]) -> None:
        self._app, self._metrics, self._routes = app, metrics, routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request."""
        begin, state = time.monotonic(), scope.setdefault("state", {})
        # Unless it is answered.
        state[STATUS] = 500

        async def send_and_record(message: Message) -> None:
            if message["type"] == "http.response.start":
                state[STATUS] = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_and_record)
        finally:
            # Only POST requests, since health checks would dominate.
            seconds = time.monotonic() - begin if scope["method"] == "POST" else None
            self._metrics.answered(self._route(scope["path"]), state[STATUS], seconds)

    def _route(self, path: str) -> str:
        return next((route for route in self._routes if path == route or path.startswith(f"{route}/")), OTHER)
