"""A15 and more: a run that was stopped continues bit for bit like one that was not."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from twoaxis.train import Progress, StepRecord, TrainConfig, read_metrics, train
from twoaxis.train.environment import PeakMemory

Recipe = Callable[..., TrainConfig]

SCHEDULES = {
    "cosine": {"kind": "cosine", "warmup_steps": 6},
    "wsd": {"kind": "wsd", "warmup_steps": 6, "decay_fraction": 0.5},
    "constant": {"kind": "constant", "warmup_steps": 6},
}


class StopAfter:
    """Asks to stop once so many steps of this call are done."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def __call__(self) -> bool:
        self.left -= 1
        return self.left <= 0


def measured(run: Path) -> list[StepRecord]:
    return [record._replace(seconds=0.0) for record in read_metrics(run / "metrics.jsonl")]


def assert_same_run(one: Path, other: Path, steps: int) -> None:
    assert measured(one) == measured(other)
    assert len(measured(one)) == steps
    for name in ("model", "optimizer"):
        a, b = (load_file(run / "checkpoints" / f"step-{steps:08d}" / f"{name}.safetensors") for run in (one, other))
        assert a.keys() == b.keys()
        assert all(torch.equal(a[key], b[key]) for key in a), name


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_stopped_and_resumed_equals_uninterrupted(schedule: str, recipe: Recipe, tmp_path: Path) -> None:
    config = recipe(schedule=SCHEDULES[schedule], micro_batch_size=3)
    assert train(config, tmp_path / "whole").status == "finished"
    # Stops inside the warm-up, at a checkpoint, and after it: three lives and a fourth that ends.
    for steps in (3, 2, 2, 7):
        result = train(config, tmp_path / "parts", should_stop=StopAfter(steps))
        assert result.status == "interrupted"
        assert not (tmp_path / "parts" / "result.json").exists()
    assert len(measured(tmp_path / "parts")) == 14
    assert train(config, tmp_path / "parts").status == "finished"
    assert_same_run(tmp_path / "whole", tmp_path / "parts", 20)
    rates = [record.lr for record in measured(tmp_path / "parts")]
    assert rates == [config.optimizer.lr * config.schedule.multiplier(step, 20) for step in range(20)]


def test_a_run_that_died_repeats_the_steps_after_its_checkpoint(recipe: Recipe, tmp_path: Path) -> None:
    config = recipe()
    train(config, tmp_path / "whole")

    class Dies(Progress):
        def step(self, record: StepRecord) -> None:
            if record.step == 8:
                raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        train(config, tmp_path / "parts", progress=Dies())
    assert len(measured(tmp_path / "parts")) == 8
    with open(tmp_path / "parts" / "metrics.jsonl", "a") as file:
        file.write('{"step": 9, "lo')
    train(config, tmp_path / "parts")
    assert_same_run(tmp_path / "whole", tmp_path / "parts", 20)


@pytest.mark.parametrize("depth", ["attention_residuals", "deep_delta", "residual_scalars"])
def test_other_depth_mixers_resume_too(depth: str, recipe: Recipe, tmp_path: Path) -> None:
    blocks = [[{"kind": "short_swa", "n_heads": 2, "window": 4}, {"kind": "attention", "n_heads": 2}, "gelu"]]
    config = recipe(steps=6, model={"d_model": 16, "n_layers": 2, "depth": depth, "blocks": blocks})
    train(config, tmp_path / "whole")
    train(config, tmp_path / "parts", should_stop=StopAfter(3))
    train(config, tmp_path / "parts")
    assert_same_run(tmp_path / "whole", tmp_path / "parts", 6)


def test_a_run_with_muon_and_completep_resumes_too(recipe: Recipe, tmp_path: Path) -> None:
    attention = {"kind": "attention", "n_heads": 4, "head_dim": 4}
    model = {"d_model": 16, "n_layers": 2, "depth": "mhc", "blocks": [[attention, "swiglu"]]}
    sizes = {"parametrization": "completep", "base_d_model": 8, "base_n_layers": 1}
    config = recipe(steps=6, model={**model, **sizes}, optimizer={"kind": "muon"}, micro_batch_size=3)
    train(config, tmp_path / "whole")
    train(config, tmp_path / "parts", should_stop=StopAfter(3))
    train(config, tmp_path / "parts")
    assert_same_run(tmp_path / "whole", tmp_path / "parts", 6)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_ends_the_step_saves_and_says_so(name: str, recipe: Recipe, tmp_path: Path) -> None:
    class Signals(Progress):
        def step(self, record: StepRecord) -> None:
            if record.step == 3:
                os.kill(os.getpid(), getattr(signal, name))

    config: TrainConfig = recipe(steps=8)
    before = signal.getsignal(signal.SIGTERM)
    result = train(config, tmp_path / "run", progress=Signals())
    assert result.status == "interrupted"
    assert result.message == f"stopped by {name}, 3 of 8 steps are saved; run again to go on"
    assert (tmp_path / "run" / "checkpoints" / "step-00000003" / "state.json").exists()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_second_signal_stops_at_once(recipe: Recipe, tmp_path: Path) -> None:
    class Signals(Progress):
        def step(self, record: StepRecord) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(recipe(steps=8), tmp_path / "run", progress=Signals())
    assert train(recipe(steps=8), tmp_path / "run").status == "finished"


def test_a_finished_run_is_kept(recipe: Recipe, tmp_path: Path) -> None:
    first = train(recipe(steps=3), tmp_path / "run")
    written = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    assert train(recipe(steps=3), tmp_path / "run") == first
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == written


def test_a_run_that_died_before_its_result_only_writes_it(recipe: Recipe, tmp_path: Path) -> None:
    first = train(recipe(steps=3), tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    again = train(recipe(steps=3), tmp_path / "run")
    assert again.replace(peak_memory_bytes=0) == first.replace(peak_memory_bytes=0)


def test_peaks_are_those_of_all_processes_of_the_run(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PeakMemory, "now", lambda: PeakMemory(300, 9000))
    train(recipe(steps=8), tmp_path / "run", should_stop=StopAfter(3))
    monkeypatch.setattr(PeakMemory, "now", lambda: PeakMemory(500, 10))
    result = train(recipe(steps=8), tmp_path / "run")
    assert (result.peak_memory_bytes, result.peak_device_memory_bytes) == (500, 9000)


def test_the_peak_of_the_process_that_starts_a_run_is_not_that_of_the_run() -> None:
    """`getrusage` counts it on Linux, so all runs of a study had the peak of the study."""
    large = b"x" * (700 << 20)
    code = "from twoaxis.train.environment import PeakMemory; print(PeakMemory.now().peak_memory_bytes)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 50e6 < int(found.stdout) < len(large)
