"""The names of `import twoaxis`, and that the import changes nothing outside itself."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import twoaxis
from twoaxis import CheckpointError, ConfigError, DataError, Decoder, DecoderConfig, Sampling
from twoaxis.data.tokenizer import ByteTokenizer
from twoaxis.train import TrainConfig

from .fresh import run_fresh

RECIPE: dict[str, Any] = {
    "model": {"d_model": 8, "n_layers": 1, "max_seq_len": 8},
    "data": {
        "corpus": {"kind": "early_feature", "n_entries": 1, "n_queries": 1, "n_train": 200, "n_validation": 20},
        "tokenizer": "byte",
        "seq_len": 5,
        "packing": "joined",
    },
    "batch_size": 4,
    "steps": 2,
    "validation_tokens": 50,
    "device": "cpu",
}

UNCHANGED = """
import json, logging, os, sys, warnings
import torch, numpy, pydantic, jaxtyping, safetensors

NAMES = {name for name, one in logging.root.manager.loggerDict.items() if isinstance(one, logging.Logger)}

def world():
    loggers = {name: logging.getLogger(name).level for name in sorted(NAMES)}
    return repr((sys.meta_path, sys.path_hooks, sys.excepthook, torch.get_default_dtype(), torch.get_default_device(),
        torch.get_num_threads(), torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic,
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32, sys.path, warnings.filters, logging.root.level,
        logging.root.handlers, loggers, dict(os.environ), torch.random.get_rng_state().sum()))

before = world()
import twoaxis
assert world() == before
print(json.dumps(sorted(name for name in sys.modules if name.split(".")[0] in ("transformers", "tokenizers", "twoaxis"))))
twoaxis.Decoder.build({"vocab_size": 8, "d_model": 8, "n_layers": 1})
assert "torch._dynamo" not in sys.modules, "a compiler takes as long to load as everything else"
"""


def fresh(code: str) -> str:
    done = run_fresh(code)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_changes_nothing_outside_and_loads_nothing_heavy() -> None:
    loaded = json.loads(fresh(UNCHANGED))
    assert not {name for name in loaded if name.split(".")[0] != "twoaxis"}
    assert not {"twoaxis.train", "twoaxis.study", "twoaxis.api", "twoaxis.interop", "twoaxis.hf"} & set(loaded)


def test_subpackages_can_be_called_and_are_modules() -> None:
    code = (
        "import twoaxis, types\nfirst = twoaxis.train\nimport twoaxis.train, twoaxis.study\nfrom twoaxis import train, study\n"
        "from twoaxis.train import TrainConfig, train as function\nimport importlib\n"
        "assert first is twoaxis.train is train is importlib.import_module('twoaxis.train')\n"
        "assert isinstance(train, types.ModuleType) and callable(train) and callable(study)\n"
        "assert train.TrainConfig is TrainConfig\n"
        "import pickle\nassert pickle.loads(pickle.dumps(function)) is function\n"
        "assert {'load', 'retrofit', 'study', 'train'} < set(dir(twoaxis)) and not hasattr(twoaxis, 'trian')"
    )
    fresh(code)


@pytest.fixture
def model() -> Decoder:
    sizes = {"vocab_size": 256, "d_model": 16, "n_layers": 2, "depth": "deep_cross_attention", "tie_embeddings": False}
    built = Decoder.build(sizes, seed=1)
    built.tokenizer = ByteTokenizer()
    return built


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("save", ["save", "save_pretrained"])
def test_a_saved_model_is_loaded_with_its_tokenizer(save: str, tie: bool, model: Decoder, tmp_path: Path) -> None:
    if save == "save_pretrained":
        pytest.importorskip("transformers", reason="needs the extra twoaxis[hf]")
    built = Decoder.build(model.config.replace(tie_embeddings=tie))
    built.tokenizer = model.tokenizer
    folder = getattr(built, save)(tmp_path / "model")
    for loaded in (twoaxis.load(folder), Decoder.from_pretrained(str(folder))):
        assert loaded.config == built.config and not loaded.training
        states = loaded.state_dict(), built.state_dict()
        assert states[0].keys() == states[1].keys() and all(torch.equal(states[0][name], states[1][name]) for name in states[0])
        assert loaded.generate("We", 5) == built.generate("We", 5)


@pytest.mark.parametrize("tie", [True, False])
def test_transformers_reads_a_saved_model(tie: bool, model: Decoder, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs the extra twoaxis[hf]")
    from twoaxis.hf import from_hugging_face

    built = Decoder.build(model.config.replace(tie_embeddings=tie)).bfloat16()
    built.save(tmp_path / "model")
    from transformers import AutoModelForCausalLM

    read: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto")
    states = from_hugging_face(read).state_dict(), built.state_dict()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[1])
    assert twoaxis.load(tmp_path / "model").embedding.weight.dtype == torch.float32


def test_what_cannot_be_loaded_or_saved_is_said_in_one_line(model: Decoder, tmp_path: Path) -> None:
    model.save(tmp_path / "model")
    with pytest.raises(twoaxis.DataError, match="new or empty"):
        model.save(tmp_path / "model")
    with pytest.raises(ConfigError, match="step"):
        twoaxis.load(tmp_path / "model", step=3)
    config = tmp_path / "model" / "config.json"
    config.write_text(config.read_text().replace('"num_hidden_layers": 2', '"num_hidden_layers": 3'))
    with pytest.raises(CheckpointError, match=r"weights and config\.json differ .* missing"):
        twoaxis.load(tmp_path / "model")
    with pytest.raises(CheckpointError, match="cannot be read"):
        twoaxis.load(tmp_path / "nothing")
    other: Any = model
    other.tokenizer = "a tokenizer"
    with pytest.raises(ConfigError, match=r"^model.tokenizer='str': must be a Tokenizer"):
        model.save(tmp_path / "other")


def test_generate_answers_in_the_form_of_the_prompts(model: Decoder) -> None:
    tokens = twoaxis.generate(model, [[87, 101]], 6)[0]
    assert model.generate([87, 101], 6) == tokens
    assert model.generate([[87, 101], [3]], 6)[0] == tokens and model.generate(torch.tensor([[87, 101]]), 6) == [tokens]
    assert model.generate("We", 6) == ByteTokenizer().decode(tokens) and model.generate(["We"], 6) == [model.generate("We", 6)]
    sampling = Sampling(temperature=1.0, top_k=5, seed=3)
    assert model.generate([1], 6, sampling=sampling) == model.generate([1], 6, temperature=1.0, top_k=5, seed=3)
    model.end_tokens = frozenset({tokens[2]})
    assert model.generate([87, 101], 6) == tokens[: tokens.index(tokens[2])]
    assert copy.deepcopy(model).generate("We", 2) == model.generate("We", 2)


def test_generate_says_what_it_lacks(model: Decoder) -> None:
    model.tokenizer = None
    with pytest.raises(ConfigError, match=r"^prompts='We': must be token ids, since the model has no tokenizer"):
        model.generate("We")
    with pytest.raises(ConfigError, match=r"^generate: unknown keyword 'topk'; did you mean 'top_k'\?$"):
        model.generate([1], topk=5)


def test_train_takes_data_a_configuration_or_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = twoaxis.train(RECIPE)
    assert run.result.status == "finished" and run.folder.parent == Path("runs") and run.folder.name.startswith("train-")
    assert twoaxis.train(TrainConfig.from_data(RECIPE)).folder == run.folder
    assert run.model.generate("a", 2) == twoaxis.load(run.folder).generate("a", 2)
    (tmp_path / "tiny.json").write_text(json.dumps(RECIPE))
    longer = twoaxis.train("tiny.json", overrides=["steps=3"])
    assert longer.folder == Path("runs/tiny") and longer.result.steps == 3
    assert twoaxis.train(RECIPE, tmp_path / "named", ["steps=1"]).result.steps == 1
    (tmp_path / "named" / "checkpoints").rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"^run folder .*named: has no checkpoint yet; must have one; train for longer$"):
        twoaxis.load(tmp_path / "named")


def test_retrofit_keeps_what_a_model_computes(model: Decoder, tmp_path: Path) -> None:
    plain = Decoder.build(DecoderConfig(vocab_size=256, d_model=16, n_layers=2))
    plain.tokenizer, tokens = model.tokenizer, torch.tensor([[1, 2, 3]])
    plain.save(tmp_path / "plain")
    new = twoaxis.retrofit(tmp_path / "plain", depth="attention_residuals", sequence=["short_swa"])
    torch.testing.assert_close(new(tokens), plain(tokens), rtol=1e-4, atol=1e-4)
    assert new.config.depth.kind == "attention_residuals" and new.generate("We", 3) == plain.generate("We", 3)
    with pytest.raises(ConfigError, match=r"^nothing to add; name a mixer with depth or sequence"):
        twoaxis.retrofit(plain)
    with pytest.raises(ConfigError, match=r"^difference of logits=.*: must be at most bound=-1"):
        twoaxis.retrofit(plain, depth="attention_residuals", bound=-1.0)


def test_a_mixer_refuses_arguments_it_has_no_use_for() -> None:
    mixer, x = twoaxis.ShortSWA(d_model=8, n_heads=2), torch.zeros(1, 3, 8)
    untyped: Any = twoaxis.DeepDelta
    for wrong in (lambda: mixer(x, layouts=None), lambda: mixer(x, None, None, 7), lambda: mixer(x, None, mask=x)):
        with pytest.raises(ConfigError, match=r"^ShortSWA: arguments=.+ must be context, layout, cache; leave others out$"):
            wrong()
    # As a shortcut is called.
    with pytest.raises(ConfigError, match=r"^ShortSWA: layout='Tensor': must be a TokenLayout; leave it out where"):
        mixer(x, x)
    with pytest.raises(ConfigError, match="d_model is given twice"):
        untyped(None, 64, d_model=32)
    with pytest.raises(ConfigError, match=r"norm_eps=inf: must be a finite number"):
        twoaxis.DeepDelta(d_model=8, norm_eps=float("inf"))


def test_saving_keeps_what_a_published_model_brought(tmp_path: Path) -> None:
    model = Decoder.build({"vocab_size": 256, "d_model": 8, "n_layers": 1})
    model.tokenizer, model.end_tokens = ByteTokenizer(), frozenset({3, 5})
    model.source_files = {"chat_template.jinja": b"{{ messages }}"}
    model.save(tmp_path / "one")
    again = twoaxis.load(tmp_path / "one")
    assert again.end_tokens >= {3, 5} and again.source_files["chat_template.jinja"] == b"{{ messages }}"
    modes = {(tmp_path / "one" / name).stat().st_mode for name in ("config.json", "model.safetensors")}
    assert len(modes) == 1, "weights are readable by whom the configuration is"


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([1, 2.5], "token id=2.5: must be a whole number in 0..7; use the model's own tokenizer"),
        ([[1.5]], "token id=1.5: must be a whole number in 0..7"),
        ([[1], 2], "token ids=2: must be a list of whole numbers"),
        (np.array([1.0]), "token id=1.0: must be a whole number"),
        ([2**70], f"token id={2**70}: must be in 0..7"),
        (["a", [1]], "prompts: must be"),
        (None, "prompts: must be"),
        (7, "prompts: must be"),
    ],
    ids=str,
)
def test_prompts_that_are_none_are_refused_in_one_line(prompts: Any, message: str) -> None:
    model = Decoder.build({"vocab_size": 8, "d_model": 8, "n_layers": 1})
    with pytest.raises(DataError, match=f"^{re.escape(message)}"):
        model.generate(prompts, 2)
    assert len(model.generate(np.array([1, 2]), 2, stop_token=[7])) <= 2


@pytest.mark.parametrize("none", [[], set(), (), None])
def test_no_stop_token_replaces_those_of_the_model(none: Any) -> None:
    model = Decoder.build({"vocab_size": 8, "d_model": 8, "n_layers": 1})
    model.end_tokens = frozenset(range(8))
    assert len(model.generate([1, 2], 3, stop_token=none)) == 3


def test_only_float32_on_the_cpu_is_retrofitted() -> None:
    model = Decoder.build({"vocab_size": 8, "d_model": 8, "n_layers": 1})
    with pytest.raises(ConfigError, match=r"^model='torch.bfloat16 on cpu'"):
        twoaxis.retrofit(model.bfloat16(), sequence="canon")
