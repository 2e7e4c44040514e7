"""The routes: completions, chat completions, models, health, metrics."""

import asyncio
import ipaddress
import re
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request, Response
from prometheus_client import generate_latest
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from twoaxis.core.errors import problem
from twoaxis.interop.serve.completions import Answer
from twoaxis.interop.serve.http.prometheus import CLIENT_LEFT, CountRequests, Metrics
from twoaxis.interop.serve.http.responses import SERVER_FAULT, EventStream, Exchange, json_response, refused
from twoaxis.interop.serve.protocol import ChatRequest, CompletionRequest, Refusal
from twoaxis.interop.serve.protocol import Request as ApiRequest
from twoaxis.interop.serve.scheduler import Engine
from twoaxis.interop.serve.work import Served, work_of

COMPLETIONS, CHAT, MODELS = "/v1/completions", "/v1/chat/completions", "/v1/models"
HEALTH, METRICS = "/health", "/metrics"
ROUTES = (COMPLETIONS, CHAT, MODELS, HEALTH, METRICS)
BODY_SECONDS = 30.0
JSON_TYPE = "application/json"


@dataclass
class Service:
    """One served model with its started engine; `closing` is set when the server stops and refuses open requests."""

    engine: Engine
    served: Served
    metrics: Metrics = field(init=False)
    closing: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.metrics = Metrics(self.engine)

    async def close(self) -> None:
        """Ends every open request with an error, after the running step of the batch."""
        self.closing.set()
        await asyncio.to_thread(self.engine.stop)


def create_app(service: Service, host: str) -> FastAPI:
    """The application of a model; with a loopback address as host, it refuses requests to other host names."""
    # The documentation pages of FastAPI load scripts from other hosts.
    app = FastAPI(title="twoaxis", docs_url=None, redoc_url=None, openapi_url=None)
    if is_loopback(host):
        # Starlette's TrustedHostMiddleware compares names, so it refuses 127.9.9.9 and [0::1], and in plain text.
        app.add_middleware(LocalHosts)
    # Middleware that is added last runs first.
    app.add_middleware(CountRequests, metrics=service.metrics, routes=ROUTES)
    _add_routes(app, service)

    @app.exception_handler(HTTPException)
    async def no_such_route(request: Request, error: HTTPException) -> Response:
        # Not `request.url`, which contains the Host header of the client.
        what = f"{request.method} {request.scope['path']}"
        return refused(Refusal(f"{what}: {error.detail}; see GET /v1/models", error.status_code), error.headers)

    @app.exception_handler(Exception)
    async def server_fault(request: Request, error: Exception) -> Response:
        return refused(SERVER_FAULT)

    return app


def _add_routes(app: FastAPI, service: Service) -> None:
    engine, name = service.engine, service.served.name
    model = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "twoaxis"}

    @app.post(COMPLETIONS)
    async def completions(request: Request) -> Response:
        return await _answer(request, CompletionRequest, service)

    @app.post(CHAT)
    async def chat(request: Request) -> Response:
        return await _answer(request, ChatRequest, service)

    @app.get(MODELS)
    async def models() -> Response:
        return json_response({"object": "list", "data": [model]})

    @app.get(f"{MODELS}/{{wanted:path}}")
    async def one_model(wanted: str) -> Response:
        if wanted != name:
            return refused(Refusal(f"unknown model {wanted!r}; choose one of {name}", 404, "model", "model_not_found"))
        return json_response(model)

    @app.get(HEALTH)
    async def health() -> Response:
        return json_response({"status": "ok"} if engine.alive else {"status": "stopping"}, 200 if engine.alive else 503)

    @app.get(METRICS)
    async def counts() -> Response:
        return Response(generate_latest(service.metrics), media_type="text/plain; version=0.0.4")


async def _answer(request: Request, kind: type[ApiRequest], service: Service) -> Response:
    served = service.served
    try:
        body = await read_body(request, served.limits.max_body_bytes, service.closing)
        # In threads, since a long prompt takes time.
        api_request = await asyncio.to_thread(kind.read, body)
        work = await asyncio.to_thread(work_of, api_request, served)
        answer = Answer(api_request, served.name, work.prompt_tokens, work.note)
        exchange = Exchange(service.engine, served.tokenizer, work)
        if api_request.stream:
            return EventStream(exchange, answer)
        return await _whole(request, exchange, answer)
    except Refusal as refusal:
        return refused(refusal)


async def _whole(request: Request, exchange: Exchange, answer: Answer) -> Response:
    """The whole answer; if the client disconnects first, the generations are cancelled."""
    try:
        whole, _ = await _first_done(exchange.whole(), _disconnected(request))
    finally:
        exchange.cancel()
    return Response(status_code=CLIENT_LEFT) if whole is None else json_response(answer.whole(*whole.result()))


async def _first_done(*coroutines: Coroutine[Any, Any, Any], timeout: float | None = None) -> list[asyncio.Task[Any] | None]:
    """Runs the coroutines until one is done, and cancels the others, which are None in the result."""
    tasks = [asyncio.ensure_future(one) for one in coroutines]
    try:
        await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        return [task if task.done() else None for task in tasks]
    finally:
        for task in tasks:
            task.cancel()


async def _disconnected(request: Request) -> Any:
    while (await request.receive())["type"] != "http.disconnect":
        pass


# FastAPI's `max_body_size` refuses in plain text; its request models are read without a timeout, in the event loop.
async def read_body(request: Request, max_bytes: int, closing: asyncio.Event) -> bytes:
    """The whole body of at most `max_bytes`, unless `closing` is set first.

    Raises:
        Refusal: not declared as JSON, too large, too slow, a client that left, or a server that is stopping.
    """
    given = request.headers.get("content-type", "")
    # Browsers let a web page send other types to another site without a preflight request.
    if given.partition(";")[0].strip().lower() != JSON_TYPE:
        raise Refusal(problem("Content-Type", given, JSON_TYPE, "set this header"), 415)
    body, closed = await _first_done(_read(request, max_bytes), closing.wait(), timeout=BODY_SECONDS)
    if body is not None:
        return body.result()
    if closed is not None:
        raise Refusal("the server is stopping; ask again later", 503)
    raise Refusal(f"body: not here after {BODY_SECONDS:g} seconds; send it again", 408)


async def _read(request: Request, max_bytes: int) -> bytes:
    parts, size = [], 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > max_bytes:
                raise Refusal(f"body: more than {max_bytes} bytes; must be at most as many; send a shorter prompt", 413)
            parts.append(part)
    except ClientDisconnect:
        raise Refusal("body: the client left", CLIENT_LEFT) from None
    return b"".join(parts)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the host.

    Example:
        >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("0.0.0.0")
        (True, True, False)
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class LocalHosts:
    """Middleware that refuses requests to other host names than those of this machine.

    It prevents DNS rebinding: a web page whose host name resolves to 127.0.0.1 could read answers in a browser.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request."""
        host = Headers(scope=scope).get("host", "")
        if is_loopback(_without_port(host)):
            await self._app(scope, receive, send)
            return
        allowed = "localhost or a loopback address, since this server is for this machine alone"
        await refused(Refusal(problem("Host", host, allowed, "ask 127.0.0.1"), 403))(scope, receive, send)


def _without_port(host: str) -> str:
    found = re.fullmatch(r"(?:\[([^\[\]]*)\]|([^:\[\]]*))(?::\d*)?", host)
    return (found[1] or found[2] or "") if found else ""
