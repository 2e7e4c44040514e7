"""Clients that are silent, slow, or send headers without end: they are let go, and the others do not notice."""

import asyncio
import contextlib
import json
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

pytest.importorskip("fastapi", reason="needs the extra twoaxis[serve]")
pytest.importorskip("uvicorn", reason="needs the extra twoaxis[serve]")
pytest.importorskip("prometheus_client", reason="needs the extra twoaxis[serve]")

import uvicorn
from uvicorn.server import ServerState

from twoaxis.data.tokenizer import ByteTokenizer
from twoaxis.interop.serve.http import routes, server
from twoaxis.interop.serve.scheduler import Engine
from twoaxis.interop.serve.work import Limits

from ..hf_models import small_decoder
from .recorder import WAIT_SECONDS
from .server import COMPLETIONS, Client, serving

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    limits = Limits(max_prompt_tokens=60, max_new_tokens=60, max_body_bytes=4000)
    with serving(Engine(small_decoder("plain", vocab_size=256)), ByteTokenizer(), 128, limits) as client:
        yield client


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "REQUEST_SECONDS", 0.2)


@contextlib.contextmanager
def connected(client: Client, sent: bytes = b"") -> Iterator[socket.socket]:
    place = urlsplit(client.address)
    assert place.hostname is not None and place.port is not None
    with socket.create_connection((place.hostname, place.port), WAIT_SECONDS) as opened:
        opened.sendall(sent)
        yield opened


def rest(opened: socket.socket) -> bytes:
    """All that the server sends until it closes the connection; it must do so."""
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := opened.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


def error_of(answer: bytes) -> tuple[int, str]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["message"]


def test_a_silent_connection_is_closed(client: Client, hurried: None) -> None:
    """Catches connections that stay open for ever."""
    with connected(client) as silent:
        assert client.get("/health")[0] == 200
        assert rest(silent) == b""


def test_headers_that_do_not_end_are_answered_with_an_error(client: Client, hurried: None) -> None:
    with connected(client, HEALTH) as slow:
        assert client.get("/health")[0] == 200
        status, message = error_of(rest(slow))
    assert status == 408 and message.startswith("headers: not here after 0.2 seconds")


def test_a_later_request_of_a_connection_is_held_to_the_same(client: Client, hurried: None) -> None:
    """Catches a clock that stands still once a first request is through."""
    with connected(client, HEALTH + b"\r\n") as slow:
        assert slow.recv(1 << 16).startswith(b"HTTP/1.1 200")
        slow.sendall(HEALTH)
        assert error_of(rest(slow))[0] == 408


def test_a_body_that_goes_on_behind_its_answer_is_not_waited_for(client: Client, hurried: None) -> None:
    head = (
        f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: text/plain\r\nContent-Length: 99\r\n\r\n{{".encode()
    )
    with connected(client, head) as slow:
        assert error_of(rest(slow))[0] == 415


def test_a_body_that_does_not_end_is_answered_with_an_error(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "BODY_SECONDS", 0.2)
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{{"
    with connected(client, head.encode()) as slow:
        status, message = error_of(rest(slow))
    assert status == 408 and message.startswith("body: not here after 0.2 seconds")


def test_headers_without_end_are_refused_before_they_are_read(client: Client) -> None:
    """Catches heads that are gathered and parsed whatever their size, while other clients wait."""
    with connected(client, HEALTH) as greedy:
        # All fits into what the system holds on the way, so that sending never blocks.
        greedy.sendall(b"X: " + b"x" * server.MAX_HEAD_BYTES)
        status, message = error_of(rest(greedy))
        assert status == 431 and f"more than {server.MAX_HEAD_BYTES} bytes" in message
        assert client.get("/health")[0] == 200
    with connected(client) as endless, contextlib.suppress(ConnectionError):
        for _ in range(45):
            endless.sendall(b"x" * (1 << 20))
        raise AssertionError("45 MB of headers were taken")


def test_large_but_allowed_headers_are_read(client: Client) -> None:
    assert client.get("/health", Note="x" * (server.MAX_HEAD_BYTES // 2))[0] == 200


@pytest.mark.parametrize("sent", [b"nonsense\r\n\r\n", b"GET / HTTP/9\r\n\r\n", b"\x16\x03\x01\x02\x00" * 20 + b"\r\n\r\n"])
def test_what_is_no_request_is_refused_in_the_shape_of_the_api(client: Client, sent: bytes) -> None:
    with connected(client, sent) as opened:
        assert error_of(rest(opened)) == (400, "request: is not HTTP/1.1; see the OpenAI API")


class Wire(asyncio.Transport):
    """Notes whether it was cut."""

    def __init__(self) -> None:
        super().__init__()
        self.cut = asyncio.Event()

    def abort(self) -> None:
        self.cut.set()


def test_a_client_that_does_not_read_its_answer_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches answers that wait for their reader for ever."""
    monkeypatch.setattr(server, "READING_SECONDS", 0.05)

    async def app(scope: Any, receive: Any, send: Any) -> None: ...

    async def lie(read_again: bool) -> bool:
        protocol, wire = server.TimedProtocol(uvicorn.Config(app, lifespan="off"), ServerState(), {}), Wire()
        protocol.connection_made(wire)
        protocol.pause_writing()
        if read_again:
            protocol.resume_writing()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(wire.cut.wait(), 0.3 if read_again else WAIT_SECONDS)
        protocol.connection_lost(OSError())
        return wire.cut.is_set()

    assert asyncio.run(lie(read_again=False))
    assert not asyncio.run(lie(read_again=True))
