"""The server over real sockets: routes, streams, limits, clients that leave, and many at once."""

import contextlib
import json
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the extra twoaxis[serve]")
pytest.importorskip("uvicorn", reason="needs the extra twoaxis[serve]")
pytest.importorskip("prometheus_client", reason="needs the extra twoaxis[serve]")

from prometheus_client.parser import text_string_to_metric_families

from twoaxis import ConfigError, generate
from twoaxis.cli import main
from twoaxis.data.tokenizer import ByteTokenizer
from twoaxis.interop.serve.completions import Answer
from twoaxis.interop.serve.http import routes
from twoaxis.interop.serve.http.server import bind
from twoaxis.interop.serve.scheduler import Engine
from twoaxis.interop.serve.work import Limits
from twoaxis.model.generate import Sampling
from twoaxis.train import save_trained

from ..hf_models import small_decoder
from .recorder import WAIT_SECONDS
from .server import CHAT, COMPLETIONS, JSON, Client, serving

LIMITS = Limits(max_prompt_tokens=60, max_new_tokens=60, max_body_bytes=4000, max_choices=4)
MODEL = small_decoder("windows", vocab_size=256)
BYTES = ByteTokenizer()


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with serving(Engine(MODEL, max_batch=4, prefill_tokens=16), BYTES, 128, LIMITS) as client:
        yield client


def expected(prompt: str, new_tokens: int, **sampling: Any) -> str:
    return BYTES.decode(generate(MODEL, [BYTES.encode(prompt)], new_tokens, Sampling(**sampling))[0])


def joined(events: list[dict[str, Any]], index: int = 0) -> str:
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)


def until(condition: Any) -> None:
    end = time.monotonic() + WAIT_SECONDS
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0.01)


def test_a_completion(client: Client) -> None:
    status, body, _ = client.post(COMPLETIONS, {"model": "toy", "prompt": "Hello", "max_tokens": 8, "temperature": 0})
    (choice,) = body["choices"]
    assert (status, choice["text"], choice["finish_reason"]) == (200, expected("Hello", 8), "length")
    assert body["usage"] == {"prompt_tokens": 5, "completion_tokens": 8, "total_tokens": 13}
    assert (body["object"], body["model"]) == ("text_completion", "toy")


def test_streams_equal_whole_answers(client: Client) -> None:
    options = {"max_tokens": 9, "seed": 5, "n": 2, "temperature": 1.0}
    completion = {"prompt": "ab", **options}
    whole = client.post(COMPLETIONS, completion)[1]["choices"]
    events = client.stream(COMPLETIONS, completion)
    assert [joined(events, index) for index in range(2)] == [choice["text"] for choice in whole]
    assert [choice["text"] for choice in whole] == [expected("ab", 9, temperature=1.0, seed=5 + index) for index in range(2)]
    chat = {"messages": [{"role": "user", "content": "hi"}], **options}
    whole = client.post(CHAT, chat)[1]["choices"]
    events = client.stream(CHAT, chat)
    assert [joined(events, index) for index in range(2)] == [choice["message"]["content"] for choice in whole]
    assert whole[0]["message"]["content"] == expected("user: hi\nassistant:", 9, temperature=1.0, seed=5).removeprefix(" ")


def test_a_stop_string_across_tokens_never_shows(client: Client) -> None:
    text = expected("abc", 30)
    # Two characters, so more than one token of bytes.
    stop = text[10:12]
    before = text[: text.index(stop)]
    request = {"prompt": "abc", "max_tokens": 30, "temperature": 0, "stop": [stop, "never there"]}
    (choice,) = client.post(COMPLETIONS, request)[1]["choices"]
    assert (choice["text"], choice["finish_reason"]) == (before, "stop")
    assert joined(client.stream(COMPLETIONS, request)) == before


def test_many_at_once_are_answered_as_each_alone(client: Client) -> None:
    requests = [
        {"prompt": "x" * (1 + 7 * number % 23), "max_tokens": 3 + number % 7, "temperature": number % 2, "seed": number}
        for number in range(16)
    ]

    def ask(request: dict[str, Any]) -> str:
        if request["seed"] % 3 == 0:
            return joined(client.stream(COMPLETIONS, request))
        return client.post(COMPLETIONS, request)[1]["choices"][0]["text"]

    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(ask, requests))
    for request, text in zip(requests, texts, strict=True):
        assert text == expected(
            request["prompt"], request["max_tokens"], temperature=request["temperature"], seed=request["seed"]
        )
    assert client.engine.counts.row_steps > client.engine.counts.steps


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        (COMPLETIONS, b'{"prompt":', 400, "is not JSON"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, 400, "max_tokens=0: must be >= 1"),
        (COMPLETIONS, {"prompt": "a" * 61}, 400, "tokens of prompt=61: must be from 1 to 60; send another prompt"),
        (COMPLETIONS, {"prompt": "\ud800"}, 400, "half of a surrogate pair"),
        (COMPLETIONS, {"prompt": "\ud800", "max_tokens": "\ud800"}, 400, "max_tokens="),
        (COMPLETIONS, {"prompt": "a", "model": "other"}, 404, "unknown model"),
        (COMPLETIONS, b" " * 4001, 413, "must be at most as many"),
        (CHAT, {"messages": [{"role": "user"}]}, 400, "content is missing"),
        ("/v1/embeddings", {}, 404, "see GET /v1/models"),
        ("/v1/models", {}, 405, "Method Not Allowed"),
    ],
)
def test_refusals_have_the_shape_of_the_api(client: Client, path: str, body: Any, status: int, message: str) -> None:
    got, answer, _ = client.post(path, body)
    assert got == status
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert message in answer["error"]["message"]
    assert answer["error"]["type"] == "invalid_request_error"


def test_a_wrong_method_is_told_the_right_ones(client: Client) -> None:
    assert client.post("/v1/models", {})[2]["Allow"] == "GET"


def test_models_health_and_metrics(client: Client) -> None:
    assert json.loads(client.get("/v1/models")[1])["data"][0]["id"] == "toy"
    assert json.loads(client.get("/v1/models/toy")[1])["object"] == "model"
    assert client.get("/v1/models/other")[0] == 404
    assert client.get("/health") == (200, '{"status": "ok"}')
    before = _metrics(client)
    client.post(COMPLETIONS, {"prompt": "abc", "max_tokens": 4})
    after = _metrics(client)
    changes = {name: after[name] - before.get(name, 0) for name in after}
    assert changes['twoaxis_requests_total{path="/v1/completions",status="200"}'] == 1
    assert (changes["twoaxis_prompt_tokens_total"], changes["twoaxis_new_tokens_total"]) == (3, 4)
    assert changes["twoaxis_steps_total"] == changes["twoaxis_row_steps_total"] == 3
    assert changes['twoaxis_request_seconds_bucket{le="+Inf"}'] == changes["twoaxis_request_seconds_count"] == 1
    assert after["twoaxis_queue_generations"] == after["twoaxis_batch_generations"] == 0


def test_prometheus_reads_the_metrics(client: Client) -> None:
    client.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1})
    with urllib.request.urlopen(f"{client.address}/metrics") as answer:
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        families = list(text_string_to_metric_families(answer.read().decode()))
    counters = ("requests", "disconnects", "prompt_tokens", "new_tokens", "steps", "row_steps", "faults")
    # Catches series that are added, such as the times at which counters began.
    assert {family.name.removeprefix("twoaxis_"): family.type for family in families} == {
        **dict.fromkeys(counters, "counter"),
        **dict.fromkeys(("queue_generations", "batch_generations", "compiled_programs"), "gauge"),
        "request_seconds": "histogram",
    }
    (times,) = (family.samples for family in families if family.type == "histogram")
    bounds = [sample.labels["le"] for sample in times if sample.name == "twoaxis_request_seconds_bucket"]
    assert bounds == ["0.05", "0.1", "0.25", "0.5", "1.0", "2.5", "5.0", "10.0", "30.0", "60.0", "+Inf"]
    assert {tuple(sample.labels) for sample in families[0].samples} == {("path", "status")}


def counted(before: dict[str, float], after: dict[str, float]) -> dict[tuple[str, int], int]:
    """Requests by path and status between two looks at the metrics, without these looks."""
    found = {}
    for name, number in after.items():
        parts = re.fullmatch(r'twoaxis_requests_total{path="(.*)",status="(\d+)"}', name)
        if parts and parts[1] != "/metrics" and number != before.get(name, 0):
            found[parts[1], int(parts[2])] = int(number - before.get(name, 0))
    return found


def test_every_request_is_counted_once_with_its_status(client: Client, monkeypatch: pytest.MonkeyPatch, unlogged: None) -> None:
    def broken(*_: Any) -> Any:
        raise ZeroDivisionError

    before, request = _metrics(client), {"prompt": "ab", "max_tokens": 2}
    client.post(COMPLETIONS, request)
    client.stream(COMPLETIONS, request)
    client.post(COMPLETIONS, {})
    client.get(CHAT)
    client.get("/health")
    client.get("/v1/models/other")
    client.get('/made/up"\\')
    with monkeypatch.context() as patched:
        patched.setattr(routes, "work_of", broken)
        assert client.post(COMPLETIONS, request)[1]["error"]["type"] == "server_error"
        assert client.post(CHAT, {"messages": [{"role": "user", "content": "hi"}], "stream": True})[0] == 500
    with monkeypatch.context() as patched:
        patched.setattr(Answer, "part", broken)
        assert client.stream(COMPLETIONS, request)[-1]["error"]["type"] == "server_error"
    until(lambda: sum(counted(before, _metrics(client)).values()) == 10)
    assert counted(before, _metrics(client)) == {
        (COMPLETIONS, 200): 2,
        (COMPLETIONS, 400): 1,
        (COMPLETIONS, 500): 2,
        (CHAT, 405): 1,
        (CHAT, 500): 1,
        ("/health", 200): 1,
        ("/v1/models", 404): 1,
        ("other", 404): 1,
    }


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *((name, 200) for name in ("localhost", "LocalHost:1", "127.0.0.1", "127.9.9.9:80", "[::1]:8000", "[::1]")),
        *((name, 403) for name in ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", "192.168.0.1", "")),
        *((name, 403) for name in ("localhost:80@evil.example", "[127.0.0.1", "evil.example/localhost")),
    ],
)
def test_a_server_for_this_machine_answers_to_no_other_name(client: Client, host: str, status: int) -> None:
    for path in ("/v1/models", "/metrics", "/health"):
        assert client.get(path, Host=host)[0] == status
    got, body, _ = client.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1}, {**JSON, "Host": host})
    assert got == status
    assert status == 200 or "must be localhost or a loopback address" in body["error"]["message"]


def test_the_name_of_the_host_says_nothing_about_the_route(client: Client) -> None:
    before = _metrics(client)
    status, text = client.get("/none?x=/v1/models", Host="localhost:80")
    assert (status, json.loads(text)["error"]["message"]) == (404, "GET /none: Not Found; see GET /v1/models")
    assert counted(before, _metrics(client)) == {("other", 404): 1}


@pytest.mark.parametrize("given", [None, "text/plain", "application/x-www-form-urlencoded", "application/jsonx", ""])
def test_bodies_must_be_declared_as_json(client: Client, given: str | None) -> None:
    headers = {} if given is None else {"Content-Type": given}
    status, body, _ = client.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1}, headers)
    assert (status, body["error"]["type"]) == (415, "invalid_request_error")
    assert f"Content-Type={given or ''!r}: must be application/json" in body["error"]["message"]
    fine = {"Content-Type": "Application/JSON; charset=utf-8"}
    assert client.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1}, fine)[0] == 200


def _metrics(client: Client) -> dict[str, float]:
    status, text = client.get("/metrics")
    assert status == 200
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_batch_slot(client: Client, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made, embed, go = threading.Event(), MODEL.embed, threading.Event()

    def held(tokens: Any) -> Any:
        made.set()
        assert go.wait(WAIT_SECONDS)
        return embed(tokens)

    monkeypatch.setattr(MODEL, "embed", held)
    before, tokens = _metrics(client), client.engine.counts.new_tokens
    connection = client.connect()
    connection.request("POST", COMPLETIONS, json.dumps({"prompt": "abc", "max_tokens": 60, "stream": stream}), JSON)
    assert made.wait(WAIT_SECONDS)
    assert connection.sock is not None
    connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()
    until(lambda: _metrics(client)["twoaxis_disconnects_total"] == before["twoaxis_disconnects_total"] + 1)
    assert counted(before, _metrics(client)) == {(COMPLETIONS, 499): 1}
    go.set()
    until(lambda: client.engine.running == 0)
    assert client.engine.counts.new_tokens <= tokens + 2


def test_a_full_queue_says_when_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model, go = small_decoder("plain", vocab_size=256), threading.Event()
    embed = model.embed
    monkeypatch.setattr(model, "embed", lambda tokens: embed(tokens) if go.wait(WAIT_SECONDS) else None)
    engine = Engine(model, max_batch=1, max_queue=1)
    with serving(engine, BYTES, 128, LIMITS) as client, ThreadPoolExecutor(2) as pool:
        request = {"prompt": "a", "max_tokens": 2}
        running = pool.submit(client.post, COMPLETIONS, request)
        until(lambda: engine.running == 1)
        waiting = pool.submit(client.post, COMPLETIONS, request)
        until(lambda: engine.waiting == 1)
        status, body, headers = client.post(COMPLETIONS, request)
        assert (status, body["error"]["code"], headers["Retry-After"]) == (429, "queue_full", "1")
        assert client.get("/health")[0] == 200
        go.set()
        assert (running.result()[0], waiting.result()[0]) == (200, 200)


def test_requests_in_a_server_that_stops_get_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model, begun, go = small_decoder("plain", vocab_size=256), threading.Event(), threading.Event()
    embed = model.embed

    def held(tokens: Any) -> Any:
        begun.set()
        assert go.wait(WAIT_SECONDS)
        return embed(tokens)

    monkeypatch.setattr(model, "embed", held)
    engine = Engine(model)
    with serving(engine, BYTES, 128, LIMITS) as client, ThreadPoolExecutor(3) as pool:
        whole = pool.submit(client.post, COMPLETIONS, {"prompt": "a"})
        stream = pool.submit(client.stream, COMPLETIONS, {"prompt": "a"})
        until(lambda: engine.waiting == 1)
        stopping = pool.submit(engine.stop)
        until(lambda: not engine.alive)
        assert client.post(COMPLETIONS, {"prompt": "a"})[0] == 503
        assert client.get("/health")[0] == 503
        go.set()
        stopping.result()
        assert whole.result()[0] == 503
        assert stream.result()[-1]["error"]["type"] == "server_error"


def test_the_command_serves_until_a_signal(tmp_path: Path) -> None:
    model = small_decoder("plain", vocab_size=256)
    run = save_trained(tmp_path / "run", model.float(), BYTES)
    (run / "source").mkdir()
    (run / "source" / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}!{% endfor %}")
    command = [sys.executable, "-m", "twoaxis", "serve", str(run), "--host", "0.0.0.0", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        ready = process.stdout.readline()
        client = Client(ready.split()[-1].replace("0.0.0.0", "127.0.0.1"), Engine(model))
        body = client.post(COMPLETIONS, {"prompt": "a", "max_tokens": 2, "model": "run"})[1]
        chat = client.post(CHAT, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2})[1]
        # A server for others has whatever name they know it by.
        known = client.get("/health", Host="model.example")[0]
        process.terminate()
        left, complaints = process.communicate(timeout=WAIT_SECONDS)
    assert body["usage"]["completion_tokens"] == 2
    # Catches a template beside the model that nobody follows.
    assert chat["usage"]["prompt_tokens"] == len("hi!")
    assert known == 200 and ready.startswith("run, chats as its template says, at http://0.0.0.0:")
    assert (process.returncode, left) == (0, "")
    assert re.fullmatch(r"twoaxis: warning: anyone who can reach http://0.0.0.0:\d+ can use the model: .*\n", complaints)


def test_the_command_ends_requests_that_take_too_long_with_an_error(tmp_path: Path) -> None:
    model = small_decoder("plain", vocab_size=256, max_seq_len=1 << 16)
    run = save_trained(tmp_path / "run", model.float(), BYTES)
    options = ["--port", "0", "--grace-seconds", "0", "--max-batch", "1", "--max-new-tokens", "60000"]
    command = [sys.executable, "-m", "twoaxis", "serve", str(run), *options]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process,
        ThreadPoolExecutor(1) as pool,
        contextlib.ExitStack() as stack,
    ):
        assert process.stdout is not None and process.stderr is not None
        client = Client(process.stdout.readline().split()[-1], Engine(model))
        streaming, unfinished = (stack.enter_context(contextlib.closing(client.connect())) for _ in range(2))
        streaming.request("POST", COMPLETIONS, json.dumps({"prompt": "a", "max_tokens": 60000, "stream": True}), JSON)
        stream = stack.enter_context(streaming.getresponse())
        first = stream.readline()
        waiting = pool.submit(client.post, COMPLETIONS, {"prompt": "a", "max_tokens": 60000})
        until(lambda: _metrics(client)["twoaxis_queue_generations"] == 1)
        unfinished.putrequest("POST", COMPLETIONS)
        for name, value in {**JSON, "Content-Length": "99"}.items():
            unfinished.putheader(name, value)
        unfinished.endheaders(b'{"prompt":')
        # Answered behind the others, so that they have all arrived.
        assert client.get("/health")[0] == 200
        process.terminate()
        *_, last, done, end = stream.read().decode().split("\n\n")
        half = stack.enter_context(unfinished.getresponse())
        refused = json.loads(half.read())
        left, complaints = process.communicate(timeout=WAIT_SECONDS)
    assert first.startswith(b"data: {")
    assert json.loads(last.removeprefix("data: "))["error"]["message"] == "the server is stopping; ask again later"
    assert (done, end) == ("data: [DONE]", "")
    status, body, _ = waiting.result()
    assert (status, half.status) == (503, 503)
    assert body["error"]["type"] == refused["error"]["type"] == "server_error"
    assert (process.returncode, left, complaints) == (0, "", "")


@pytest.mark.parametrize("host", ["a..b", "a" * 70 + ".example"])
def test_a_name_that_is_none(host: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(tmp_path), "--host", host]) == 2
    assert capsys.readouterr().err.startswith(f"twoaxis: host={host!r}: must be a name or address of this machine")


def test_a_port_that_is_taken() -> None:
    with bind("127.0.0.1", 0) as taken, pytest.raises(ConfigError, match=r"port=\d+: must be free"):
        bind("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(ConfigError, match=r"host='no\.such\.host\.invalid'"):
        bind("no.such.host.invalid", 0)
