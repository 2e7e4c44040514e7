r"""The generations that answer a request, within the limits of the server.

Formats of chat prompts:

* the chat template of the model, if any, in a sandbox (`data/chat_template.py`).
* ChatML, if the vocabulary has `<|im_start|>` and `<|im_end|>`: each message is
  `<|im_start|>ROLE\nCONTENT<|im_end|>\n`, and the answer follows `<|im_start|>assistant\n`. No system message is added.
* plain, for other models: each message is a line `ROLE: CONTENT`, and the answer follows `assistant:`; it ends at a line that
  begins with the name of a role, and a leading space is removed.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from pydantic import Field

from twoaxis.core.config import Config
from twoaxis.core.errors import DataError, nearest, problem
from twoaxis.data import Tokenizer
from twoaxis.data.chat_template import ChatTemplate
from twoaxis.data.text_stream import stop_tokens
from twoaxis.interop.serve.generation import Generation
from twoaxis.interop.serve.protocol import ChatRequest, CompletionRequest, Message, Refusal, Request
from twoaxis.model.decoder import token_row
from twoaxis.model.generate import Sampling

COMPLETION_TOKENS = 16
"""New tokens of a completion without `max_tokens`, as in the API; a chat has the most that the limits allow."""

START, END = "<|im_start|>", "<|im_end|>"
ROLES = ("system", "user", "assistant")


class ChatMarkers(NamedTuple):
    """The ids of the ChatML markers around a message."""

    start: int
    end: int


@dataclass(frozen=True)
class ChatFormat:
    """The format of chat prompts: the template of the model, else ChatML if the vocabulary has its markers, else plain."""

    markers: ChatMarkers | None
    template: ChatTemplate | None = None

    @staticmethod
    def of(tokenizer: Tokenizer, template: ChatTemplate | None = None) -> "ChatFormat":
        """The format for a model with this tokenizer and template.

        Example:
            >>> from twoaxis.data.tokenizer import ByteTokenizer
            >>> ChatFormat.of(ByteTokenizer()).name
            'plain'
        """
        ids = tokenizer.special_tokens
        return ChatFormat(ChatMarkers(ids[START], ids[END]) if START in ids and END in ids else None, template)

    @property
    def name(self) -> str:
        """The name in messages."""
        return "its template says" if self.template else "plain" if self.markers is None else "ChatML"

    @property
    def stop_tokens(self) -> frozenset[int]:
        """Tokens that end an answer, in addition to those of the model's files."""
        return frozenset() if self.markers is None else frozenset({self.markers.end})

    @property
    def stops(self) -> tuple[str, ...]:
        """Strings that end an answer."""
        return tuple(f"\n{role}:" for role in ROLES) if self._plain else ()

    @property
    def lead(self) -> str:
        """The beginning of an answer that is removed."""
        return " " if self._plain else ""

    @property
    def _plain(self) -> bool:
        return self.template is None and self.markers is None

    def prompt(self, messages: Sequence[Message], tokenizer: Tokenizer) -> list[int]:
        """The tokens of a conversation; markers spelled inside a message stay text.

        Raises:
            DataError: a message is not Unicode text, or the template refuses it.
        """
        turns = [("system" if message.role == "developer" else message.role, message.content) for message in messages]
        if self.template is not None:
            return self.template.prompt([{"role": role, "content": content} for role, content in turns], tokenizer)
        if self.markers is None:
            return tokenizer.prompt("".join(f"{role}: {content}\n" for role, content in turns) + "assistant:")
        start, end, line_end = self.markers.start, self.markers.end, tokenizer.encode("\n")
        tokens = list(tokenizer.begin_of_document)
        for role, content in turns:
            tokens += [start, *tokenizer.encode(f"{role}\n{content}"), end, *line_end]
        return [*tokens, start, *tokenizer.encode("assistant\n")]


class Limits(Config):
    """Limits of one request.

    Args:
        max_prompt_tokens: the longest prompt.
        max_new_tokens: the longest answer.
        max_body_bytes: the largest body.
        max_choices: generations of one request: prompts times choices.
    """

    max_prompt_tokens: int = Field(default=2048, ge=1)
    max_new_tokens: int = Field(default=1024, ge=1)
    max_body_bytes: int = Field(default=1 << 20, ge=1)
    max_choices: int = Field(default=64, ge=1)


@dataclass(frozen=True)
class Served:
    """The properties of a served model.

    Attributes:
        name: in requests and answers.
        tokenizer: of the model.
        max_seq_len: of prompt and answer together.
        limits: of one request.
        ends: tokens that end an answer, in addition to the end of a document.
        template: the model's chat template; None without one.
    """

    name: str
    tokenizer: Tokenizer
    max_seq_len: int
    limits: Limits
    ends: frozenset[int] = frozenset()
    template: ChatTemplate | None = None

    @cached_property
    def chat(self) -> ChatFormat:
        """The format of its chat prompts."""
        return ChatFormat.of(self.tokenizer, self.template)


@dataclass(frozen=True)
class Work:
    """The generations of one request.

    Attributes:
        generations: of all choices, prompt by prompt.
        stops: strings that end a choice.
        lead: removed from the beginning of a choice.
        prompt_tokens: of all prompts, each counted once.
        note: how special tokens spelled in a prompt were read; empty without any.
    """

    generations: Sequence[Generation]
    stops: Sequence[str]
    lead: str
    prompt_tokens: int
    note: str = ""


def work_of(request: Request, served: Served) -> Work:
    """Turns a request into generations.

    Raises:
        Refusal: another model, a prompt that is not Unicode text, or more than the limits allow.
    """
    if request.model not in ("", served.name):
        remedy = nearest(request.model, [served.name])
        raise Refusal(f"unknown model {request.model!r}; {remedy}", 404, "model", "model_not_found")
    chat = served.chat if isinstance(request, ChatRequest) else None
    field = "prompt" if chat is None else "messages"
    try:
        if chat is not None and isinstance(request, ChatRequest):
            prompts = [chat.prompt(request.messages, served.tokenizer)]
        elif isinstance(request, CompletionRequest):
            prompts = [_tokens(prompt, served.tokenizer, request.parse_special) for prompt in request.prompt]
        else:
            raise TypeError(type(request).__name__)
    except DataError as error:
        raise Refusal(str(error), param=field) from None
    choices = len(prompts) * request.n
    if choices > served.limits.max_choices:
        allowed = f"at most {served.limits.max_choices}"
        raise Refusal(problem("prompts times n", choices, allowed, "send several requests"), param="n")
    new_tokens = [_new_tokens(request, len(prompt), served, field) for prompt in prompts]
    # Each generation has another seed, so that equal prompts have different answers.
    seed = secrets.randbits(62) if request.seed is None else request.seed
    sampling = Sampling(temperature=request.temperature, top_k=request.top_k, top_p=request.top_p)
    ends = stop_tokens(served.tokenizer, request.stop) | served.ends | (chat.stop_tokens if chat else frozenset())
    repeated = [pair for pair in zip(prompts, new_tokens, strict=True) for _ in range(request.n)]
    generations = [
        Generation(prompt, new, sampling.replace(seed=seed + number), ends, served.tokenizer.vocab_size)
        for number, (prompt, new) in enumerate(repeated)
    ]
    stops = (*request.stop, *(chat.stops if chat else ()))
    return Work(generations, stops, chat.lead if chat else "", sum(map(len, prompts)), _note(request, served.tokenizer))


def _note(request: Request, tokenizer: Tokenizer) -> str:
    if isinstance(request, CompletionRequest):
        texts = [prompt for prompt in request.prompt if isinstance(prompt, str)]
        how = "read as special tokens" if request.parse_special else "read as text; parse_special=true reads special tokens"
    else:
        texts = [message.content for message in request.messages] if isinstance(request, ChatRequest) else []
        how = "read as text, as everything in messages is"
    names = tokenizer.special_names_in("\n".join(texts))
    return f"{', '.join(names)} in the prompt: {how}" if names else ""


def _tokens(prompt: str | list[int], tokenizer: Tokenizer, parse_special: bool) -> list[int]:
    if isinstance(prompt, str):
        return tokenizer.prompt(prompt, parse_special)
    return token_row(prompt, tokenizer.vocab_size).tolist()


def _new_tokens(request: Request, prompt_tokens: int, served: Served, field: str) -> int:
    """The number of new tokens of each choice of this prompt."""
    limits, whole = served.limits, served.max_seq_len
    longest = min(limits.max_prompt_tokens, whole - 1)
    if not 1 <= prompt_tokens <= longest:
        code = None if prompt_tokens == 0 else "context_length_exceeded"
        allowed = f"from 1 to {longest}"
        raise Refusal(problem(f"tokens of {field}", prompt_tokens, allowed, "send another prompt"), param=field, code=code)
    room = min(limits.max_new_tokens, whole - prompt_tokens)
    if request.max_tokens is None:
        return min(room, COMPLETION_TOKENS) if isinstance(request, CompletionRequest) else room
    if request.max_tokens > room:
        allowed = f"at most {room} after a prompt of {prompt_tokens} tokens"
        message = problem("max_tokens", request.max_tokens, allowed, "ask for fewer, or shorten the prompt")
        raise Refusal(message, param="max_tokens", code="context_length_exceeded")
    return request.max_tokens
