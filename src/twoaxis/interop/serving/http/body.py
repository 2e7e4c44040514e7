"""Reading the body of a request, no more of it than is allowed and no longer."""

import asyncio

from fastapi import Request
from starlette.requests import ClientDisconnect

from twoaxis.core.errors import problem
from twoaxis.interop.serving.metrics import CLIENT_LEFT
from twoaxis.interop.serving.refusal import Refusal

BODY_SECONDS = 30.0
JSON_TYPE = "application/json"


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
    # A page of the web may send any other type without asking first.
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
