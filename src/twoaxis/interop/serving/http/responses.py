"""Responses: JSON, refusals, and streams of server-sent events."""

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import Response
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from twoaxis.interop.serving.answers import Answer
from twoaxis.interop.serving.http.exchange import Exchange
from twoaxis.interop.serving.metrics import Metrics
from twoaxis.interop.serving.refusal import Refusal

RETRY_SECONDS = 1


def json_response(data: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """JSON in ASCII, so that any text can be quoted in it, even half of a surrogate pair."""
    return Response(json.dumps(data), status, headers, "application/json")


def refused(refusal: Refusal) -> Response:
    """The error of a request; when asking again may help, with a header that says when."""
    headers = {"Retry-After": str(RETRY_SECONDS)} if refusal.status in (429, 503) else None
    return json_response(refusal.body, refusal.status, headers)


class EventStream(StreamingResponse):
    """An answer in pieces; when the client leaves, its generations are cancelled.

    Args:
        exchange: gives the pieces.
        answer: gives them their shape.
        count: takes the status at the end; an error inside a stream counts as its own status.
        metrics: counts clients that left.
    """

    def __init__(self, exchange: Exchange, answer: Answer, count: Callable[[int], None], metrics: Metrics) -> None:
        self._exchange, self._answer, self._count, self._metrics = exchange, answer, count, metrics
        self._over = False
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(self._events(), headers=headers, media_type="text/event-stream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the stream."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            # However it ended: the generations of a stream that nobody reads must not go on.
            self._exchange.cancel()
            self._metrics.disconnects += not self._over

    async def _events(self) -> AsyncIterator[str]:
        new_tokens = dict.fromkeys(range(self._exchange.choices), 0)
        status = 200
        try:
            for part in self._answer.openings(self._exchange.choices):
                yield _event(part)
            async for piece in self._exchange.pieces():
                new_tokens[piece.choice] = piece.tokens
                for part in self._answer.part(piece):
                    yield _event(part)
            for part in self._answer.closing(sum(new_tokens.values())):
                yield _event(part)
        except Refusal as refusal:
            status = refusal.status
            yield _event(refusal.body)
        self._over = True
        self._count(status)
        yield "data: [DONE]\n\n"


def _event(data: Any) -> str:
    return f"data: {json.dumps(data)}\n\n"
