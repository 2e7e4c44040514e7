"""Connections that are held to limits: how large the head of a request may be, and how long a client may keep us waiting."""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from twoaxis.interop.serving.http.responses import refused
from twoaxis.interop.serving.refusal import Refusal

MAX_HEAD_BYTES = 1 << 16
"""Of the first line and the headers of a request."""

REQUEST_SECONDS = 10.0
"""From a new connection, or the end of an answer, to the end of the next headers, or of a body whose answer is out already."""

READING_SECONDS = 60.0
"""For a client that lets its answer lie, once what the system holds back for it is full."""


class TimedProtocol(H11Protocol):
    """HTTP/1.1 on one connection; bodies have their own limits, see `body`."""

    _waiting: asyncio.TimerHandle | None = None
    _lying: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Begins to wait for a request."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Takes what has come."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forgets the connection."""
        for timer in (self._waiting, self._lying):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Begins to wait for the next request."""
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        """The client reads no more."""
        super().pause_writing()
        self._lying = self.loop.call_later(READING_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """The client reads again."""
        super().resume_writing()
        if self._lying is not None:
            self._lying.cancel()

    def send_400_response(self, msg: str) -> None:
        """Refuses what is no request, in the shape of the API."""
        if len(self.conn.trailing_data[0]) > MAX_HEAD_BYTES:
            allowed = f"must be at most {MAX_HEAD_BYTES} bytes; send fewer or shorter headers"
            self._refuse(Refusal(f"head of the request: more than {MAX_HEAD_BYTES} bytes; {allowed}", 431))
        else:
            self._refuse(Refusal("request: is not HTTP/1.1; see the OpenAI API", 400))

    def _watch(self) -> None:
        """Lets the clock run while the next thing is the client's: a head, or a body that nobody needs any more."""
        answered = self.cycle is None or self.cycle.response_complete
        owing = answered and self.conn.their_state in (h11.IDLE, h11.SEND_BODY)
        if owing and self._waiting is None:
            self._waiting = self.loop.call_later(REQUEST_SECONDS, self._give_up)
        elif not owing and self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _give_up(self) -> None:
        self._waiting = None
        begun = self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]
        if begun and not self.transport.is_closing():
            self._refuse(Refusal(f"headers: not here after {REQUEST_SECONDS:g} seconds; send the request again", 408))
        else:
            self.transport.close()

    def _refuse(self, refusal: Refusal) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            response = refused(refusal)
            headers: Any = [*response.raw_headers, (b"connection", b"close")]
            head, body = h11.Response(status_code=refusal.status, headers=headers), h11.Data(data=bytes(response.body))
            for event in (head, body, h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
