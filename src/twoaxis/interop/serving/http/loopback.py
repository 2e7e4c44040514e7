"""A server for this machine alone keeps web pages out."""

import ipaddress
import re

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from twoaxis.core.errors import problem
from twoaxis.interop.serving.http.responses import refused
from twoaxis.interop.serving.refusal import Refusal


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

    A page of the web may let a name of its own point at 127.0.0.1; for the browser that asks, the answer would belong to it.

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
