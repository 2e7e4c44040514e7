"""The server on a socket, and limits of size and time for its connections."""

import asyncio
import signal
import socket
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from twoaxis.core.errors import ConfigError, problem
from twoaxis.interop.serve.http.responses import refused
from twoaxis.interop.serve.protocol import Refusal

MAX_HEAD_BYTES = 1 << 16
"""The longest request line and headers together."""

REQUEST_SECONDS = 10.0
"""From a new connection, or the end of an answer, to the end of the next headers, or of a body that is answered already."""

READING_SECONDS = 60.0
"""The timeout of a client that reads nothing of its answer once the send buffer is full."""

STOPPING_SECONDS = 5
"""For the running step and for the errors to open requests; then connections are closed."""


def bind(host: str, port: int) -> socket.socket:
    """Opens the socket; port 0 takes any free port.

    Raises:
        ConfigError: the port is taken, or the host is not this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        opened = socket.socket(family, kind, protocol)
    # UnicodeError: a host name that cannot be encoded.
    except (OSError, UnicodeError) as error:
        raise ConfigError(problem("host", host, f"a name or address of this machine ({error})", "try 127.0.0.1")) from None
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind(address)
        opened.listen(1024)
    except OSError as error:
        opened.close()
        allowed = f"free, and {host} an address of this machine ({error.strerror})"
        raise ConfigError(problem("port", port, allowed, "choose another, or 0 for any free one")) from None
    return opened


def address_of(opened: socket.socket) -> str:
    """The URL of the socket."""
    host, port = opened.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """Serves the application; after a signal it waits for running requests.

    Args:
        app: the application.
        close: called `grace_seconds` after a signal; must end running requests.
        ready: called when the server accepts requests.
        grace_seconds: for running requests after a signal.
    """

    def __init__(
        self, app: FastAPI, close: Callable[[], Awaitable[None]], ready: Callable[[], None], grace_seconds: int = 10
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=TimedProtocol,
                h11_max_incomplete_event_size=MAX_HEAD_BYTES,
                log_level="warning",
                access_log=False,
                timeout_graceful_shutdown=grace_seconds + STOPPING_SECONDS,
                lifespan="off",
                ws="none",
            )
        )
        self._close, self._ready, self._grace_seconds = close, ready, grace_seconds

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts the server and calls `ready`."""
        await super().startup(sockets)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Waits for running requests, and ends those that take too long."""
        closing = asyncio.ensure_future(self._close_late())
        try:
            await super().shutdown(sockets)
        finally:
            closing.cancel()

    async def _close_late(self) -> None:
        await asyncio.sleep(self._grace_seconds)
        await self._close()

    def serve_on(self, opened: socket.socket) -> None:
        """Serves until SIGINT or SIGTERM, or until `should_exit` is set."""
        if threading.current_thread() is not threading.main_thread():
            self.run([opened])
            return
        # Uvicorn raises handled signals again, but a requested stop is no error.
        before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            self.run([opened])
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


# Uvicorn 0.54 has timeouts for idle connections and for its own end, none for heads, bodies or clients that do not read.
class TimedProtocol(H11Protocol):
    """HTTP/1.1 on one connection with timeouts; for those of bodies see `read_body`."""

    _request_timer: asyncio.TimerHandle | None = None
    _reading_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Starts the timeout of the first request."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Parses received data and updates the timeout."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancels the timeouts."""
        for timer in (self._request_timer, self._reading_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Starts the timeout of the next request."""
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        """Starts the timeout of a client that does not read."""
        super().pause_writing()
        self._reading_timer = self.loop.call_later(READING_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """Cancels the timeout of a client that reads again."""
        super().resume_writing()
        if self._reading_timer is not None:
            self._reading_timer.cancel()

    def send_400_response(self, msg: str) -> None:
        """Refuses an invalid request with an error of the API."""
        if len(self.conn.trailing_data[0]) > MAX_HEAD_BYTES:
            allowed = f"must be at most {MAX_HEAD_BYTES} bytes; send fewer or shorter headers"
            self._refuse(Refusal(f"head of the request: more than {MAX_HEAD_BYTES} bytes; {allowed}", 431))
        else:
            self._refuse(Refusal("request: is not HTTP/1.1; see the OpenAI API", 400))

    def _watch(self) -> None:
        """Runs the timeout while the server waits for a head, or for the rest of a body that is answered already."""
        answered = self.cycle is None or self.cycle.response_complete
        waits = answered and self.conn.their_state in (h11.IDLE, h11.SEND_BODY)
        if waits and self._request_timer is None:
            self._request_timer = self.loop.call_later(REQUEST_SECONDS, self._time_out)
        elif not waits and self._request_timer is not None:
            self._request_timer.cancel()
            self._request_timer = None

    def _time_out(self) -> None:
        self._request_timer = None
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
