"""Answers of both kinds in the shapes of the OpenAI API, whole and in pieces."""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from twoaxis.interop.serving.choice import Piece
from twoaxis.interop.serving.protocol import ChatRequest, Request


@dataclass(frozen=True)
class Answer:
    """The frame of one answer; whole or in pieces, it has one id.

    Attributes:
        request: what was asked.
        model: the name of the served model.
        prompt_tokens: for the usage.
        note: of the work; the one field that the API does not have, and only where there is something to say.
        chat: whether messages are answered.
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
        """Whether messages are answered."""
        return isinstance(self.request, ChatRequest)

    def whole(self, texts: Sequence[str], last: Sequence[Piece]) -> dict[str, Any]:
        """All choices at once.

        Args:
            texts: of the choices.
            last: the last piece of each choice.
        """
        choices = []
        for text, piece in zip(texts, last, strict=True):
            content = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
            choices.append({"index": piece.choice, **content, "logprobs": None, "finish_reason": piece.ending})
        kind = "chat.completion" if self.chat else "text_completion"
        return {**self._frame(kind), "choices": choices, "usage": self.usage(sum(piece.tokens for piece in last))}

    def openings(self, choices: int) -> list[dict[str, Any]]:
        """What a stream begins with: in a chat, the role of each choice."""
        return [self._part(index, {"role": "assistant", "content": ""}, None) for index in range(choices)] if self.chat else []

    def part(self, piece: Piece) -> list[dict[str, Any]]:
        """What a stream says of one piece; in a chat, the ending comes apart from the text."""
        if not self.chat:
            return [self._part(piece.choice, piece.text, piece.ending)]
        parts = [self._part(piece.choice, {"content": piece.text}, None)] if piece.text else []
        return parts + ([self._part(piece.choice, {}, piece.ending)] if piece.ending else [])

    def closing(self, new_tokens: int) -> list[dict[str, Any]]:
        """What a stream ends with: the usage, where it is asked for."""
        if not self._counts:
            return []
        return [{**self._frame(self._stream_kind), "choices": [], "usage": self.usage(new_tokens)}]

    def usage(self, new_tokens: int) -> dict[str, int]:
        """The counts of tokens."""
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
