"""A server on a free port in a thread, and requests to it over plain sockets."""

import http.client
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from twoaxis.data import Tokenizer
from twoaxis.interop.serve.http.routes import Service, create_app
from twoaxis.interop.serve.http.server import Server, address_of, bind
from twoaxis.interop.serve.scheduler import Engine
from twoaxis.interop.serve.work import Limits, Served

from .recorder import WAIT_SECONDS

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}


class Client:
    """Speaks HTTP with one server."""

    def __init__(self, address: str, engine: Engine) -> None:
        self.address, self.engine = address, engine
        self._place = urlsplit(address).netloc

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self._place, timeout=WAIT_SECONDS)

    def get(self, path: str, **headers: str) -> tuple[int, str]:
        return self._ask("GET", path, None, headers)[:2]

    def post(
        self, path: str, data: Any, headers: Mapping[str, str] = JSON
    ) -> tuple[int, dict[str, Any], http.client.HTTPMessage]:
        body = data if isinstance(data, bytes) else json.dumps(data).encode()
        status, text, answered = self._ask("POST", path, body, headers)
        return status, json.loads(text), answered

    def stream(self, path: str, data: Any) -> list[dict[str, Any]]:
        """All events of a stream but the last, which says that it is over."""
        status, text, headers = self._ask("POST", path, json.dumps({**data, "stream": True}).encode(), JSON)
        assert (status, headers.get_content_type()) == (200, "text/event-stream")
        events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
        assert events[-1] == "[DONE]"
        return [json.loads(event) for event in events[:-1]]

    def _ask(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> tuple[int, str, http.client.HTTPMessage]:
        connection = self.connect()
        try:
            connection.request(method, path, body, dict(headers))
            response = connection.getresponse()
            return response.status, response.read().decode(), response.headers
        finally:
            connection.close()


@contextmanager
def serving(engine: Engine, tokenizer: Tokenizer, max_seq_len: int, limits: Limits) -> Iterator[Client]:
    """Serves until the context ends."""
    ready = threading.Event()
    with bind("127.0.0.1", 0) as opened, engine:
        service = Service(engine, Served("toy", tokenizer, max_seq_len, limits))
        server = Server(create_app(service, "127.0.0.1"), service.close, ready.set, grace_seconds=1)
        thread = threading.Thread(target=server.serve_on, args=(opened,), daemon=True)
        thread.start()
        assert ready.wait(WAIT_SECONDS)
        try:
            yield Client(address_of(opened), engine)
        finally:
            server.should_exit = True
            thread.join()
