"""Steps on static caches: the answers of single requests, by programs that are all there before the first request."""

import re
from functools import partial

import pytest
import torch

from twoaxis import ConfigError, Decoder
from twoaxis.cli import main
from twoaxis.interop.serve import scheduler
from twoaxis.interop.serve.generation import FixedRows, Generation
from twoaxis.interop.serve.scheduler import Engine
from twoaxis.model import static_cache

from ..hf_models import small_decoder
from .recorder import alone, submit
from .test_engine import mixed


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The form that is compiled, as it is; rooms are small, so that rows outgrow them."""
    monkeypatch.setattr(scheduler, "FixedRows", partial(FixedRows, compile=False))
    monkeypatch.setattr(scheduler, "check_compiler", lambda device: None)
    monkeypatch.setattr(static_cache, "ROOM_TOKENS", 8)


# Keys of all tokens, of windows and rewritten; states; histories of vectors and of ids.
SORTS = ("windows", "states", "rewritten", "ngrams", "locals")


def answers(engine: Engine, generations: list[Generation]) -> list[list[int]]:
    heard, _ = submit(engine, *generations)
    assert [one.wait() for one in heard] == ["length"] * len(heard)
    return [one.tokens for one in heard]


@pytest.mark.parametrize("name", SORTS)
def test_rows_of_static_caches_are_as_alone(name: str, uncompiled: None) -> None:
    """Catches rows that see a neighbour, padding, what a place held before, or that lose tokens with another room."""
    model = small_decoder(name)
    # The first two outgrow a room together.
    generations = [Generation([7, 3], 12), Generation([5], 14), *mixed(model.config.vocab_size, new_tokens=9)[::-1]]
    expected = [alone(model, generation) for generation in generations]
    # Fewer places than rows, and short pieces: rows join when others have run, and leave before them.
    with Engine(model, max_batch=3, prefill_tokens=4, max_tokens=32, compile=True) as engine:
        assert answers(engine, generations) == expected


def test_a_fault_leaves_places_that_serve_again(uncompiled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches rows of a batch that failed and still count."""
    model, failing = small_decoder("plain"), [True]
    hidden = static_cache.StaticRows.hidden

    def once(self: static_cache.StaticRows, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        if failing and positions.any():
            failing.clear()
            raise MemoryError("no room")
        return hidden(self, tokens, positions)

    monkeypatch.setattr(static_cache.StaticRows, "hidden", once)
    monkeypatch.setattr(scheduler._log, "exception", lambda *_: None)
    with Engine(model, max_batch=2, compile=True) as engine:
        heard, _ = submit(engine, Generation([3, 4], 5))
        assert heard[0].wait() == "error"
        assert answers(engine, [Generation([3, 4], 5)]) == [alone(model, Generation([3, 4], 5))]


def test_an_error_in_compilation_is_raised_at_start(uncompiled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a server that says it is ready, or waits for ever, without its programs."""

    def broken(self: static_cache.StaticRows) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(static_cache.StaticRows, "programs", broken)
    with pytest.raises(MemoryError, match="no room"), Engine(small_decoder("plain"), compile=True):
        pass


def test_generations_longer_than_the_programs_are_refused(uncompiled: None) -> None:
    with Engine(small_decoder("plain"), max_tokens=16, compile=True) as engine:
        with pytest.raises(ConfigError, match="prompt and new tokens=17: must be at most max_tokens=16"):
            submit(engine, Generation([1] * 7, 10))
        assert len(answers(engine, [Generation([1] * 6, 10)])[0]) == 10


@pytest.mark.compile
def test_every_program_is_compiled_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches programs that rows compile as they join, leave, or outgrow a room, and steps that are not compiled."""
    from torch._dynamo.testing import CompileCounterWithBackend

    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile
    # The options are those of another backend.
    monkeypatch.setattr(torch, "compile", lambda step, options, **given: compiled(step, backend=backend, **given))
    monkeypatch.setattr(static_cache, "ROOM_TOKENS", 8)
    attention, convolution = {"kind": "attention", "n_heads": 2}, {"kind": "short_conv"}
    sizes = {"vocab_size": 40, "d_model": 8, "n_layers": 1, "max_seq_len": 32, "embedding_std": 0.5}
    model = Decoder.build({**sizes, "blocks": [[attention, convolution]]}).double().eval()
    generations = mixed(40, new_tokens=12)
    lines: list[str] = []
    with Engine(model, max_batch=2, prefill_tokens=8, compile=True, note=lines.append) as engine:
        assert (backend.frame_count, engine.counts.programs, len(lines)) == (4, 4, 4)
        assert answers(engine, generations) == [alone(model, generation) for generation in generations]
        assert backend.frame_count == 4
    assert lines[-1].startswith("step compiled for 2 rows of 32 tokens in ") and lines[-1].endswith("; programs left: 0")


@pytest.mark.compile
def test_no_compiler_is_an_error_at_start(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches pages of a trace behind minutes of loading and compiling."""
    from torch._inductor import config

    said = r"no C\+\+ compiler found: must have one .*; install g\+\+, set CXX, or leave"
    with config.patch("cpp.cxx", (None, "no-such-compiler")):
        with pytest.raises(ConfigError, match=said):
            Engine(small_decoder("plain"), compile=True)
        assert main(["serve", "no-such-model", "--port", "0", "--compile"]) == 2
    assert re.fullmatch(f"twoaxis: compile: {said} .*\n", capsys.readouterr().err)
