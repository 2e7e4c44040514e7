"""The runner tells apart what agrees, what disagrees, what is malformed, and what no adapter claims."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from twoaxis.ops.kernels import SWITCH

from ..fresh import run_fresh
from .conftest import KEPT
from .golden import Golden, MalformedFixture, Tolerance, fixture_paths

ROOT = Path(__file__).parents[2]


def _copy(folder: Path, name: str, **changes: object) -> Path:
    folder.mkdir(exist_ok=True)
    about = json.loads((KEPT / "swa-fla-layer.json").read_text())
    path = folder / f"{name}.json"
    path.write_text(json.dumps({**about, "name": name, **changes}))
    shutil.copy(KEPT / "swa-fla-layer.safetensors", path.with_suffix(".safetensors"))
    return path


def _change(path: Path, name: str) -> None:
    tensors = load_file(path.with_suffix(".safetensors"))
    tensors[name].view(-1)[0] += 1e-6
    save_file(tensors, path.with_suffix(".safetensors"))


def test_any_folder_of_fixtures(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    _copy(first, "swa-fla-layer")
    _copy(first, "mystery")
    _change(_copy(second, "swa-fla-layer-damaged"), "output/y")
    names = list(json.loads((KEPT / "swa-fla-layer.json").read_text())["tensors"])
    _change(_copy(second, "swa-fla-layer-different", tensors=names), "output/y")
    _copy(second, "swa-fla-layer-halved").with_suffix(".safetensors").unlink()
    options = ["-v", "-p", "no:cacheprovider", str(Path(__file__).with_name("test_parity.py"))]
    # The session has a cache of its own, for which it would compile kernels that serve no tensor in float64.
    done = run_fresh(
        "import sys, pytest\nsys.exit(pytest.main(sys.argv[1:]))",
        *(*options, "--fixtures", str(first), "--fixtures", str(second)),
        cwd=ROOT,
        env={**os.environ, SWITCH: "off"},
    )
    outcomes = dict(re.findall(r"test_parity\[([\w-]+)\] (PASSED|FAILED|UNCLAIMED)", done.stdout))
    assert outcomes == {
        "swa-fla-layer": "PASSED",
        "mystery": "UNCLAIMED",
        "swa-fla-layer-damaged": "FAILED",
        "swa-fla-layer-different": "FAILED",
        "swa-fla-layer-halved": "FAILED",
    }, done.stdout + done.stderr
    assert re.search(r"unclaimed fixtures.*\n.*these 1,.*\n  mystery\n", done.stdout)
    assert "1 unclaimed" in done.stdout and done.returncode == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("float64 1e-12; float32 1e-6 relative", Tolerance(1e-12, 1e-12)),
        ("float64: atol/rtol 1e-9 (grads 1e-8); float32: ~5x", Tolerance(1e-9, 1e-8)),
        ("float64: atol 1e-9, rtol 1e-9 on logits/states, rtol 1e-7 on grads. float32: 2e-4", Tolerance(1e-9, 1e-7)),
        ("float32: atol 2e-4, rtol 2e-4 on outputs; 1e-3 relative to max|grad| on gradients", Tolerance(2e-4, 0.0, 1e-3)),
    ],
)
def test_tolerance_in_words(text: str, expected: Tolerance) -> None:
    assert Tolerance.parse(text) == expected


@pytest.mark.parametrize("text", ["", "float32: 1e-4", "float64: close"])
def test_tolerance_that_says_nothing(text: str) -> None:
    with pytest.raises(MalformedFixture, match="must begin with a number for float64"):
        Tolerance.parse(text)


def test_damaged_tensor_is_malformed(tmp_path: Path) -> None:
    path = _copy(tmp_path, "damaged")
    _change(path, "param/q_proj.weight")
    with pytest.raises(MalformedFixture, match=r"damaged.json: param/q_proj.weight has sha256_16"):
        Golden.read(path)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"name": "x"}', '{"name": "x", "tensors": ["y"]}'])
def test_unreadable_json_is_malformed(tmp_path: Path, text: str) -> None:
    path = _copy(tmp_path, "unreadable")
    path.write_text(text)
    with pytest.raises(MalformedFixture, match=r"unreadable.json"):
        Golden.read(path)


def test_tensors_without_json_are_found_and_malformed(tmp_path: Path) -> None:
    _copy(tmp_path, "alone").unlink()
    (path,) = fixture_paths(tmp_path)
    with pytest.raises(MalformedFixture):
        Golden.read(path)


def test_everything_stored_must_be_computed_and_used() -> None:
    zero = torch.zeros(1, dtype=torch.float64)
    golden = Golden("whole", {"tolerance": "float64 1e-9"}, {"output/y": zero, "param/w": zero})
    with pytest.raises(AssertionError, match=r"not computed: \['output/y'\]"):
        golden.compare({})
    with pytest.raises(AssertionError, match=r"not used: \['param/w'\]"):
        golden.compare({"output/y": zero})
    golden.take("param/w")
    golden.compare({"output/y": zero})
