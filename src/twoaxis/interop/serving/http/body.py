"""Reading the body of a request, no more of it than is allowed and no longer."""

import asyncio

from fastapi import Request
from starlette.requests import ClientDisconnect

from twoaxis.interop.serving.refusal import Refusal

BODY_SECONDS = 30.0


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body.

    Raises:
        Refusal: too large, too slow, or the client has left.
    """
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size > max_bytes:
                    raise Refusal(f"body: more than {max_bytes} bytes; must be at most as many; send a shorter prompt", 413)
                parts.append(part)
    except TimeoutError:
        raise Refusal(f"body: not here after {BODY_SECONDS:.0f} seconds; send it again", 408) from None
    except ClientDisconnect:
        raise Refusal("body: the client left", 499) from None
    return b"".join(parts)
