"""Responses: JSON, refusals, and streams of server-sent events."""

import json
import logging
from collections.abc import AsyncIterator
from typing import Any

from fastapi import Response
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from twoaxis.interop.serving.answers import Answer
from twoaxis.interop.serving.http.counting import STATUS
from twoaxis.interop.serving.http.exchange import Exchange
from twoaxis.interop.serving.metrics import CLIENT_LEFT
from twoaxis.interop.serving.refusal import Refusal

RETRY_SECONDS = 1
OUR_FAULT = Refusal("the server failed; its log says why", 500)

_log = logging.getLogger(__name__)


def json_response(data: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """JSON in ASCII, so that any text can be quoted in it, even half of a surrogate pair."""
    return Response(json.dumps(data), status, headers, "application/json")


def refused(refusal: Refusal) -> Response:
    """The error of a request; when asking again may help, with a header that says when."""
    headers = {"Retry-After": str(RETRY_SECONDS)} if refusal.status in (429, 503) else None
    return json_response(refusal.body, refusal.status, headers)


class EventStream(StreamingResponse):
    """An answer in pieces; when the client leaves, its generations are cancelled.

    An error inside a stream is its last piece, and counts as its own status.

    Args:
        exchange: gives the pieces.
        answer: gives them their shape.
    """

    def __init__(self, exchange: Exchange, answer: Answer) -> None:
        self._exchange, self._answer = exchange, answer
        self._ended_with = CLIENT_LEFT
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(self._events(), headers=headers, media_type="text/event-stream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the stream."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            # However it ended: the generations of a stream that nobody reads must not go on.
            self._exchange.cancel()
            scope["state"][STATUS] = self._ended_with

    async def _events(self) -> AsyncIterator[str]:
        new_tokens = dict.fromkeys(range(self._exchange.choices), 0)
        refusal = None
        try:
            for part in self._answer.openings(self._exchange.choices):
                yield _event(part)
            async for piece in self._exchange.pieces():
                new_tokens[piece.choice] = piece.tokens
                for part in self._answer.part(piece):
                    yield _event(part)
            for part in self._answer.closing(sum(new_tokens.values())):
                yield _event(part)
        except Refusal as found:
            refusal = found
        except Exception:
            _log.exception("a stream ends in an error")
            refusal = OUR_FAULT
        if refusal:
            yield _event(refusal.body)
        self._ended_with = refusal.status if refusal else 200
        yield "data: [DONE]\n\n"


def _event(data: Any) -> str:
    return f"data: {json.dumps(data)}\n\n"
