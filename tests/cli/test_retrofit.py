"""`twoaxis retrofit`: what it measures, refuses and writes, and what training makes of it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from twoaxis.cli import main
from twoaxis.train import RunFolder, load_trained

from ..checkpoints.hf_folder import write_folder


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    write_folder(folder)
    (folder / "text.txt").write_text("".join(f"line {i} of a small text that repeats itself, {i * i}.\n" for i in range(200)))
    return folder


def _recipe(source: Path) -> list[str]:
    data = [f"data.corpus={source / 'text.txt'}", "data.seq_len=16"]
    return [
        *data,
        "steps=4",
        "batch_size=2",
        "validate_every=4",
        "validation_tokens=64",
        "checkpoint_every=2",
        "optimizer.lr=1e-3",
    ]


def _retrofit(source: Path, out: Path, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    text = ["--text", str(source / "text.txt"), "--tokens", "100"]
    status = main(["retrofit", str(source), *_recipe(source), "--out", str(out), *text, "--json", *words])
    said = capsys.readouterr()
    report = json.loads(said.out)
    # Without a choice, a note states the cost of the schedule.
    assert ("anneal=[] to learn the blend" in said.err) == ((report["blend"] or "").startswith("from 0 to 1"))
    return status, report


def test_a_retrofit_computes_the_same_and_trains_on(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    words = ("--depth", "attention_residuals", "--sequence", "{kind='short_swa', window=4}")
    status, report = _retrofit(source, out, capsys, *words)
    assert (status, report["start"], report["run"]) == (0, "exact", str(out))
    assert report["largest_logit_difference"] < 1e-4
    assert report["same_next_token"] == 1
    assert main(["generate", str(out), "--prompt", "line", "--max-new-tokens", "3", "--temperature", "0"]) == 0
    assert main(["train", str(out / "config.json"), "--run", str(out)]) == 0
    result = RunFolder(out).result
    assert result is not None and result.status == "finished"
    assert load_trained(out).step == 4


def test_a_run_is_a_source_too(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _retrofit(source, tmp_path / "first", capsys, "--sequence", "short_swa")
    words = ["--out", str(tmp_path / "second"), "--tokens", "50", "--json"]
    assert main(["retrofit", str(tmp_path / "first"), "--depth", "denseformer", *words]) == 0
    assert json.loads(capsys.readouterr().out)["new_parameters"] == 9
    kinds = [sublayer.kind for sublayer in load_trained(tmp_path / "second").model.config.blocks[0]]
    assert kinds == ["short_swa", "attention", "swiglu"]


def test_a_blend_moves_by_the_recipe(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    status, report = _retrofit(source, out, capsys, "--depth", "deep_delta")
    assert (status, report["start"]) == (0, "blended")
    assert report["reason"].startswith("it overwrites along the update's direction")
    assert report["blend"] == "from 0 to 1 over 2 steps"
    assert main(["train", str(out / "config.json"), "--run", str(out)]) == 0
    blends = {p.item() for name, p in load_trained(out).model.named_parameters() if name.endswith(".blend")}
    assert blends == {1.0}


def test_the_caller_may_blend_more_slowly(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert _retrofit(source, out, capsys, "--depth", "deep_delta", "anneal=[{pattern='*.blend', steps=8}]")[0] == 0
    (anneal,) = RunFolder(out).config.anneal
    assert anneal.steps == 8


def test_a_frozen_base_stays(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    _retrofit(source, out, capsys, "--depth", "denseformer", "--freeze-base")
    before = dict(load_trained(out).model.named_parameters())
    assert main(["train", str(out / "config.json"), "--run", str(out)]) == 0
    after = dict(load_trained(out).model.named_parameters())
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {f"blocks.{layer}.swiglu.depth.weights" for layer in range(3)}


def test_a_learned_blend_is_new_and_trained(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    words = ("--depth", "deep_delta", "--freeze-base", "--new-lr-scale", "2", "anneal=[]")
    status, report = _retrofit(source, out, capsys, *words)
    assert (status, report["blend"]) == (0, "learned from 0")
    scales = {group.pattern: group.lr_scale for group in RunFolder(out).config.optimizer.groups}
    assert {pattern: scale for pattern, scale in scales.items() if "blend" in pattern} == {
        "blocks.*.attention.depth.blend": 2.0,
        "blocks.*.swiglu.depth.blend": 2.0,
    }
    assert main(["train", str(out / "config.json"), "--run", str(out)]) == 0
    assert all(p.item() for name, p in load_trained(out).model.named_parameters() if name.endswith(".blend"))


def test_weights_that_are_no_numbers_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "broken"
    write_folder(broken)
    tensors = load_file(broken / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, broken / "model.safetensors")
    for words in ((), ("--allow-difference",)):
        assert main(["retrofit", str(broken), "--depth", "denseformer", "--out", str(tmp_path / "run"), *words]) == 2
        assert "logits of the model to begin with: must be finite numbers" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_places_hold_for_every_block(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mixed, out = tmp_path / "mixed", tmp_path / "run"
    write_folder(mixed, model_type="qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=1)
    assert main(["retrofit", str(mixed), "--sequence", "{kind='canon', places='A'}", "--out", str(out)]) == 0
    assert "on 1,024 tokens" in capsys.readouterr().err, "as many as `--help` says"
    blocks: Any = load_trained(out).model.config.layers
    assert [block[0].window for block in blocks] == [None, 4, 4]
    assert all(block[0].input_local and not block[0].projected_local and not block[1].input_local for block in blocks)


def test_a_difference_above_the_bound_writes_nothing(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    words = ("--depth", "laurel_gemma3n")
    status, report = _retrofit(source, out, capsys, *words)
    assert (status, report["run"], report["start"]) == (1, None, "none")
    assert report["largest_logit_difference"] > 0.1
    assert not out.exists()
    status, report = _retrofit(source, out, capsys, *words, "--allow-difference")
    assert (status, report["run"]) == (0, str(out))


def test_bad_input_is_one_line(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path / "run")]
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for words, message in (
        (["retrofit", str(source), *out], "nothing to add"),
        (["retrofit", str(tmp_path / "none"), "--depth", "mhc", *out], "config.json: cannot be read"),
        (["retrofit", str(source), "--depth", "mhd", *out], "did you mean 'mhc'?"),
        (["retrofit", str(source), "--depth", "mhc", "--text", str(tmp_path / "none"), *out], "name a text in UTF-8"),
        (["retrofit", str(source), "--depth", "denseformer", "--out", str(tmp_path / "full")], "is not empty"),
        (["retrofit", str(source), "steps=none", "--depth", "denseformer", *out], "steps='none'"),
        (["retrofit", str(source), "data=sotu", "--depth", "denseformer", *out], "data='sotu': must be"),
        (["retrofit", str(source), "model.norm_eps=0.5", "--depth", "denseformer", *out], "model: must be left out"),
        (["retrofit", str(source), "data.tokenizer=bpe", "--depth", "denseformer", *out], "data.tokenizer: must be left out"),
        (["retrofit", str(source), "--depth", "residual", "--freeze-base", *out], "nothing is left to train"),
        (["retrofit", str(source), "--sequence", "{kind='canon', places=3}", *out], "places=3: must be letters of ABCD"),
        (["retrofit", str(source), "--sequence", "{kind='canon', places=''}", *out], "places='': must be letters of ABCD"),
    ):
        assert main(words) == 2
        captured = capsys.readouterr()
        assert message in captured.err
        assert len(captured.err.strip().splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["full"]
