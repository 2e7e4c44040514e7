"""The routes: completions, chat completions, models, health, metrics."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from twoaxis.interop.serving.answers import Answer
from twoaxis.interop.serving.engine import Engine
from twoaxis.interop.serving.http.body import read_body
from twoaxis.interop.serving.http.exchange import Exchange
from twoaxis.interop.serving.http.responses import EventStream, json_response, refused
from twoaxis.interop.serving.metrics import Metrics
from twoaxis.interop.serving.protocol import ChatRequest, CompletionRequest
from twoaxis.interop.serving.protocol import Request as ApiRequest
from twoaxis.interop.serving.refusal import Refusal
from twoaxis.interop.serving.work import Served, work_of

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def create_app(engine: Engine, served: Served) -> FastAPI:
    """The application for an engine that has been started; whoever started it stops it.

    Args:
        engine: runs the model.
        served: the model as its clients see it.
    """
    metrics = Metrics(engine)
    # The pages of documentation that come with FastAPI load scripts from elsewhere.
    app = FastAPI(title="twoaxis", docs_url=None, redoc_url=None, openapi_url=None)
    created = int(time.time())
    model = {"id": served.name, "object": "model", "created": created, "owned_by": "twoaxis"}

    @app.post(COMPLETIONS)
    async def completions(request: Request) -> Response:
        return await _answer(request, CompletionRequest, engine, served, metrics)

    @app.post(CHAT)
    async def chat(request: Request) -> Response:
        return await _answer(request, ChatRequest, engine, served, metrics)

    @app.get("/v1/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": [model]})

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        if name != served.name:
            return refused(Refusal(f"unknown model {name!r}; choose one of {served.name}", 404, "model", "model_not_found"))
        return json_response(model)

    @app.get("/health")
    async def health() -> Response:
        return json_response({"status": "ok"} if engine.alive else {"status": "stopping"}, 200 if engine.alive else 503)

    @app.get("/metrics")
    async def counts() -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4")

    @app.exception_handler(HTTPException)
    async def no_such_route(request: Request, error: HTTPException) -> Response:
        return refused(Refusal(f"{request.method} {request.url.path}: {error.detail}; see GET /v1/models", error.status_code))

    @app.exception_handler(Exception)
    async def our_fault(request: Request, error: Exception) -> Response:
        return refused(Refusal("the server failed; its log says why", 500))

    return app


async def _answer(request: Request, kind: type[ApiRequest], engine: Engine, served: Served, metrics: Metrics) -> Response:
    begin, path = time.monotonic(), request.url.path

    def count(status: int) -> None:
        metrics.answered(path, status, time.monotonic() - begin)

    try:
        body = await read_body(request, served.limits.max_body_bytes)
        # Long prompts take their time, in which others are served.
        asked = await asyncio.to_thread(kind.read, body)
        work = await asyncio.to_thread(work_of, asked, served)
        answer = Answer(asked, served.name, work.prompt_tokens)
        exchange = Exchange(engine, served.tokenizer, work)
        if asked.stream:
            return EventStream(exchange, answer, count, metrics)
        return await _unless_disconnected(request, lambda: _whole(exchange, answer, count), exchange.cancel, metrics)
    except Refusal as refusal:
        count(refusal.status)
        return refused(refusal)


async def _whole(exchange: Exchange, answer: Answer, count: Callable[[int], None]) -> Response:
    texts, last = await exchange.whole()
    count(200)
    return json_response(answer.whole(texts, last))


async def _unless_disconnected(
    request: Request, make: Callable[[], Awaitable[Response]], cancel: Callable[[], None], metrics: Metrics
) -> Response:
    """Makes the response; when the client leaves before, cancels."""
    answer = asyncio.ensure_future(make())
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            return answer.result()
        metrics.disconnects += 1
        # Nobody reads it.
        return Response(status_code=499)
    finally:
        cancel()
        for task in (answer, gone):
            task.cancel()


async def _disconnected(request: Request) -> Any:
    while (await request.receive())["type"] != "http.disconnect":
        pass
