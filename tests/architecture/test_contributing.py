"""The mixer that CONTRIBUTING.md shows works as it stands there."""

import re
from pathlib import Path
from types import ModuleType

import pytest
import torch

from twoaxis import Decoder, DecoderConfig
from twoaxis.core.parameters import declarations

from ..scripts import load_script

MOST_LINES = 35
"""Of a new mixer, blank ones aside."""


def test_a_new_mixer_takes_few_lines(root: Path) -> None:
    (source,) = re.findall(r"```python\n(.*?)```", (root / "CONTRIBUTING.md").read_text(), re.DOTALL)
    lines = [line for line in source.splitlines() if line.strip()]
    assert len(lines) <= MOST_LINES


@pytest.fixture
def example(root: Path, tmp_path: Path) -> ModuleType:
    (source,) = re.findall(r"```python\n(.*?)```", (root / "CONTRIBUTING.md").read_text(), re.DOTALL)
    file = tmp_path / "rezero.py"
    file.write_text(source)
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
