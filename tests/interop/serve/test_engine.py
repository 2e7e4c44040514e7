"""The engine: every answer is that of a single request, whoever comes, goes, fails or leaves meanwhile."""

import threading
from typing import Any

import pytest
import torch

from twoaxis import ConfigError, DataError, Decoder, generate
from twoaxis.interop.serve.generation import Generation, RequestHandle, choose
from twoaxis.interop.serve.scheduler import Engine, QueueFull, Stopped
from twoaxis.model.generate import Sampling

from ..hf_models import MODELS, small_decoder
from .recorder import WAIT_SECONDS, Recorder, alone, submit

LENGTHS = (5, 1, 17, 9, 3, 12)


def mixed(vocabulary: int, new_tokens: int = 8) -> list[Generation]:
    """Greedy and sampled generations of different lengths."""
    generator = torch.Generator().manual_seed(3)
    samplings = [Sampling(), Sampling(temperature=1.0, seed=4), Sampling(temperature=0.7, top_p=0.8, top_k=9, seed=-5)]
    return [
        Generation(torch.randint(vocabulary, (length,), generator=generator).tolist(), new_tokens - index, samplings[index % 3])
        for index, length in enumerate(LENGTHS)
    ]


@pytest.mark.parametrize("name", MODELS)
def test_each_answer_is_that_of_a_single_request(name: str) -> None:
    model = small_decoder(name)
    generations = mixed(model.config.vocab_size)
    expected = [alone(model, generation) for generation in generations]
    # Fewer batch slots than requests and pieces shorter than prompts: rows join and leave while others are read and run.
    with Engine(model, max_batch=3, prefill_tokens=8) as engine:
        heard, _ = submit(engine, *generations)
        assert [one.wait() for one in heard] == ["length"] * len(heard)
        assert [one.tokens for one in heard] == expected
        assert engine.counts.prompt_tokens == sum(LENGTHS)
        assert engine.counts.new_tokens == sum(map(len, expected))
        assert engine.counts.row_steps > 2 * engine.counts.steps


@pytest.fixture(scope="module")
def model() -> Decoder:
    return small_decoder("windows")


def test_one_batch_slot_is_exact_to_the_bit_in_float32(model: Decoder) -> None:
    model = small_decoder("windows").float()
    generations = mixed(model.config.vocab_size)
    with Engine(model, max_batch=1) as engine:
        heard, _ = submit(engine, *generations)
        assert all(one.wait() == "length" for one in heard)
    assert [one.tokens for one in heard] == [alone(model, generation) for generation in generations]


def test_a_request_joins_a_running_batch_and_does_not_wait_for_its_end(model: Decoder) -> None:
    short = Generation([1, 2], 2)
    with Engine(model) as engine:
        second = Recorder()
        first = Recorder(lambda count: count == 3 and not engine.submit([(short, second)]))
        engine.submit([(Generation([3], 30), first)])
        assert second.wait() == "length"
        assert len(first.tokens) < 30
        assert first.wait() == "length"
    assert first.tokens == alone(model, Generation([3], 30))
    assert second.tokens == alone(model, short)


def test_choices_of_a_prompt_read_it_once_as_far_as_there_are_slots(model: Decoder) -> None:
    choices = [Generation([5, 1, 4], length, Sampling(temperature=1.0, seed=seed)) for seed, length in ((1, 1), (2, 6), (3, 6))]
    with Engine(model, max_batch=2) as engine:
        heard, _ = submit(engine, *choices)
        assert [one.wait() for one in heard] == ["length"] * 3
        assert engine.counts.prompt_tokens == 2 * 3
    assert [one.tokens for one in heard] == [alone(model, choice) for choice in choices]


def test_a_stop_token_ends_before_itself(model: Decoder) -> None:
    whole = alone(model, Generation([7], 12))
    stop = whole[-1]
    with Engine(model) as engine:
        (heard,), _ = submit(engine, Generation([7], 12, stop_tokens=frozenset({stop})))
        assert heard.wait() == "stop"
    assert heard.tokens == whole[: whole.index(stop)]


@pytest.mark.parametrize("temperature", [0.0, 3.0])
def test_ids_that_the_tokenizer_lacks_are_never_chosen(temperature: float) -> None:
    padded = small_decoder("plain")
    padded.embedding.weight.data[30:] *= 100
    sampling = Sampling(temperature=temperature)
    with Engine(padded) as engine:
        (free, bound), _ = submit(engine, *(Generation([7], 12, sampling, vocab_size=n) for n in (None, 30)))
        assert (free.wait(), bound.wait()) == ("length", "length")
    assert max(free.tokens) >= 30 > max(bound.tokens)
    assert bound.tokens == generate(padded, [[7]], 12, sampling, vocab_size=30)[0]


def test_a_listener_may_end_its_generation(model: Decoder) -> None:
    with Engine(model) as engine:
        heard = Recorder(lambda count: count == 2)
        engine.submit([(Generation([7], 12), heard)])
        assert heard.wait() == "stop"
    assert heard.tokens == alone(model, Generation([7], 2))


def test_cancelled_generations_leave_wherever_they_are(model: Decoder) -> None:
    generations = mixed(model.config.vocab_size, new_tokens=12)
    with Engine(model, max_batch=2, prefill_tokens=4) as engine:
        heard = [Recorder() for _ in generations]
        cancelling = Recorder(lambda count: count == 3 and any(handle.cancel() for handle in handles[2:5]))
        ready = threading.Event()
        blocking = Recorder(lambda count: not ready.wait(WAIT_SECONDS))
        # The thread of the model waits in its first token until all handles are known.
        engine.submit([(Generation([1], 1), blocking)])
        handles = engine.submit(list(zip(generations, [cancelling, *heard[1:]], strict=True)))
        ready.set()
        assert [one.wait() for one in heard[2:5]] == ["cancelled"] * 3
        assert [one.wait() for one in (cancelling, heard[1], heard[5])] == ["length"] * 3
    assert heard[1].tokens == alone(model, generations[1])
    assert heard[5].tokens == alone(model, generations[5])


def test_a_running_row_may_be_cancelled(model: Decoder) -> None:
    with Engine(model) as engine:
        stays, leaves = Recorder(), Recorder(lambda count: count == 4 and handles[1].cancel())
        ready = threading.Event()
        engine.submit([(Generation([1], 1), Recorder(lambda count: not ready.wait(WAIT_SECONDS)))])
        handles = engine.submit([(Generation([3, 4, 5], 12), stays), (Generation([9], 90), leaves)])
        ready.set()
        assert (stays.wait(), leaves.wait()) == ("length", "cancelled")
        assert engine.running == engine.waiting == 0
    assert stays.tokens == alone(model, Generation([3, 4, 5], 12))
    assert len(leaves.tokens) == 4


def occupied(engine: Engine, ready: threading.Event) -> Recorder:
    """A generation that has a batch slot, and holds the thread of the model in its first token until this is set."""
    running = Recorder(lambda count: not ready.wait(WAIT_SECONDS))
    engine.submit([(Generation([1], 2), running)])
    while engine.waiting:
        pass
    return running


def test_a_full_queue_takes_all_or_none(model: Decoder) -> None:
    ready = threading.Event()
    with Engine(model, max_batch=1, max_queue=2) as engine:
        running = occupied(engine, ready)
        first, _ = submit(engine, Generation([2], 1))
        with pytest.raises(QueueFull, match="1 of 2 places taken"):
            submit(engine, Generation([2], 1), Generation([2], 1))
        last, _ = submit(engine, Generation([3], 1))
        with pytest.raises(QueueFull):
            submit(engine, Generation([2], 1))
        ready.set()
        assert [one.wait() for one in (running, *first, *last)] == ["length"] * 3


def test_arrivals_with_free_batch_slots_do_not_wait(model: Decoder) -> None:
    ready = threading.Event()
    with Engine(model, max_batch=4, max_queue=1) as engine:
        running = occupied(engine, ready)
        # The thread of the model is held in a token: three batch slots and the queue are free.
        heard = [submit(engine, Generation([2], 1))[0][0] for _ in range(4)]
        assert engine.running == 1
        with pytest.raises(QueueFull, match="1 of 1 places taken"):
            submit(engine, Generation([2], 1))
        ready.set()
        assert [one.wait() for one in (running, *heard)] == ["length"] * 5
        assert engine.running == 0


def test_generations_that_are_over_hold_no_cache(model: Decoder, unlogged: None, monkeypatch: pytest.MonkeyPatch) -> None:
    handles: list[RequestHandle] = []
    ready, embed = threading.Event(), model.embed

    def embedding(tokens: torch.Tensor) -> torch.Tensor:
        if tokens.shape[1] == 4 and tokens[0, 0] == 5:
            handles[1].cancel()
        if 39 in tokens:
            raise MemoryError("no room")
        return embed(tokens)

    monkeypatch.setattr(model, "embed", embedding)
    with Engine(model, prefill_tokens=4) as engine:
        held = Recorder(lambda count: not ready.wait(WAIT_SECONDS))
        engine.submit([(Generation([1], 1), held)])
        heard, taken = submit(engine, *(Generation([first] * 4 + [last], 2) for first, last in ((3, 3), (5, 5), (4, 39))))
        # A first piece is cached, then comes an ending: by itself, because the client left, by a fault.
        handles.extend(taken)
        ready.set()
        assert [one.wait() for one in heard] == ["length", "cancelled", "error"]
    assert [handle.cache for handle in handles] == [None] * 3


def test_stopping_ends_everything_and_takes_no_more(model: Decoder) -> None:
    engine = Engine(model, max_batch=1)
    heard, begun = [Recorder(), Recorder()], threading.Event()
    heard[0]._act = lambda count: begun.set()
    with engine:
        engine.submit([(Generation([1], 120), heard[0]), (Generation([1], 1), heard[1])])
        assert begun.wait(WAIT_SECONDS)
    assert [one.wait() for one in heard] == ["cancelled"] * 2
    assert not engine.alive
    with pytest.raises(Stopped, match="stopping"):
        submit(engine, Generation([1], 1))
    engine.stop()


def test_a_fault_ends_only_who_is_concerned(unlogged: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_decoder("plain")
    embed = model.embed

    def failing(tokens: torch.Tensor) -> torch.Tensor:
        if 39 in tokens[0] and tokens.shape[1] > 1:
            raise MemoryError("no room")
        return embed(tokens)

    monkeypatch.setattr(model, "embed", failing)
    with Engine(model) as engine:

        def broken(count: int) -> bool:
            raise ValueError("a callback's fault")

        heard = [Recorder(), Recorder(), Recorder(broken)]
        fine = Generation([3, 4, 5], 9)
        engine.submit([(fine, heard[0]), (Generation([1, 39], 9), heard[1]), (Generation([2, 2], 9), heard[2])])
        assert [one.wait() for one in heard] == ["length", "error", "error"]
        assert engine.counts.faults == 2
        (after,), _ = submit(engine, fine)
        assert after.wait() == "length"
    assert heard[0].tokens == after.tokens == alone(model, fine)


def test_a_fault_of_a_step_ends_its_rows_and_the_engine_goes_on(unlogged: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_decoder("plain")
    embed, fails = model.embed, [True]

    def failing(tokens: torch.Tensor) -> torch.Tensor:
        if tokens.shape[0] > 1 and fails.pop():
            raise MemoryError("no room")
        return embed(tokens)

    monkeypatch.setattr(model, "embed", failing)
    fine = Generation([3, 4, 5], 9)
    with Engine(model) as engine:
        heard, _ = submit(engine, fine, Generation([1], 9))
        assert [one.wait() for one in heard] == ["error", "error"]
        (after,), _ = submit(engine, fine)
        assert after.wait() == "length"
    assert after.tokens == alone(model, fine)


def test_rows_that_are_chosen_together_are_as_alone() -> None:
    """Catches draws that depend on neighbours, and logits of one row that end others."""
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(0))
    samplings = [Sampling(), Sampling(temperature=1.0, seed=4), Sampling(temperature=1.0, seed=5)] * 2

    def handles() -> list[RequestHandle]:
        return [RequestHandle(Generation([1], 1, sampling, vocab_size=30), Recorder()) for sampling in samplings]

    expected = [choose([handle], logits[row : row + 1])[0] for row, handle in enumerate(handles())]
    assert choose(handles(), logits) == expected
    logits[1] = torch.nan
    found = choose(handles(), logits)
    assert isinstance(found.pop(1), DataError)
    assert found == expected[:1] + expected[2:]


@pytest.mark.parametrize("name", ["max_batch", "max_queue", "prefill_tokens"])
def test_numbers_below_one_are_refused(name: str, model: Decoder) -> None:
    options: dict[str, Any] = {name: 0}
    with pytest.raises(ConfigError, match=f"{name}=0: must be >= 1"):
        Engine(model, **options)
