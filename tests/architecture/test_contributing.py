"""The mixer that docs/own_mixer.md shows works as it stands there, file, row and package."""

import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import torch

from twoaxis import Decoder, DecoderConfig
from twoaxis.core.parameters import declarations
from twoaxis.core.registry import Row
from twoaxis.study import StudyConfig
from twoaxis.study.design import overlay
from twoaxis.testing import depth_checks, run_checks

from ..scripts import load_script

MOST_LINES = 35
"""Of a new mixer, blank ones aside."""


def blocks(root: Path, language: str) -> list[str]:
    page = (root / "docs" / "own_mixer.md").read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)


def test_a_new_mixer_takes_few_lines(root: Path) -> None:
    source, _ = blocks(root, "python")
    lines = [line for line in source.splitlines() if line.strip()]
    assert len(lines) <= MOST_LINES


@pytest.fixture
def example(root: Path, tmp_path: Path) -> ModuleType:
    file = tmp_path / "rezero.py"
    file.write_text("\n".join(blocks(root, "python")))
    return load_script(file)


def test_example_mixer_runs_in_a_decoder(example: ModuleType) -> None:
    block = [{"kind": "attention", "n_heads": 2}, "swiglu"]
    config = DecoderConfig.from_data({"vocab_size": 16, "d_model": 8, "n_layers": 2, "blocks": [block]})
    model = Decoder.build(config.replace(depth=example.ReZeroConfig())).double()
    weights = [parameter for _, parameter, declaration in declarations(model) if declaration.tag == "mixing"]
    assert len(weights) == config.stack.n_sublayers
    tokens = torch.randint(16, (2, 5))
    # With every update at weight zero, a logit depends on its own token only.
    logits = model(tokens)
    torch.testing.assert_close(logits[:, 1:], model(tokens[:, 1:]))
    logits.square().sum().backward()
    assert all(weight.grad is not None and weight.grad.abs().item() > 0 for weight in weights)


def test_its_package_gives_the_row(root: Path, example: ModuleType) -> None:
    package, study = (tomllib.loads(text) for text in blocks(root, "toml"))
    assert study["arms"] == {"residual": {}, "rezero": {"model": {"depth": example.ROW.kind}}}
    StudyConfig.from_data(overlay(study, {"arms": {"rezero": {"model": {"depth": "deep_delta"}}}}))
    (entry,) = package["project"]["entry-points"]["twoaxis.depth"].items()
    assert entry == (example.ROW.kind, "rezero:ROW") and package["tool"]["setuptools"]["py-modules"] == ["rezero"]
    assert isinstance(example.ROW, Row)
    quick = ("init_equivalence", "causal_along_depth", "depth_params_are_exact", "depth_flops_are_exact")
    results = run_checks([example.ROW], [check for check in depth_checks() if check.name in quick])
    assert len(results) == len(quick) and all(result.ok for result in results), results
