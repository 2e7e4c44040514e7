"""Kills verbs that write at random moments, starts them again, and compares what they come to with what was never killed.

    python tests/train/kill_and_resume.py --kills 20
    python tests/train/kill_and_resume.py study export retrofit --kills 50

`train` and `study` go on where they were killed and have to end with the same losses and weights, bit for bit; `export` and
`retrofit` have to leave everything or nothing, and the same bytes in the end. Every fourth kill is a SIGTERM, the others are
SIGKILL; for a study every other one also kills the run that it has started. When all is there before the kills are done, it is
compared and begun anew.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from safetensors.torch import load_file

import twoaxis.cli.train
from twoaxis.core.files import cache_folder
from twoaxis.ops.cpu import library
from twoaxis.train import StepRecord, read_metrics

KERNELS = cache_folder() / "kernels"
COLUMNS = ("kills", "SIGKILL", "SIGTERM", "while writing", "in a step", "at any moment", "left a draft", "complete", "wrong")


def recipe(folder: Path, **changes: Any) -> dict[str, Any]:
    """A recipe whose steps and checkpoints take long enough to be hit."""
    corpus = folder / "corpus.txt"
    if not corpus.exists():
        chance = random.Random(0)
        words = ["".join(chance.choice("abcdefgh") for _ in range(chance.randint(1, 6))) for _ in range(40)]
        corpus.write_text(" ".join(chance.choice(words) for _ in range(5000)))
    return {
        "model": {"d_model": 64, "n_layers": 2, "depth": "deep_delta"},
        "data": {"corpus": str(corpus), "seq_len": 32},
        "schedule": {"kind": "wsd", "warmup_steps": 7},
        "batch_size": 8,
        "micro_batch_size": 3,
        "validate_every": 5,
        "validation_tokens": 200,
        "checkpoint_every": 2,
        "keep_checkpoints": 2,
        "device": "cpu",
        **changes,
    }


def below(folder: Path) -> list[Path]:
    """Files and folders below a folder, in which a process may write and remove at the same time."""
    return [Path(parent) / name for parent, folders, files in os.walk(folder) for name in (*folders, *files)]


def contents(folder: Path) -> dict[str, bytes]:
    """The files below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in below(folder) if path.is_file()}


class Fork:
    """A command line in a fork of this process, which has everything loaded; a process of its own would load it each time."""

    def __init__(self, words: list[str], environment: dict[str, str], log: Path) -> None:
        self._code: int | None = None
        self.pid = os.fork()
        if not self.pid:
            self._run(words, environment, log)

    @staticmethod
    def _run(words: list[str], environment: dict[str, str], log: Path) -> None:
        status = 1
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
            os.environ.update(environment)
            torch.set_num_threads(1)
            status = twoaxis.cli.main(words)
        except BaseException:  # As an interpreter would show it.
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def wait(self) -> int:
        """The exit code at its end."""
        if self._code is None:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._code

    def send_signal(self, number: signal.Signals) -> None:
        """Sends a signal if it runs."""
        if self.poll() is None:
            os.kill(self.pid, number)


Process = Fork | subprocess.Popen[bytes]


class Case:
    """A verb that writes a folder whole or not at all, as `words` say.

    Attributes:
        name: of the verb.
        moments: of its kills, in turns.
        folder: of everything.
        seconds: that it takes when nothing kills it.
    """

    name = ""
    moments = ("while writing", "at any moment")
    command: tuple[str, ...] = ()
    """What starts it as a process of its own; a fork without."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.seconds = folder, 0.0
        (folder / "cache").mkdir(parents=True)
        # Compiled before the first case.
        (folder / "cache" / "kernels").symlink_to(KERNELS)
        self.prepare()

    def prepare(self) -> None:
        """Makes what the verb reads."""
        trained = self.folder / "trained"
        self.input = self.write(
            "recipe.json", recipe(self.folder, steps=2, schedule="constant", model={"d_model": 256, "n_layers": 4})
        )
        self.wait(self.begin(["train", self.input, "--run", trained]))
        self.input = trained

    def words(self, out: Path) -> list[object]:
        """The command line that writes `out`."""
        raise NotImplementedError

    def is_done(self, out: Path, code: int) -> bool:
        """Whether everything is there after an end with this exit code."""
        del code
        return out.exists()

    def drafts(self, out: Path) -> list[Path]:
        """What is being written, or was when it was killed."""
        return list(out.parent.glob(f".{out.name}.*.tmp"))

    def steps(self, out: Path) -> int:
        """Steps taken in all runs."""
        found = 0
        for path in below(out):
            if path.name == "metrics.jsonl":
                with contextlib.suppress(FileNotFoundError):
                    found += path.read_bytes().count(b"\n")
        return found

    def differences(self, whole: Path, out: Path) -> list[str]:
        """What differs between two that are complete, in words."""
        one, other = contents(whole), contents(out)
        return [f"{name} differs" for name in sorted(one.keys() | other.keys()) if one.get(name) != other.get(name)]

    def write(self, name: str, data: Any) -> Path:
        """Writes JSON for the verb to read."""
        path = self.folder / name
        path.write_text(json.dumps(data))
        return path

    def begin(self, words: list[object]) -> Process:
        """Starts a process."""
        environment = {"OMP_NUM_THREADS": "1", "TWOAXIS_CACHE": str(self.folder / "cache")}
        given, errors = list(map(str, words)), self.folder / "errors.txt"
        if not self.command:
            return Fork(given, environment, errors)
        with open(errors, "ab") as log:
            command, environment = [*self.command, *given], {**os.environ, **environment}
            return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=log)

    def wait(self, process: Process) -> None:
        """Waits for a process that nothing kills."""
        begun = time.monotonic()
        if code := process.wait():
            raise SystemExit(f"{self.name} failed with exit code {code}: {(self.folder / 'errors.txt').read_text()[-500:]}")
        self.seconds = time.monotonic() - begun

    def kill(self, process: Process, number: signal.Signals, chance: random.Random) -> None:
        """Sends a signal and waits for the end."""
        del chance
        process.send_signal(number)
        process.wait()

    def traces(self, said: str) -> int:
        """How many traces the verb has shown."""
        return said.count("Traceback")


class Export(Case):
    """A Hugging Face folder of a run."""

    name = "export"

    def words(self, out: Path) -> list[object]:
        return ["export", self.input, "--out", out]


class Retrofit(Case):
    """A run with a mixer more."""

    name = "retrofit"

    def words(self, out: Path) -> list[object]:
        return ["retrofit", self.input, "--sequence", "short_conv", "--tokens", 16, "--out", out]


class Train(Case):
    """A training run."""

    name = "train"
    moments = ("at any moment", "while writing", "in a step")

    def prepare(self) -> None:
        self.input = self.write("recipe.json", recipe(self.folder, steps=24))

    def words(self, out: Path) -> list[object]:
        return ["train", self.input, "--run", out]

    def is_done(self, out: Path, code: int) -> bool:
        return code == 0

    def drafts(self, out: Path) -> list[Path]:
        return [path for path in below(out) if path.name.startswith(".") and path.suffix == ".tmp"]

    def differences(self, whole: Path, out: Path) -> list[str]:
        found = []
        names = [{str(path.relative_to(folder)) for path in below(folder)} for folder in (whole, out)]
        if names[0] != names[1]:
            found.append(f"only one has {', '.join(sorted(names[0] ^ names[1]))}")
        for path in sorted(whole.rglob("metrics.jsonl")):
            one, other = measured(path), measured(out / path.relative_to(whole))
            if one != other:
                steps = [a.step for a, b in zip(one, other, strict=False) if a != b]
                found.append(f"{path.relative_to(whole)} differs at steps {steps[:5]}, lengths {len(one)} and {len(other)}")
        for path in sorted(whole.rglob("*.safetensors")):
            a, b = load_file(path), load_file(out / path.relative_to(whole))
            if a.keys() != b.keys() or not all(torch.equal(a[key], b[key]) for key in a):
                found.append(f"{path.relative_to(whole)} differs")
        return found


class Muon(Train):
    """A training run of the recipe with Muon and completeP."""

    name = "muon"

    def prepare(self) -> None:
        attention = {"kind": "attention", "n_heads": 4, "head_dim": 16}
        model = {"d_model": 64, "n_layers": 2, "depth": "mhc", "blocks": [[attention, "swiglu"]]}
        base = {"parametrization": "completep", "base_d_model": 32, "base_n_layers": 1}
        changes = {"model": {**model, **base}, "optimizer": {"kind": "muon"}}
        self.input = self.write("recipe.json", recipe(self.folder, steps=40, **changes))


class Study(Train):
    """Four short runs of two arms."""

    name = "study"

    def prepare(self) -> None:
        base = recipe(self.folder)
        arms = {kind: {"model": {"depth": kind}} for kind in ("residual", "deep_delta")}
        design = {"question": "?", "control": "residual", "arms": arms, "base": base, "replicates": [0, 1]}
        self.input = self.write("study.json", {**design, "budget": {"steps": 12}, "decision": {"smallest_effect": 0.1}})

    def words(self, out: Path) -> list[object]:
        return ["study", self.input, "--out", out]

    def kill(self, process: Process, number: signal.Signals, chance: random.Random) -> None:
        threads = Path(f"/proc/{process.pid}/task").glob("*/children") if chance.random() < 0.5 else ()
        children = [int(child) for thread in threads for child in thread.read_text().split()]
        process.send_signal(number)
        for child in children if number == signal.SIGKILL else ():
            os.kill(child, signal.SIGKILL)
        process.wait()


class Ranks(Train):
    """A training run of two processes, one of which is killed, or all of which are told to stop."""

    name = "ranks"
    command = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "twoaxis")

    def words(self, out: Path) -> list[object]:
        return ["train", self.input, "parallel.shard=2", "--folder", out]

    def kill(self, process: Process, number: signal.Signals, chance: random.Random) -> None:
        threads = Path(f"/proc/{process.pid}/task").glob("*/children")
        children = [int(child) for thread in threads for child in thread.read_text().split()]
        if number == signal.SIGKILL and children:
            os.kill(chance.choice(children), number)
        else:
            process.send_signal(signal.SIGTERM)
        assert isinstance(process, subprocess.Popen)
        process.wait(timeout=60)

    def traces(self, said: str) -> int:
        # The launcher shows one of its own whenever a process of it fails.
        return said.count("Traceback") - said.count("in launch_agent\n") - said.count("in _handle_termination\n")


CASES: dict[str, type[Case]] = {case.name: case for case in (Train, Muon, Study, Export, Retrofit, Ranks)}


def wait_for(moment: str, case: Case, process: Process, out: Path, chance: random.Random) -> None:
    """Waits until the moment has come, or the process has ended."""
    if moment == "at any moment":
        end = time.monotonic() + chance.uniform(0.0, case.seconds)
        wait_until(lambda: time.monotonic() >= end, process)
    elif moment == "in a step":
        wait_until(growth_of(lambda: case.steps(out), chance.randint(1, 9)), process)
        time.sleep(chance.uniform(0.0, 0.05))
    else:
        wait_until(growth_of(lambda: len(case.drafts(out)), chance.randint(1, 4) if case.moments[2:] else 1), process)
        # Somewhere between the first byte and the rename.
        time.sleep(chance.choice([0.0, 0.001, 0.002, 0.004]))


def wait_until(reached: Callable[[], bool], process: Process) -> None:
    """Waits while the process lives."""
    while process.poll() is None and not reached():
        time.sleep(0.0005)


def growth_of(number: Callable[[], int], times: int) -> Callable[[], bool]:
    """Tells whether the number has grown so many times since the first call."""
    last, grown = number(), 0

    def reached() -> bool:
        nonlocal last, grown
        now = number()
        grown, last = grown + (now > last), now
        return grown >= times

    return reached


def measured(metrics: Path) -> list[StepRecord]:
    """The metrics without their clock."""
    return [record._replace(seconds=0.0) for record in read_metrics(metrics)]


def kill_and_compare(case: Case, kills: int, chance: random.Random) -> tuple[Counter[str], list[str]]:
    """Kills a verb so many times; returns what was counted, and what differs."""
    whole, counts, wrong, number = case.folder / "whole" / "out", Counter[str](), list[str](), 0
    case.wait(case.begin(case.words(whole)))
    # Each beside nothing else, since a study takes over the runs of its neighbours.
    out = case.folder / "0" / "out"
    while counts["kills"] < kills:
        moment = case.moments[counts["kills"] % len(case.moments)]
        sent = signal.SIGTERM if counts["kills"] % 4 == 3 else signal.SIGKILL
        process = case.begin(case.words(out))
        wait_for(moment, case, process, out, chance)
        if process.poll() is None:
            case.kill(process, sent, chance)
            counts.update(["kills", sent.name, moment, *(["left a draft"] if case.drafts(out) else [])])
            print(f"{case.name}: kill {counts['kills']} of {kills}: {sent.name} {moment}, {case.steps(out)} steps", flush=True)
        done = case.is_done(out, process.wait())
        if counts["kills"] == kills and not done:
            case.wait(case.begin(case.words(out)))
        if counts["kills"] == kills or done:
            counts["complete"] += 1
            wrong += [f"{case.name} {number}: {one}" for one in case.differences(whole, out)]
            wrong += [f"{case.name} {number}: left behind: {path.name}" for path in case.drafts(out)]
            number += 1
            out = case.folder / str(number) / "out"
    said = (case.folder / "errors.txt").read_text()
    wrong += [f"{case.name}: a trace was shown: {said[-3000:]}"] if case.traces(said) else []
    counts["wrong"] = len(wrong)
    return counts, wrong


def main() -> int:
    """Runs the whole test; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verbs", nargs="*", metavar="VERB", help=f"of {', '.join(CASES)} (default: train)")
    parser.add_argument("--kills", type=int, default=3, help="how many times to kill each (default: 3)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default: 0)")
    arguments = parser.parse_args()
    if unknown := set(arguments.verbs) - CASES.keys():
        parser.error(f"unknown verb {unknown.pop()!r}; choose from {', '.join(CASES)}")
    library.status()
    table, bad = [], list[str]()
    with tempfile.TemporaryDirectory() as name:
        for verb in arguments.verbs or ["train"]:
            case = CASES[verb](Path(name) / verb)
            counts, wrong = kill_and_compare(case, arguments.kills, random.Random(arguments.seed))
            table.append((verb, *(str(counts[column]) for column in COLUMNS)))
            bad += wrong
    widths = [max(map(len, column)) for column in zip(("verb", *COLUMNS), *table, strict=True)]
    for row in (("verb", *COLUMNS), *table):
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    print("\n".join(bad) if bad else "everything equals what was never killed, bit for bit, and nothing is left behind")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
