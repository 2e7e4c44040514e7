"""Requests of the OpenAI API for completions and chat completions.

A null field counts as absent. Unsupported fields that could change the answer are refused unless they have their default; other
unsupported fields are ignored; unknown fields are refused, as by the API. Additions: `top_k`, and `parse_special` for
completions.
"""

import json
import re
from typing import Any, Literal, Self

from pydantic import Field, field_validator

from twoaxis.core.config import Config
from twoaxis.core.errors import ConfigError, TwoAxisError, problem

IGNORED = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
    | {"parallel_tool_calls"}
)
"""Fields without effect on the answer."""

ACCEPTED_DEFAULTS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("audio", "prediction", "reasoning_effort", "top_logprobs", "verbosity", "web_search_options"), ()),
    **dict.fromkeys(("echo", "logprobs"), (False,)),
    **dict.fromkeys(("frequency_penalty", "presence_penalty"), (0, 0.0)),
    **dict.fromkeys(("functions", "tools"), ([],)),
    "best_of": (1,),
    "function_call": ("none",),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
}
"""Unsupported fields of the API, and their accepted values."""

MAX_STOPS = 4

MAX_DEPTH = 64
"""The deepest nesting of lists and objects; Python can neither compare nor print much deeper ones."""

LONGEST_MESSAGE = 400
"""Messages quote the request, which may be long."""


class Refusal(TwoAxisError):
    """An error response to a request.

    Args:
        message: one line: what, got, allowed, remedy.
        status: HTTP status.
        param: the field at fault, if any.
        code: the error code, if any.

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
        """The JSON body of the response."""
        kind = "server_error" if self.status >= 500 else "rate_limit_error" if self.status == 429 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class StreamOptions(Config):
    """Options of a stream.

    Args:
        include_usage: whether a last event has the token counts.
        include_obfuscation: accepted and ignored: the padding of the API against eavesdroppers is never sent.
    """

    include_usage: bool = False
    include_obfuscation: bool = False


class Request(Config):
    """The fields of both kinds of requests.

    Args:
        model: the name of the served model, or empty.
        max_tokens: new tokens of each choice; None for the default of the kind.
        temperature: divides the logits; 0 takes the most likely token.
        top_p: sample among the most likely tokens of this probability.
        top_k: sample among this many most likely tokens.
        n: choices for each prompt.
        seed: choice i of prompt p samples with `seed + p n + i`; None draws a seed.
        stop: a choice ends before any of these: as text, or as the special token of this name.
        stream: whether text is sent as it is generated.
        stream_options: for streams.
    """

    model: str = ""
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=1)
    n: int = Field(default=1, ge=1, le=128)
    seed: int | None = None
    stop: list[str] = Field(default=[], max_length=MAX_STOPS)
    stream: bool = False
    stream_options: StreamOptions | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _one_or_several(cls, stop: Any) -> Any:
        stops = [stop] if isinstance(stop, str) else stop
        if isinstance(stops, list) and "" in stops:
            raise ConfigError(problem("stop", stop, "strings with a character at least", "leave empty ones out"))
        return stops

    @classmethod
    def read(cls, body: bytes) -> Self:
        """Parses the body of a request.

        Raises:
            Refusal: an invalid body.
        """
        try:
            data = json.loads(body)
        # Also for very deep nesting and very long numbers.
        except (ValueError, RecursionError) as error:
            raise Refusal(f"body: is not JSON ({error}); send one JSON object") from None
        _check_depth(data)
        if not isinstance(data, dict):
            raise Refusal(problem("body", data, "one JSON object", "see the OpenAI API"))
        try:
            return cls(**cls._known(_without_nulls(data)))
        except ConfigError as error:
            raise Refusal(str(error), param=_param(str(error))) from None

    @classmethod
    def _known(cls, data: dict[str, Any]) -> dict[str, Any]:
        """The supported fields."""
        for name, harmless in ACCEPTED_DEFAULTS.items():
            if name in data:
                value = data.pop(name)
                # False == 0 in Python.
                if not any(type(value) is type(one) and value == one for one in harmless):
                    raise Refusal(f"{name}={value!r}: is not supported by this server; leave it out", param=name)
        return {name: value for name, value in data.items() if name not in IGNORED}


class CompletionRequest(Request):
    """`POST /v1/completions`.

    Args:
        prompt: texts or lists of token ids, one answer each; a single text or list of ids is one prompt.
        parse_special: whether the name of a special token in a text is that token; otherwise it stays text, with a note in the
            answer.
    """

    prompt: list[str | list[int]]
    parse_special: bool = False

    @field_validator("prompt", mode="before")
    @classmethod
    def _prompts(cls, prompt: Any) -> Any:
        if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt)):
            return [prompt]
        if isinstance(prompt, list) and prompt:
            texts = all(isinstance(one, str) for one in prompt)
            tokens = all(isinstance(one, list) and all(type(token) is int for token in one) for one in prompt)
            if texts or tokens:
                return prompt
        allowed = "a string, a list of strings, a list of token ids, or a list of such lists"
        raise ConfigError(problem("prompt", prompt, allowed, "send one of them"))


class Message(Config):
    """One message of a conversation.

    Args:
        role: of the author.
        content: the text.
        name: of the author; not shown to the model.
    """

    role: Literal["system", "developer", "user", "assistant"]
    content: str
    name: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _text(cls, content: Any) -> Any:
        if isinstance(content, str):
            return content
        if isinstance(content, list) and all(isinstance(part, dict) and set(part) == {"type", "text"} for part in content):
            texts = [part["text"] for part in content if part["type"] == "text" and isinstance(part["text"], str)]
            if len(texts) == len(content):
                return "".join(texts)
        if content is None:
            raise ConfigError("content=null: must be a string or a list of text parts, also where tools are called; send text")
        raise ConfigError(problem("content", content, "a string or a list of text parts", "send text only"))


class ChatRequest(Request):
    """`POST /v1/chat/completions`.

    Args:
        messages: the conversation so far.
    """

    messages: list[Message] = Field(min_length=1)

    @classmethod
    def _known(cls, data: dict[str, Any]) -> dict[str, Any]:
        data = super()._known(data)
        newer = data.pop("max_completion_tokens", None)
        if newer is not None and data.setdefault("max_tokens", newer) != newer:
            both = f"max_tokens={data['max_tokens']!r} and max_completion_tokens={newer!r}"
            raise Refusal(f"{both}: must be the same; send one of them", param="max_completion_tokens")
        messages = data.get("messages")
        if isinstance(messages, list):
            # Null content has a separate error.
            data["messages"] = [_without_nulls(one, "content") if isinstance(one, dict) else one for one in messages]
        return data


def _without_nulls(data: dict[str, Any], *but: str) -> dict[str, Any]:
    return {name: value for name, value in data.items() if value is not None or name in but}


def _check_depth(data: Any) -> None:
    level = [data]
    for _ in range(MAX_DEPTH + 1):
        level = [one for one in level if isinstance(one, dict | list)]
        if not level:
            return
        level = [inner for one in level for inner in (one.values() if isinstance(one, dict) else one)]
    raise Refusal(f"body: lists and objects are nested more than {MAX_DEPTH} deep; must be at most so deep; see the OpenAI API")


def _param(message: str) -> str | None:
    found = re.match(r"(?:unknown key ')?([a-z_]+)", message)
    return found[1] if found else None
