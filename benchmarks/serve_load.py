"""`python benchmarks/serve_load.py [MODEL]`: does a server stay right under load? Many clients at once, not all well-behaved.

It starts `twoaxis serve` as a process of its own, asks every request of a fixed list alone, and then lets clients repeat them,
all at once and for a while: whole and streamed, greedy and sampled, short and long, with stop strings and several choices;
between them malformed requests, prompts that are too long, and clients that leave in the middle. Every answer must equal its
answer alone. Without MODEL it serves a small one with random weights. It needs the extra `twoaxis[serve]` and no network.

Exit status: 0 when there were answers, every one was right, every refusal was the right one, every client went on to the end,
and the server stopped at SIGTERM; else 1.
"""

import argparse
import contextlib
import http.client
import json
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
WORDS = ("the", "Senate", "and", "of", "House", "a", "report", "to", "be", "Union", "state", "which", "in", "that", "have")
JSON = {"Content-Type": "application/json"}
TIMEOUT_SECONDS = 120.0
MAX_BODY_BYTES = 1 << 20


def write_model(folder: Path) -> Path:
    """A run folder with a small model of windows, global attention and a mixer along depth, far from its start."""
    from twoaxis import Decoder, DecoderConfig
    from twoaxis.data.tokenizer import ByteTokenizer
    from twoaxis.train import save_trained

    blocks = [[{"kind": "short_swa", "n_heads": 4, "window": 16}, "attention", "swiglu"]]
    sizes = {"vocab_size": 256, "d_model": 64, "n_layers": 2, "max_seq_len": 512}
    model = Decoder.build(DecoderConfig.from_data({**sizes, "depth": "attention_residuals", "blocks": blocks}))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return save_trained(folder / "model", model, ByteTokenizer())


def requests(count: int, max_new_tokens: int) -> list[tuple[str, dict[str, Any]]]:
    """The fixed list: paths and bodies."""
    draw = random.Random(0)
    found: list[tuple[str, dict[str, Any]]] = []
    for number in range(count):
        text = " ".join(draw.choices(WORDS, k=draw.choice((1, 3, 10, 40))))
        body: dict[str, Any] = {
            "max_tokens": draw.choice((1, 8, 24, max_new_tokens)),
            "temperature": (0, 0.7, 1.0)[number % 3],
            "seed": number,
            "stream": number % 2 == 0,
        }
        if number % 5 == 0:
            body["n"] = 2
        if number % 4 == 0:
            body["stop"] = ["e", " the"]
        if number % 3 == 1:
            found.append((CHAT, {**body, "messages": [{"role": "user", "content": text}]}))
        else:
            found.append((COMPLETIONS, {**body, "prompt": text}))
    return found


class Server:
    """`twoaxis serve` in a process."""

    def __init__(self, model: Path, options: list[str]) -> None:
        command = [sys.executable, "-m", "twoaxis", "serve", str(model), "--port", "0", *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.search(r"http://(\S+)/v1", line)
        if found is None:
            raise SystemExit(f"the server did not start: {line!r}")
        self.place = urlsplit(f"http://{found[1]}").netloc

    def memory_bytes(self) -> int | None:
        """Resident memory, where the system reports it."""
        with contextlib.suppress(OSError):
            found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{self.process.pid}/status").read_text())
            return int(found[1]) * 1024 if found else None
        return None

    def metrics(self) -> dict[str, float]:
        """Its counts."""
        lines = [line.rsplit(" ", 1) for line in self.get("/metrics").splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in lines}

    def get(self, path: str) -> str:
        """The body of a page."""
        connection = self.connect()
        with contextlib.closing(connection):
            connection.request("GET", path)
            return connection.getresponse().read().decode()

    def connect(self) -> http.client.HTTPConnection:
        """A connection of its own."""
        return http.client.HTTPConnection(self.place, timeout=TIMEOUT_SECONDS)

    def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Status and body of an answer."""
        connection = self.connect()
        with contextlib.closing(connection):
            connection.request("POST", path, body, JSON)
            response = connection.getresponse()
            return response.status, response.read()

    def stop(self) -> int | None:
        """Sends SIGTERM; returns the exit status, or None when it had to be killed."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return None


def text_of(body: dict[str, Any], answer: bytes) -> list[Any]:
    """Texts and endings of all choices, whole or streamed."""
    texts: dict[int, str] = {}
    endings: dict[int, Any] = {}
    if body["stream"]:
        events = [event.removeprefix("data: ") for event in answer.decode().split("\n\n") if event]
        if not events or events[-1] != "[DONE]":
            return ["a stream without an end"]
        parts = [json.loads(event) for event in events[:-1]]
    else:
        parts = [json.loads(answer)]
    for part in parts:
        if "error" in part:
            return [part["error"]["message"]]
        for choice in part["choices"]:
            said = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
            texts[choice["index"]] = texts.get(choice["index"], "") + (said.get("content") or "")
            endings[choice["index"]] = choice["finish_reason"] or endings.get(choice["index"])
    return [(texts[index], endings[index]) for index in sorted(texts)]


class Client:
    """One of many: repeats requests until told to stop, and notes what comes back."""

    def __init__(self, number: int, server: Server, known: list[tuple[str, dict[str, Any], list[Any]]]) -> None:
        self.draw, self.server, self.known = random.Random(number), server, known
        self.seconds: list[float] = []
        self.events: Counter[str] = Counter()
        self.wrong: list[str] = []

    def run(self, until: float) -> None:
        """Asks until this moment; whatever ends it before is noted, since nobody sees a thread fail."""
        try:
            self._run(until)
        except Exception as error:
            self.events["clients that died"] += 1
            self.wrong.append(f"a client died: {error!r}")

    def _run(self, until: float) -> None:
        while time.monotonic() < until:
            act = self.draw.choices((self.ask, self.malformed, self.too_long, self.leave), (80, 6, 6, 8))[0]
            try:
                act()
            except (OSError, http.client.HTTPException, ValueError) as error:
                self.events["broken connections"] += 1
                self.wrong.append(repr(error))

    def ask(self) -> None:
        """Compares an answer with the known one."""
        path, body, expected = self.draw.choice(self.known)
        begin = time.monotonic()
        status, answer = self.server.post(path, json.dumps(body).encode())
        if status == 429:
            self.events["queue full (429)"] += 1
            time.sleep(self.draw.uniform(0.1, 0.5))
            return
        if status != 200:
            self.events[f"status {status}"] += 1
            self.wrong.append(answer.decode()[:200])
            return
        self.seconds.append(time.monotonic() - begin)
        self.events["answers"] += 1
        if text_of(body, answer) != expected:
            self.events["mismatches"] += 1
            self.wrong.append(f"{body}: {text_of(body, answer)} instead of {expected}"[:400])

    def malformed(self) -> None:
        """Sends what cannot be answered."""
        fields = (b'{"prompt": 3}', b'{"prompt": "a", "temperature": -1}', b'{"prompt": "a", "max_tokens": 0}')
        bodies = (b"{", b"[]", b"\xff", *fields)
        self._refused(self.draw.choice(bodies), 400, "malformed, refused")

    def too_long(self) -> None:
        """Sends more than the limits allow."""
        if self.draw.random() < 0.5:
            self._refused(json.dumps({"prompt": "too long " * 20_000}).encode(), 400, "prompts too long, refused")
        else:
            self._refused(b" " * (MAX_BODY_BYTES + 1), 413, "bodies too large, refused")

    def _refused(self, body: bytes, expected: int, name: str) -> None:
        status, answer = self.server.post(self.draw.choice((COMPLETIONS, CHAT)) if expected == 413 else COMPLETIONS, body)
        self.events[name] += 1
        if status != expected or "error" not in json.loads(answer):
            self.wrong.append(f"{name}: status {status}, not {expected}: {answer.decode()[:200]}")

    def leave(self) -> None:
        """Asks, and leaves before the end of the answer."""
        path, body, _ = self.draw.choice(self.known)
        connection = self.server.connect()
        with contextlib.closing(connection):
            connection.request("POST", path, json.dumps(body).encode(), JSON)
            assert connection.sock is not None
            if body["stream"]:
                connection.sock.recv(self.draw.choice((1, 500)))
            else:
                time.sleep(self.draw.uniform(0, 0.2))
            with contextlib.suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)
        self.events["left in the middle"] += 1


def alone(server: Server, path: str, body: dict[str, Any]) -> list[Any]:
    """The answer to a request that has the server for itself."""
    status, answer = server.post(path, json.dumps(body).encode())
    if status != 200:
        raise SystemExit(f"alone, {body} was refused: {answer.decode()}")
    return text_of(body, answer)


def main() -> int:
    """Runs the test and prints its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, help="what `twoaxis serve` takes; a small random model by default")
    parser.add_argument("--seconds", type=float, default=120, help="how long the clients ask")
    parser.add_argument("--clients", type=int, default=50, help="how many ask at once")
    parser.add_argument("--requests", type=int, default=60, help="different requests")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="of the longest answers")
    parser.add_argument("--max-batch", type=int, default=16, help="as of `twoaxis serve`")
    parser.add_argument("--queue", type=int, default=24, help="as of `twoaxis serve`; few, so that some requests find it full")
    parser.add_argument("--compile", action="store_true", help="as of `twoaxis serve`")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or write_model(Path(folder))
        options = ["--max-batch", str(arguments.max_batch), "--queue", str(arguments.queue), *["--compile"] * arguments.compile]
        server = Server(model, options)
        try:
            return measure(server, arguments)
        finally:
            if server.process.poll() is None:
                server.process.kill()
                server.process.wait()


def measure(server: Server, arguments: argparse.Namespace) -> int:
    """Asks alone, then all at once."""
    known = [(path, body, alone(server, path, body)) for path, body in requests(arguments.requests, arguments.max_new_tokens)]
    before, memory = server.metrics(), server.memory_bytes()
    clients = [Client(number, server, known) for number in range(arguments.clients)]
    begin = time.monotonic()
    threads = [threading.Thread(target=client.run, args=(begin + arguments.seconds,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    elapsed = time.monotonic() - begin
    # Seats of clients that left last are free after a step.
    time.sleep(1)
    after, memory_after = server.metrics(), server.memory_bytes()
    wrong = [line for client in clients for line in client.wrong]
    repeated = sum(alone(server, path, body) != expected for path, body, expected in known)
    status = server.stop()
    events = sum((client.events for client in clients), Counter())
    report(arguments, elapsed, sorted(second for client in clients for second in client.seconds), events, before, after)
    if memory is not None and memory_after is not None:
        print(f"memory of the server           {memory / 2**20:.0f} MiB before, {memory_after / 2**20:.0f} MiB after")
    left = after["twoaxis_batch_generations"] + after["twoaxis_queue_generations"]
    print(f"batch slots taken at the end   {left:.0f}")
    print(f"answers alone that changed     {repeated} of {len(known)}")
    print(f"exit status after SIGTERM      {status}")
    for line in wrong[:10]:
        print(f"wrong: {line}")
    faults = after["twoaxis_faults_total"]
    return int(bool(wrong or repeated or left or status != 0 or faults or not events["answers"]))


def report(
    arguments: argparse.Namespace,
    elapsed: float,
    seconds: list[float],
    events: Counter[str],
    before: dict[str, float],
    after: dict[str, float],
) -> None:
    """Prints the figures."""
    change = {name: after[name] - before.get(name, 0) for name in after}
    print(
        f"{arguments.clients} clients for {elapsed:.1f} s, batch of at most {arguments.max_batch}, queue of {arguments.queue}"
    )
    events.setdefault("mismatches", 0)
    for name, number in sorted(events.items(), key=lambda item: -item[1]):
        print(f"{name:30} {number}")
    if len(seconds) > 1:
        cuts = statistics.quantiles(seconds, n=100, method="inclusive")
        print(f"latency p50, p95, p99          {cuts[49]:.2f} s, {cuts[94]:.2f} s, {cuts[98]:.2f} s")
    print(f"requests per second            {len(seconds) / elapsed:.1f}")
    print(f"new tokens per second          {change['twoaxis_new_tokens_total'] / elapsed:.0f}")
    print(f"prompt tokens per second       {change['twoaxis_prompt_tokens_total'] / elapsed:.0f}")
    print(f"mean batch                     {change['twoaxis_row_steps_total'] / max(1, change['twoaxis_steps_total']):.1f}")
    print(f"disconnects the server saw     {change['twoaxis_disconnects_total']:.0f}")


if __name__ == "__main__":
    sys.exit(main())
