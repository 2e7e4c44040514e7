"""Runs the application on a socket until it is told to stop."""

import ipaddress
import signal
import socket
import threading
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI

from twoaxis.core.errors import ConfigError, problem


def bind(host: str, port: int) -> socket.socket:
    """Opens the socket; port 0 takes a free one.

    Raises:
        ConfigError: the port is taken, or the host is not this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        opened = socket.socket(family, kind, protocol)
    except OSError as error:
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


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches it.

    Example:
        >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("0.0.0.0")
        (True, True, False)
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def address_of(opened: socket.socket) -> str:
    """Its URL."""
    host, port = opened.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """Serves the application; a signal lets running requests end first.

    Args:
        app: what to serve.
        ready: called when it answers.
        grace_seconds: how long running requests may take to end after a signal.
    """

    def __init__(self, app: FastAPI, ready: Callable[[], None], grace_seconds: int = 10) -> None:
        super().__init__(
            uvicorn.Config(
                app, log_level="warning", access_log=False, timeout_graceful_shutdown=grace_seconds, lifespan="off", ws="none"
            )
        )
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts, and says so."""
        await super().startup(sockets)
        self._ready()

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
