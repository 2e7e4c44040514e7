"""The text of generated tokens, and answers of the OpenAI API, whole and streamed."""

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from twoaxis.data import Tokenizer
from twoaxis.data.text_stream import StoppingText
from twoaxis.interop.serve.generation import Ending
from twoaxis.interop.serve.protocol import ChatRequest, Request


class Piece(NamedTuple):
    """Text that later tokens do not change.

    Attributes:
        choice: its index in the answer.
        text: new text; empty only at the end.
        ending: of the choice, with its last piece.
        tokens: new tokens of the choice so far, including those of a stop string.
    """

    choice: int
    text: str
    ending: Ending | None
    tokens: int


class Choice:
    """The callback of one generation: decodes its tokens, ends at stop strings, and delivers pieces of text without `lead`.

    It runs in the thread of the model.
    """

    def __init__(
        self, index: int, tokenizer: Tokenizer, stops: Sequence[str], lead: str, deliver: Callable[[Piece], None]
    ) -> None:
        self._index, self._lead, self._deliver = index, lead, deliver
        self._text = StoppingText(tokenizer, stops)
        self._tokens = 0

    def token(self, token: int) -> bool:
        """Receives a token; returns whether a stop string is complete."""
        self._tokens += 1
        self._piece(self._text.push(token), None)
        return self._text.stopped

    def end(self, ending: Ending) -> None:
        """Delivers the remaining text with the ending."""
        text = self._text.rest() if ending in ("stop", "length") else ""
        self._piece(text, "stop" if self._text.stopped and ending == "length" else ending)

    def _piece(self, text: str, ending: Ending | None) -> None:
        if text:
            text, self._lead = text.removeprefix(self._lead), ""
        if text or ending:
            self._deliver(Piece(self._index, text, ending, self._tokens))


@dataclass(frozen=True)
class Answer:
    """The JSON objects of one answer, whole or streamed.

    Attributes:
        request: the request.
        model: the name of the served model.
        prompt_tokens: for the usage.
        note: of the work; a field that the API does not have, left out if empty.
        id: unique.
        created: seconds since 1970.
    """

    request: Request
    model: str
    prompt_tokens: int
    note: str = ""
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def chat(self) -> bool:
        """Whether it answers a chat."""
        return isinstance(self.request, ChatRequest)

    def whole(self, texts: Sequence[str], last: Sequence[Piece]) -> dict[str, Any]:
        """All choices at once, from their texts and last pieces."""
        choices = []
        for text, piece in zip(texts, last, strict=True):
            content = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
            choices.append({"index": piece.choice, **content, "logprobs": None, "finish_reason": piece.ending})
        kind = "chat.completion" if self.chat else "text_completion"
        return {**self._frame(kind), "choices": choices, "usage": self.usage(sum(piece.tokens for piece in last))}

    def openings(self, choices: int) -> list[dict[str, Any]]:
        """The first stream events: in a chat, the role of each choice."""
        return [self._part(index, {"role": "assistant", "content": ""}, None) for index in range(choices)] if self.chat else []

    def part(self, piece: Piece) -> list[dict[str, Any]]:
        """The stream events of one piece; in a chat, text and ending are separate."""
        if not self.chat:
            return [self._part(piece.choice, piece.text, piece.ending)]
        parts = [self._part(piece.choice, {"content": piece.text}, None)] if piece.text else []
        return parts + ([self._part(piece.choice, {}, piece.ending)] if piece.ending else [])

    def closing(self, new_tokens: int) -> list[dict[str, Any]]:
        """The last stream event: the usage, if requested."""
        usage = {**self._frame(self._stream_kind), "choices": [], "usage": self.usage(new_tokens)}
        return [usage] if self._counts else []

    def usage(self, new_tokens: int) -> dict[str, int]:
        """The token counts."""
        counts = {"prompt_tokens": self.prompt_tokens, "completion_tokens": new_tokens}
        return {**counts, "total_tokens": self.prompt_tokens + new_tokens}

    @property
    def _counts(self) -> bool:
        options = self.request.stream_options
        return options is not None and options.include_usage

    @property
    def _stream_kind(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _frame(self, kind: str) -> dict[str, Any]:
        prefix = "chatcmpl" if self.chat else "cmpl"
        frame = {"id": f"{prefix}-{self.id}", "object": kind, "created": self.created, "model": self.model}
        return {**frame, "note": self.note} if self.note else frame

    def _part(self, index: int, content: Any, ending: str | None) -> dict[str, Any]:
        choice = {"index": index, "delta" if self.chat else "text": content, "logprobs": None, "finish_reason": ending}
        return {**self._frame(self._stream_kind), "choices": [choice], **({"usage": None} if self._counts else {})}
