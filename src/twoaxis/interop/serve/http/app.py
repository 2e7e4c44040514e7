"""The routes: completions, chat completions, models, health, metrics."""

import asyncio
import ipaddress
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from twoaxis.core.errors import problem
from twoaxis.interop.serve.answers import Answer
from twoaxis.interop.serve.engine import Engine
from twoaxis.interop.serve.http.metrics import CLIENT_LEFT, CountRequests, Metrics
from twoaxis.interop.serve.http.responses import OUR_FAULT, EventStream, Exchange, json_response, refused
from twoaxis.interop.serve.protocol import ChatRequest, CompletionRequest, Refusal
from twoaxis.interop.serve.protocol import Request as ApiRequest
from twoaxis.interop.serve.work import Served, work_of

COMPLETIONS, CHAT, MODELS = "/v1/completions", "/v1/chat/completions", "/v1/models"
HEALTH, METRICS = "/health", "/metrics"
ROUTES = (COMPLETIONS, CHAT, MODELS, HEALTH, METRICS)
BODY_SECONDS = 30.0
JSON_TYPE = "application/json"


@dataclass
class Service:
    """One served model.

    Attributes:
        engine: has been started; the caller stops it.
        served: the model as its clients see it.
        metrics: counts.
        closing: set when open requests get the error that the server stops.
    """

    engine: Engine
    served: Served
    metrics: Metrics = field(init=False)
    closing: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.metrics = Metrics(self.engine)

    async def close(self) -> None:
        """Ends every request that is not answered yet with an error; it takes as long as a step of the batch."""
        self.closing.set()
        await asyncio.to_thread(self.engine.stop)


def create_app(service: Service, host: str) -> FastAPI:
    """The application for a model.

    Args:
        service: the model.
        host: where the server listens; one for this machine alone answers no request that was sent to another name.
    """
    # The pages of documentation that come with FastAPI load scripts from elsewhere.
    app = FastAPI(title="twoaxis", docs_url=None, redoc_url=None, openapi_url=None)
    if is_loopback(host):
        app.add_middleware(LocalHosts)
    # The last one added is the first to see a request.
    app.add_middleware(CountRequests, metrics=service.metrics, routes=ROUTES)
    _add_routes(app, service)

    @app.exception_handler(HTTPException)
    async def no_such_route(request: Request, error: HTTPException) -> Response:
        # Not `request.url`, which contains the Host header of the client.
        what = f"{request.method} {request.scope['path']}"
        return refused(Refusal(f"{what}: {error.detail}; see GET /v1/models", error.status_code))

    @app.exception_handler(Exception)
    async def our_fault(request: Request, error: Exception) -> Response:
        return refused(OUR_FAULT)

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
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")


async def _answer(request: Request, kind: type[ApiRequest], service: Service) -> Response:
    served = service.served
    try:
        body = await read_body(request, served.limits.max_body_bytes, service.closing)
        # Long prompts take their time, in which others are served.
        api_request = await asyncio.to_thread(kind.read, body)
        work = await asyncio.to_thread(work_of, api_request, served)
        answer = Answer(api_request, served.name, work.prompt_tokens, work.note)
        exchange = Exchange(service.engine, served.tokenizer, work)
        if api_request.stream:
            return EventStream(exchange, answer)
        return await _unless_disconnected(request, lambda: _whole(exchange, answer), exchange.cancel)
    except Refusal as refusal:
        return refused(refusal)


async def _whole(exchange: Exchange, answer: Answer) -> Response:
    texts, last = await exchange.whole()
    return json_response(answer.whole(texts, last))


async def _unless_disconnected(
    request: Request, make: Callable[[], Awaitable[Response]], cancel: Callable[[], None]
) -> Response:
    """Makes the response; cancels when the client disconnects before."""
    answer = asyncio.ensure_future(make())
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            return answer.result()
        # Nobody reads it.
        return Response(status_code=CLIENT_LEFT)
    finally:
        cancel()
        for task in (answer, gone):
            task.cancel()


async def _disconnected(request: Request) -> Any:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def read_body(request: Request, max_bytes: int, closing: asyncio.Event) -> bytes:
    """The whole body.

    Args:
        request: whose body it is.
        max_bytes: of the largest body.
        closing: set when nothing more is to be read.

    Raises:
        Refusal: not declared as JSON, too large, too slow, the client has left, or the server is stopping.
    """
    given = request.headers.get("content-type", "")
    # Browsers let a web page send other types to another site without a preflight request.
    if given.partition(";")[0].strip().lower() != JSON_TYPE:
        raise Refusal(problem("Content-Type", given, JSON_TYPE, "set this header"), 415)
    reading = asyncio.ensure_future(_read(request, max_bytes))
    closed = asyncio.ensure_future(closing.wait())
    try:
        await asyncio.wait((reading, closed), timeout=BODY_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if reading.done():
            return reading.result()
        if closed.done():
            raise Refusal("the server is stopping; ask again later", 503)
        raise Refusal(f"body: not here after {BODY_SECONDS:.0f} seconds; send it again", 408)
    finally:
        reading.cancel()
        closed.cancel()


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
    """Whether only this machine reaches it.

    Example:
        >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("0.0.0.0")
        (True, True, False)
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class LocalHosts:
    """Refuses requests that were sent to another name than one of this machine.

    A web page may let a name of its own point at 127.0.0.1; the browser would then let that page read the answer.

    Args:
        app: answers the others.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        host = Headers(scope=scope).get("host", "")
        if is_loopback(_without_port(host)):
            await self._app(scope, receive, send)
            return
        allowed = "localhost or a loopback address, since this server is for this machine alone"
        await refused(Refusal(problem("Host", host, allowed, "ask 127.0.0.1"), 403))(scope, receive, send)


def _without_port(host: str) -> str:
    found = re.fullmatch(r"(?:\[([^\[\]]*)\]|([^:\[\]]*))(?::\d*)?", host)
    return (found[1] or found[2] or "") if found else ""
