"""The client library of the API's makers understands the server."""

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the extra twoaxis[serve]")
pytest.importorskip("prometheus_client", reason="needs the extra twoaxis[serve]")
pytest.importorskip("openai", reason="no extra asks for it")

import openai

from twoaxis import generate
from twoaxis.data.tokenizer import ByteTokenizer
from twoaxis.interop.serve.scheduler import Engine
from twoaxis.interop.serve.work import Limits

from ..hf_models import small_decoder
from .server import serving

MODEL = small_decoder("states", vocab_size=256)
PROMPT = "user: hi\nassistant:"


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    limits = Limits(max_prompt_tokens=60, max_new_tokens=60)
    with (
        serving(Engine(MODEL), ByteTokenizer(), 128, limits) as server,
        openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def expected(prompt: str, new_tokens: int) -> str:
    return ByteTokenizer().decode(generate(MODEL, [list(prompt.encode())], new_tokens)[0])


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="toy", prompt=["ab", "c"], max_tokens=6, temperature=0)
    assert [choice.text for choice in answer.choices] == [expected("ab", 6), expected("c", 6)]
    assert answer.usage is not None and answer.usage.total_tokens == 15


def test_chats_whole_and_streamed(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    text = expected(PROMPT, 8).removeprefix(" ")
    answer = client.chat.completions.create(model="toy", messages=messages, max_completion_tokens=8, temperature=0)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (text, "length")
    stream = client.chat.completions.create(
        model="toy",
        messages=messages,
        max_completion_tokens=8,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    parts = list(stream)
    assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == text
    assert parts[-1].usage is not None and parts[-1].usage.completion_tokens == 8


def test_models_and_errors(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["toy"]
    with pytest.raises(openai.NotFoundError, match="unknown model"):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.BadRequestError, match="is not supported") as caught:
        client.completions.create(model="toy", prompt="a", logprobs=2)
    assert caught.value.param == "logprobs"
