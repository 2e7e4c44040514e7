"""`twoaxis plan` of a model, and `--calibrate`: what they print, and their one-line errors."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from twoaxis.cli import main
from twoaxis.planner import model_plan
from twoaxis.planner.advice import RECOMMENDED, methods_for
from twoaxis.planner.hardware import Device, read_device
from twoaxis.planner.hardware.calibrate import Calibration, Ceiling, Prediction
from twoaxis.planner.methods import Goal, Method

EXAMPLES = Path(__file__).parents[2] / "examples" / "models"
MODEL = """
vocab_size = 512
d_model = 256
n_layers = 4
max_seq_len = 512
blocks = [[{ kind = "attention", n_heads = 4 }, "swiglu"]]
"""
STUDY = """
question = "?"
control = "a"
replicates = 2
base = { model = { d_model = 16, n_layers = 1, blocks = [[{ kind = "attention", n_heads = 2 }, "swiglu"]] } }
budget = { steps = 10 }
decision = { smallest_effect = 0.02 }
arms = { a = {}, b = { model = { depth = "deep_delta" } } }
"""


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "small.toml"
    path.write_text(MODEL)
    return str(path)


@pytest.fixture
def study(tmp_path: Path) -> str:
    path = tmp_path / "study.toml"
    path.write_text(STUDY)
    return str(path)


@pytest.fixture
def few_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recommended methods beside the first two; that all are planned is tested with the advice."""

    def few(goal: Goal | None) -> tuple[Method, ...]:
        known, named = methods_for(goal), {name for name, _ in RECOMMENDED.values()}
        return (*known[:2], *(method for method in known[2:] if method.name in named))

    monkeypatch.setattr(model_plan, "methods_for", few)


def error_of(capsys: Any, *words: str) -> str:
    assert main(["plan", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    # A first plan also says that it measures.
    lines = [line for line in captured.err.strip().splitlines() if not line.startswith("planning: measures")]
    assert len(lines) == 1, captured.err
    return lines[0]


@pytest.mark.usefixtures("few_methods")
def test_a_model_as_json_has_everything(model: str, capsys: Any) -> None:
    words = ["plan", model, "--gpus", "4", "--pipeline", "2", "--goal", "shortcut", "--budget-memory", "1GiB", "--json"]
    assert main(words) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert found["not_counted"] == [] and set(found) == {
        *("format", "model", "not_counted", "setting", "layout", "ledger", "control", "fits_budget", "methods", "refused"),
        "recommendation",
    }
    assert found["setting"]["budget"] == {"memory_bytes": 2**30, "latency_seconds": None}
    assert (found["layout"]["gpus"], found["layout"]["pipeline"]) == (4, 2)
    assert found["recommendation"]["method"] == "DDL" and found["fits_budget"]
    assert "eager kernels of DDL" in captured.err


@pytest.mark.usefixtures("few_methods")
@pytest.mark.parametrize("columns", [80, 120])
def test_a_model_for_people_fits_the_line(columns: int, model: str, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches tables of a fixed width, and numbers, names and words that are cut to fit one."""
    monkeypatch.setenv("COLUMNS", str(columns))
    # A limit that nothing keeps.
    assert main(["plan", model, "--gpus", "4", "--pipeline", "2", "--goal", "both", "--budget-latency", "1us"]) == 1
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert max(map(len, lines)) <= columns
    named = [line for line in lines if line.startswith("DDL + ShortSWA w=128  ")]
    assert len(named) == {80: 3, 120: 2}[columns]
    # Memory, boundary and cache, whichever part of the table they are in.
    assert len(re.findall(r"\d [kMGT]B(?= |$)", "\n".join(named), re.MULTILINE)) == 3
    text = " ".join(out.split())
    for words in ("Ledger of small", "Recommended for both: DDL + ShortSWA w=128", "states cost and no quality"):
        assert words in text
    assert "What would change that:" in text or "Neither its rank nor its verdict changes with:" in text
    assert "Evidence." in text and "It is over: latency; so is the control." in text
    assert "of the 72.0 GB allowed: 80.0 GB less a reserve of 10.0 %" in text
    assert "Nothing fits the budget, the control included: the least memory is " in text


@pytest.mark.usefixtures("few_methods")
def test_a_budget_that_nothing_fits_is_a_negative_finding(model: str, capsys: Any) -> None:
    """Catches a plan that ends as if all were well although every method is over the limit that was asked for."""
    assert main(["plan", model, "--gpus", "4", "--budget-memory", "1kB", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["fits_budget"] and all("memory" in one["over"] for one in (found["control"], *found["methods"]))


@pytest.mark.usefixtures("few_methods")
def test_without_a_goal_there_is_a_table_and_no_advice(model: str, capsys: Any) -> None:
    assert main(["plan", model]) == 0
    out = capsys.readouterr().out
    assert "Recommended" not in out and "`--goal shortcut`" in out


def test_a_shipped_example(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # Its own method beside two others; all of them take half a minute.
    monkeypatch.setattr(model_plan, "methods_for", lambda goal: methods_for(goal)[:2])
    words = ["--gpus", "8", "--tensor", "1", "--pipeline", "4", "--batch", "64", "--microbatches", "16"]
    assert main(["plan", str(EXAMPLES / "attention-residuals-1b.toml"), *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["control"]["memory_bytes"] <= found["setting"]["memory_limit_bytes"]
    assert 0.3 < found["control"]["flops_share_of_peak"] < 0.8
    assert "attention_residuals as given" in {method["name"] for method in found["methods"]}


@pytest.mark.usefixtures("few_methods")
def test_the_page(model: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    monkeypatch.setattr("twoaxis.planner.page.write_page", lambda *arguments: written.append(arguments))
    path = tmp_path / "plan.html"
    words = ["--prompts", "32", "--html", str(path), "--goal", "local-mixing", "--json"]
    assert main(["plan", model, "--gpus", "4", *words]) == 0
    assert f"wrote {path}" in capsys.readouterr().err
    ((where, shape, setting, goal, prompts),) = written
    assert (where, shape.name, setting.layout.gpus, goal, prompts) == (path, "small", 4, "local-mixing", 32)
    assert "html='plan.txt': must be a file that ends in .html" in error_of(capsys, model, "--html", "plan.txt")


def test_a_study_is_still_a_study(study: str, capsys: Any) -> None:
    assert main(["plan", study, "--count", "replicates=3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [arm["name"] for arm in found["arms"]] == ["a", "b"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--goal", "short"], "goal='short': must be one of shortcut, local-mixing, both; did you mean 'shortcut'?"),
        (["--hardware", "h10"], "unknown device 'h10' (of your own: a path that ends in .toml or .json); did you mean 'h100'?"),
        (["--budget-memory", "70"], "budget-memory='70': has no unit; write for example 70GB or 64GiB"),
        (["--budget-memory", "20ms"], "budget-memory='20ms': 'ms' is a unit of time"),
        (["--budget-memory", "70gb"], "did you mean 'GB'?"),
        (["--budget-memory", "70 GB 3 MB"], "must be one number and its unit"),
        (["--budget-memory", "0GB"], "must be above zero"),
        (["--budget-latency", "2GB"], "budget-latency='2GB': 'GB' is a unit of memory"),
        (["--budget-latency", "-20ms"], "must be one number and its unit, not negative"),
        (["--budget-latency", "nans"], "must be one number and its unit"),
        (["--gpus", "-4"], "gpus=-4: must be at least 1"),
        (["--gpus", "8", "--tensor", "3"], "tensor=3: must be a divisor of gpus=8"),
        (["--pipeline", "8"], "pipeline * virtual=8: must be at most the 4 layers of small"),
        (["--tensor", "8"], "tensor=8: must be a divisor of the 4 heads of 'attention'"),
        (["--context", "0"], "tokens=0: must be at least 1"),
        (["--prompts", "0"], "prompts=0: must be at least 1"),
        (["--recompute", "blocks"], "recompute='blocks': must be one of off, block; did you mean 'block'?"),
        (["--precision", "fp64"], "precision='fp64': must be one of bf16, fp32"),
        (
            ["--hardware", "cpu-2-core", "--gpus", "1", "--precision", "bf16"],
            "must be a number format of cpu-2-core; it has fp64, fp32",
        ),
        (["--count"], "--measure/--count: belongs to a study, and this is a model; leave it out"),
        (["depth=deep_delta"], "key=value: belongs to a study, and this is a model; leave it out"),
        (["--out", "x.toml"], "--out: belongs to a calibration, and this is a model; leave it out"),
        (["--gpus", "many"], "--gpus='many': "),
    ],
)
def test_bad_options_are_one_line(words: list[str], expected: str, model: str, capsys: Any) -> None:
    assert expected in error_of(capsys, model, *words)


def test_bad_files_are_one_line(study: str, tmp_path: Path, capsys: Any) -> None:
    assert "FILE is missing" in error_of(capsys)
    assert "is no file, no folder and no preset" in error_of(capsys, "no-such.toml")
    assert "--budget-memory: belongs to a model, and this is a study; leave it out" in error_of(
        capsys, study, "--budget-memory", "70GB"
    )
    files = {
        "list.json": ("[1]", "must hold a table of keys and values"),
        "broken.json": ("{", "is not json"),
        "twice.json": ('{"hidden_size": 64, "hidden_size": 128}', "is not json (key 'hidden_size' has two values)"),
        "config.json": ('{"model_type": "mamba"}', "mamba"),
        "missing.json": ('{"model_type": "llama", "hidden_size": 64}', "missing"),
        "nothing.toml": ("x = 1\n", "must hold a Hugging Face config"),
    }
    for name, (text, expected) in files.items():
        (tmp_path / name).write_text(text)
        assert expected in error_of(capsys, str(tmp_path / name))


@pytest.mark.parametrize(
    ("figure", "value"), [("memory_bytes", -80e9), ("memory_bytes", 80.0), ("memory_bandwidth_bytes_per_second", 3.35e24)]
)
def test_absurd_hardware_is_one_line(figure: str, value: float, model: str, tmp_path: Path, capsys: Any) -> None:
    data = read_device("h100").to_data()
    data[figure]["value"] = value
    path = tmp_path / "absurd.json"
    path.write_text(json.dumps(data))
    assert "are the units mixed up?" in error_of(capsys, model, "--hardware", str(path))


def test_what_does_not_fit_names_a_remedy(capsys: Any) -> None:
    message = error_of(capsys, "dense-7b", "--gpus", "1")
    assert "dense-7b on 1 x h100: the least memory found is" in message
    assert "use 4 GPUs, or shorter sequences" in message or "use 2 GPUs, or shorter sequences" in message


def calibrated(**_: Any) -> Calibration:
    device = Device.from_data(read_device("cpu-2-core").to_data() | {"name": "this-machine"})
    ceilings = (Ceiling("copy of 1 MB", 1e-4, 1.1e-4, 1.0),)
    return Calibration(device, "fp32", ceilings, (Prediction("a norm", 3, 2e-4, 1e-4, "memory", 1.0),), ("a long one",))


@pytest.mark.usefixtures("few_methods")
def test_calibrate_prints_ceilings_and_errors_and_keeps_a_device(
    model: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twoaxis.planner.hardware.calibrate.calibrate", calibrated)
    path = tmp_path / "mine.toml"
    assert main(["plan", "--calibrate", "--out", str(path)]) == 0
    captured = capsys.readouterr()
    assert "copy of 1 MB" in captured.out and "2.00" in captured.out and "off by a factor of 2.00" in captured.out
    assert "left out, for lack of time: a long one" in captured.out and "measuring" in captured.err
    assert main(["plan", model, "--hardware", str(path), "--gpus", "1", "--goal", "shortcut", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["setting"]["device"] == "this-machine"
    assert main(["plan", "--calibrate", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["predictions"][0]["ratio"] == 2.0


def test_calibrate_refuses_before_it_measures(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twoaxis.planner.hardware.calibrate.calibrate", None)
    assert "must be a file that ends in .toml" in error_of(capsys, "--calibrate", "--out", "device.json")
    (tmp_path / "mine.toml").write_text("")
    assert "must be a new file" in error_of(capsys, "--calibrate", "--out", str(tmp_path / "mine.toml"))
    assert "FILE='x.toml': a calibration measures this machine" in error_of(capsys, "x.toml", "--calibrate")
    assert "--gpus: belongs to a model, and this is a calibration" in error_of(capsys, "--calibrate", "--gpus", "2")
