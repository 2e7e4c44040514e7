"""Exported folders: tokenizers, the commands, and what is refused."""

import json
import os
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra twoaxis[hf]")

from transformers import AutoModelForCausalLM, AutoTokenizer

from twoaxis import CheckpointError, DataError, load
from twoaxis.checkpoints.decoder_folder import DEFINITION_FILE, read_decoder
from twoaxis.cli import main
from twoaxis.data.tokenizer import ByteTokenizer
from twoaxis.interop.hugging_face import TwoAxisConfig, export_folder, to_fast_tokenizer

from ...fresh import run_fresh
from ..hf_models import assert_same, small_decoder
from ..small_tokenizer import subword

TEXTS = ["Fellow citizens, 1 < 2", "  two  spaces\n\n", "naïve 日本 \N{GRINNING FACE} Ā\0", "an <|end|> in a text", ""]


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), subword()], ids=["byte", "subword"])
def test_tokenizers_agree_on_any_text(tokenizer, tmp_path):
    to_fast_tokenizer(tokenizer, 64).save_pretrained(tmp_path)
    fast = AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert fast(text).input_ids == ids
        assert fast.decode(ids) == tokenizer.decode(ids)
    assert fast.eos_token_id == tokenizer.end_of_document and fast.model_max_length == 64


def test_a_tokenizer_of_another_kind_is_refused():
    other: Any = type("Other", (), {})
    with pytest.raises(DataError, match="tokenizer='Other': must be the byte tokenizer"):
        to_fast_tokenizer(other())


@pytest.mark.parametrize("first", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_full_disk_is_one_line_and_leaves_nothing(first, tmp_path, largest_file):
    """Catches what Python, safetensors and tokenizers, each in its own words, say of a file that the system refuses."""
    blocks = [[{"kind": "attention", "n_heads": 1}, "swiglu"]]
    decoder = small_decoder("plain", vocab_size=257, d_model=2, n_layers=1, blocks=blocks).float()
    export_folder(decoder, tmp_path / "whole", ByteTokenizer())
    size = (tmp_path / "whole" / first).stat().st_size
    message = r"folder .*out: cannot be written \(File too large\); free space there or choose another"
    with largest_file(size - 1), pytest.raises(DataError, match=message):
        export_folder(decoder, tmp_path / "new" / "out", ByteTokenizer())
    assert [path.name for path in tmp_path.iterdir()] == ["whole"]


def test_a_folder_that_an_older_version_has_exported_computes_as_it_was_trained(tmp_path):
    """Residual scalars had no options then, and added the raw embedding."""
    decoder = small_decoder("plain", depth={"kind": "residual_scalars", "embedding": "raw"}).float()
    path = export_folder(decoder, tmp_path / "out") / "config.json"
    data = json.loads(path.read_text())
    assert data["depth"]["embedding"] == "raw"
    path.write_text(json.dumps({**data, "depth": {"kind": "residual_scalars"}}))
    imported = read_decoder(tmp_path / "out").model
    assert imported.config == decoder.config
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.config.depth == data["depth"]
    tokens = torch.arange(6).unsqueeze(0)
    assert_same(loaded(tokens).logits, decoder(tokens))
    assert_same(imported(tokens), decoder(tokens))


def test_a_configuration_that_is_written_here_has_the_defaults_of_today():
    for depth in ("residual_scalars", {"kind": "residual_scalars"}):
        assert TwoAxisConfig(depth=depth).decoder_config.depth.to_data()["embedding"] == "normalised"


def test_a_folder_goes_out_and_comes_back(tmp_path):
    decoder, tokenizer = small_decoder("states", vocab_size=280).float(), subword()
    export_folder(decoder, tmp_path / "out", tokenizer)
    assert not [path for path in tmp_path.iterdir() if path.name != "out"]
    model, again = read_decoder(tmp_path / "out")
    tokens = torch.tensor([[1, 2, 3]])
    assert again is not None and again.definition == tokenizer.definition
    assert model.config == decoder.config
    assert_same(model(tokens), decoder(tokens))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").generation_config.eos_token_id == tokenizer.end_of_document
    (tmp_path / "out" / DEFINITION_FILE).unlink()
    fallback = read_decoder(tmp_path / "out").tokenizer
    assert fallback is not None and fallback.encode(TEXTS[3]) == tokenizer.encode(TEXTS[3])
    assert fallback.end_of_document == tokenizer.end_of_document


def test_a_model_may_go_without_a_tokenizer(tmp_path):
    assert read_decoder(export_folder(small_decoder("plain"), tmp_path / "out")).tokenizer is None


def test_a_tokenizer_may_be_elsewhere(tmp_path, capsys):
    """Catches folders that Trainer has saved without a tokenizer, which could not come back."""
    decoder, tokenizer = small_decoder("streams", vocab_size=280).float(), subword()
    alone, whole = (export_folder(decoder, tmp_path / name, text) for name, text in (("alone", None), ("whole", tokenizer)))
    tokens = torch.arange(6).unsqueeze(0)
    loaded = load(alone)
    assert loaded.tokenizer is None
    assert_same(loaded(tokens), decoder(tokens))
    run = tmp_path / "run"
    capsys.readouterr()
    assert main(["import", str(alone), "--out", str(run)]) == 2
    assert capsys.readouterr().err == (
        f"twoaxis: {alone}: holds no tokenizer: a run must have one, to train and to generate; name it with --tokenizer "
        "FOLDER, or --tokenizer bytes; the model alone is read by twoaxis.load\n"
    )
    for source in (str(alone), str(tmp_path / "nowhere")):
        assert main(["import", str(alone), "--tokenizer", source, "--out", str(run)]) == 2
        assert f"--tokenizer={source!r}: must be a folder with {DEFINITION_FILE}" in capsys.readouterr().err
    assert not run.exists()
    assert main(["import", str(alone), "--tokenizer", str(whole), "--out", str(run)]) == 0
    again: Any = load(run)
    assert again.tokenizer.definition == tokenizer.definition
    assert_same(again(tokens), decoder(tokens))
    assert main(["import", str(alone), "--tokenizer", "bytes", "--out", str(tmp_path / "bytes")]) == 0
    assert isinstance(load(tmp_path / "bytes").tokenizer, ByteTokenizer)
    assert main(["generate", str(alone), "--prompt", "a"]) == 2
    assert "has no tokenizer.json: must have one to go on with; call tokenizer.save_pretrained(" in capsys.readouterr().err


def test_shards_of_fsdp_are_refused_with_what_to_do(tmp_path):
    (tmp_path / "pytorch_model_fsdp_0").mkdir()
    for read in (load, read_decoder):
        with pytest.raises(
            CheckpointError, match=r"holds pytorch_model_fsdp_0, shards of a model: must hold model\.safetensors"
        ):
            read(tmp_path)


USES_CODE = """
import sys
import torch
from transformers import AutoModelForCausalLM
assert "twoaxis" not in sys.modules
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
torch.save(model(torch.arange(6).unsqueeze(0)).logits.detach(), sys.argv[2])
"""


def test_a_program_that_does_not_know_twoaxis_trusts_a_line_of_code(tmp_path):
    decoder = small_decoder("streams").float()
    folder = export_folder(decoder, tmp_path / "out", code=True)
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    done = run_fresh(USES_CODE, str(folder), str(tmp_path / "logits.pt"), env=environment)
    assert done.returncode == 0, done.stderr
    assert_same(torch.load(tmp_path / "logits.pt"), decoder(torch.arange(6).unsqueeze(0)))


def test_what_a_folder_must_be(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read"):
        read_decoder(tmp_path / "nothing")
    folder = export_folder(small_decoder("plain"), tmp_path / "out")
    with pytest.raises(DataError, match="is not empty"):
        export_folder(small_decoder("plain"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(CheckpointError, match=r"weights and config\.json differ"):
        read_decoder(folder)
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    with pytest.raises(CheckpointError, match="model_type='llama' must be 'twoaxis'"):
        read_decoder(folder)


def test_the_commands(tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {i} of a small text that repeats itself, {i * i}.\n" for i in range(400)))
    recipe = tmp_path / "tiny.toml"
    recipe.write_text(
        f'steps = 2\nbatch_size = 2\nvalidation_tokens = 64\n[data]\ncorpus = "{text}"\nseq_len = 16\n'
        '[model]\nd_model = 16\nn_layers = 1\nmax_seq_len = 64\nblocks = [[{kind = "attention", n_heads = 2}, "swiglu"]]\n'
    )
    run, folder, back = tmp_path / "run", tmp_path / "hf", tmp_path / "back"
    assert main(["train", str(recipe), "--run", str(run)]) == 0
    assert main(["export", str(run), "--to", "hf", "--out", str(folder)]) == 0
    assert main(["import", str(folder), "--out", str(back)]) == 0
    assert main(["export", str(run), "--code", "--out", str(tmp_path / "code")]) == 0
    assert "AutoModelForCausalLM" in json.loads((tmp_path / "code" / "config.json").read_text())["auto_map"]
    capsys.readouterr()
    ask = ["--prompt", "line 1", "--max-new-tokens", "8", "--temperature", "0", "--json"]
    assert main(["generate", str(run), *ask]) == 0
    expected = json.loads(capsys.readouterr().out)["tokens"]
    assert main(["generate", str(back), *ask]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == expected
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer("line 1", return_tensors="pt")
    found = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    assert found[0, inputs.input_ids.shape[1] :].tolist() == expected
    assert sorted(os.listdir(folder)) == sorted(
        [
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json",
            DEFINITION_FILE,
        ]
    )
    assert main(["import", str(folder), "--out", str(back)]) == 2
    assert "is not empty" in capsys.readouterr().err.splitlines()[-1]
