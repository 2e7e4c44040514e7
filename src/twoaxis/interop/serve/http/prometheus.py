"""Counts of requests and tokens, for Prometheus."""

import time
from collections.abc import Iterator, Sequence

from prometheus_client import Counter, Histogram, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from twoaxis.interop.serve.scheduler import Engine

CLIENT_LEFT = 499
"""The status of a request whose client left before the end of the answer."""

BOUNDS_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

STATUS = "twoaxis_status"
"""The key of the counted status in the state of a request; a stream sets it at its end, after its headers."""

OTHER = "other"
"""The label of all paths that are no route, whose number is unbounded."""

ENGINE_COUNTS = {
    "prompt_tokens": "Tokens of prompts that were read.",
    "new_tokens": "Tokens that were made.",
    "steps": "Steps of the batch.",
    "row_steps": "Rows in all steps; divided by the steps, the mean batch.",
    "faults": "Generations that ended in an error.",
}


class Metrics:
    """Collector of the counts of one server and its engine, outside of every registry."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.requests = Counter("twoaxis_requests", "Requests by path and HTTP status.", ("path", "status"), registry=None)
        self.left = Counter("twoaxis_disconnects", "Requests whose client left before the answer.", registry=None)
        about = "Time from a request to the end of its answer."
        self.seconds = Histogram("twoaxis_request_seconds", about, buckets=BOUNDS_SECONDS, registry=None)

    def collect(self) -> Iterator[Metric]:
        """All counts."""
        for metric in (*self.requests.collect(), *self.left.collect(), *self.seconds.collect()):
            # The library can leave these series out only for the whole process.
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric
        for name, about in ENGINE_COUNTS.items():
            yield CounterMetricFamily(f"twoaxis_{name}", about, getattr(self._engine.counts, name))
        about = "Compiled programs; with any, every step of the batch runs one of them."
        yield GaugeMetricFamily("twoaxis_compiled_programs", about, self._engine.counts.programs)
        yield GaugeMetricFamily("twoaxis_queue_generations", "Generations that wait.", self._engine.waiting)
        yield GaugeMetricFamily("twoaxis_batch_generations", "Generations that run.", self._engine.running)


class CountRequests:
    """Middleware that counts requests, with status and time, by the routes that begin their paths."""

    def __init__(self, app: ASGIApp, metrics: Metrics, routes: Sequence[str]) -> None:
        self._app, self._metrics, self._routes = app, metrics, routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request."""
        begin, path, state = time.monotonic(), scope["path"], scope.setdefault("state", {})
        # Unless it is answered.
        state[STATUS] = 500

        async def send_and_record(message: Message) -> None:
            if message["type"] == "http.response.start":
                state[STATUS] = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_and_record)
        finally:
            route = next((route for route in self._routes if path == route or path.startswith(f"{route}/")), OTHER)
            self._metrics.requests.labels(route, state[STATUS]).inc()
            if state[STATUS] == CLIENT_LEFT:
                self._metrics.left.inc()
            # Only POST requests, since health checks would dominate.
            if state[STATUS] == 200 and scope["method"] == "POST":
                self._metrics.seconds.observe(time.monotonic() - begin)
