"""Responses: JSON, errors, and streams of server-sent events."""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any

from fastapi import Response
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from twoaxis.data import Tokenizer
from twoaxis.interop.serve.completions import Answer, Choice, Piece
from twoaxis.interop.serve.http.prometheus import CLIENT_LEFT, STATUS
from twoaxis.interop.serve.protocol import Refusal
from twoaxis.interop.serve.scheduler import Engine, QueueFull, Stopped
from twoaxis.interop.serve.work import Work

RETRY_SECONDS = 1
SERVER_FAULT = Refusal("the server failed; its log says why", 500)
_log = logging.getLogger(__name__)


class Exchange:
    """Submits the generations of a request, and yields their pieces in the running event loop.

    Raises:
        Refusal: the queue is full, or the server is stopping.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer, work: Work) -> None:
        self.choices = len(work.generations)
        self._loop = asyncio.get_running_loop()
        self._pieces: asyncio.Queue[Piece] = asyncio.Queue()
        callbacks = [Choice(index, tokenizer, work.stops, work.lead, self._deliver) for index in range(self.choices)]
        try:
            self._handles = engine.submit(list(zip(work.generations, callbacks, strict=True)))
        except QueueFull as error:
            raise Refusal(str(error), 429, code="queue_full") from None
        except Stopped as error:
            raise Refusal(str(error), 503) from None

    def cancel(self) -> None:
        """Cancels all running generations."""
        for handle in self._handles:
            handle.cancel()

    async def pieces(self) -> AsyncIterator[Piece]:
        """All pieces until every choice has ended.

        Raises:
            Refusal: a generation failed, or the server is stopping.
        """
        running = self.choices
        while running:
            piece = await self._pieces.get()
            if piece.ending == "error":
                raise Refusal("the model failed on this request; the log of the server says why", 500)
            if piece.ending == "cancelled":
                raise Refusal("the server is stopping; ask again later", 503)
            running -= piece.ending is not None
            yield piece

    async def whole(self) -> tuple[list[str], list[Piece]]:
        """The text and the last piece of every choice; raises as `pieces` does."""
        texts, last = [""] * self.choices, {}
        async for piece in self.pieces():
            texts[piece.choice] += piece.text
            last[piece.choice] = piece
        return texts, [last[index] for index in range(self.choices)]

    def _deliver(self, piece: Piece) -> None:
        # The loop may be closed when the last generations are cancelled.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._pieces.put_nowait, piece)


def json_response(data: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON response in ASCII, which can quote any text, even half of a surrogate pair."""
    return Response(json.dumps(data), status, headers, "application/json")


def refused(refusal: Refusal, headers: Mapping[str, str] | None = None) -> Response:
    """An error response, with Retry-After if a later request may succeed."""
    retry = {"Retry-After": str(RETRY_SECONDS)} if refusal.status in (429, 503) else {}
    return json_response(refusal.body, refusal.status, {**(headers or {}), **retry})


class EventStream(StreamingResponse):
    """A streamed answer; if the client leaves, its generations are cancelled.

    An error inside a stream is its last event, and its status is counted.
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
            refusal = SERVER_FAULT
        if refusal:
            yield _event(refusal.body)
        self._ended_with = refusal.status if refusal else 200
        yield "data: [DONE]\n\n"


def _event(data: Any) -> str:
    return f"data: {json.dumps(data)}\n\n"
