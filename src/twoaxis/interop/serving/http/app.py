"""The routes: completions, chat completions, models, health, metrics."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from twoaxis.interop.serving.answers import Answer
from twoaxis.interop.serving.http.body import read_body
from twoaxis.interop.serving.http.counting import CountRequests
from twoaxis.interop.serving.http.exchange import Exchange
from twoaxis.interop.serving.http.loopback import LocalHosts, is_loopback
from twoaxis.interop.serving.http.responses import OUR_FAULT, EventStream, json_response, refused
from twoaxis.interop.serving.http.service import Service
from twoaxis.interop.serving.metrics import CLIENT_LEFT
from twoaxis.interop.serving.protocol import ChatRequest, CompletionRequest
from twoaxis.interop.serving.protocol import Request as ApiRequest
from twoaxis.interop.serving.refusal import Refusal
from twoaxis.interop.serving.work import work_of

COMPLETIONS, CHAT, MODELS = "/v1/completions", "/v1/chat/completions", "/v1/models"
HEALTH, METRICS = "/health", "/metrics"
ROUTES = (COMPLETIONS, CHAT, MODELS, HEALTH, METRICS)


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
        # Not `request.url`, which also shows what the client made up as the name of the host.
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

    @app.get(f"{MODELS}/{{asked:path}}")
    async def one_model(asked: str) -> Response:
        if asked != name:
            return refused(Refusal(f"unknown model {asked!r}; choose one of {name}", 404, "model", "model_not_found"))
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
        asked = await asyncio.to_thread(kind.read, body)
        work = await asyncio.to_thread(work_of, asked, served)
        answer = Answer(asked, served.name, work.prompt_tokens, work.note)
        exchange = Exchange(service.engine, served.tokenizer, work)
        if asked.stream:
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
    """Makes the response; when the client leaves before, cancels."""
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
