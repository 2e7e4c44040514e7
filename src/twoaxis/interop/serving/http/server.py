"""Runs the application on a socket until it is told to stop."""

import asyncio
import signal
import socket
import threading
from collections.abc import Awaitable, Callable

import uvicorn
from fastapi import FastAPI

from twoaxis.core.errors import ConfigError, problem
from twoaxis.interop.serving.http.timed import MAX_HEAD_BYTES, TimedProtocol

TELLING_SECONDS = 5
"""For a step that is running and for answers that say that the server stops; then connections are cut."""


def bind(host: str, port: int) -> socket.socket:
    """Opens the socket; port 0 takes a free one.

    Raises:
        ConfigError: the port is taken, or the host is not this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        opened = socket.socket(family, kind, protocol)
    # A name that is none in the encoding of names.
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
    """Its URL."""
    host, port = opened.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """Serves the application; a signal lets running requests end first.

    Args:
        app: what to serve.
        close: called when running requests have taken too long to end; it has to end them.
        ready: called when it answers.
        grace_seconds: how long running requests may take to end after a signal.
    """

    def __init__(
        self, app: FastAPI, close: Callable[[], Awaitable[None]], ready: Callable[[], None], grace_seconds: int = 10
    ) -> None:
        deadline = grace_seconds + TELLING_SECONDS
        super().__init__(
            uvicorn.Config(
                app,
                http=TimedProtocol,
                h11_max_incomplete_event_size=MAX_HEAD_BYTES,
                log_level="warning",
                access_log=False,
                timeout_graceful_shutdown=deadline,
                lifespan="off",
                ws="none",
            )
        )
        self._close, self._ready, self._grace_seconds = close, ready, grace_seconds

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts, and says so."""
        await super().startup(sockets)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Waits for running requests, and closes those that take too long."""
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
        # Uvicorn raises the signals again that it has obeyed: to stop when asked is no failure.
        before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            self.run([opened])
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
