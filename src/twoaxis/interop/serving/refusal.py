"""Errors in the shape of the OpenAI API."""

from typing import Any

from twoaxis.core.errors import TwoAxisError

LONGEST_MESSAGE = 400
"""Messages quote what was sent, which may be long."""


class Refusal(TwoAxisError):
    """A request that gets no answer.

    Args:
        message: one line: what, got, allowed, remedy.
        status: of HTTP.
        param: the field at fault, if there is one.
        code: for programs.

    Example:
        >>> Refusal("n=0: must be >= 1; ask for one", param="n").body["error"]["type"]
        'invalid_request_error'
    """

    def __init__(self, message: str, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        message = " ".join(message.split())
        if len(message) > LONGEST_MESSAGE:
            message = f"{message[: LONGEST_MESSAGE // 2]} ... {message[-LONGEST_MESSAGE // 2 :]}"
        super().__init__(message)
        self.message, self.status, self.param, self.code = message, status, param, code

    @property
    def body(self) -> dict[str, Any]:
        """What is sent."""
        kind = "server_error" if self.status >= 500 else "rate_limit_error" if self.status == 429 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}
