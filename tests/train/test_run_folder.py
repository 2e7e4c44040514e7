"""A run folder stands alone, belongs to one recipe and one corpus, and is used by one process at a time."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from twoaxis import CheckpointError, ConfigError, DataError, Decoder, StudyError
from twoaxis.audit import audit_run
from twoaxis.cli import main
from twoaxis.data import prepare
from twoaxis.data.corpus import Corpus, TextConfig
from twoaxis.data.tokenizer import ByteTokenizer, load_tokenizer
from twoaxis.data.tokenizer.subword import train_bpe
from twoaxis.study import read_study
from twoaxis.train import (
    Progress,
    Result,
    RunFolder,
    StepRecord,
    TrainConfig,
    load_trained,
    read_metrics,
    read_recipe,
    save_trained,
    train,
    train_recipe,
)
from twoaxis.train.environment import changed_environment
from twoaxis.train.metrics import MetricsLog, summarise
from twoaxis.train.training_state import parameters_sha256

from ..interop.small_tokenizer import subword

Recipe = Callable[..., TrainConfig]


class Notes(Progress):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)


def test_the_folder_holds_everything(recipe: Recipe, tmp_path: Path, corpus: Path) -> None:
    notes = Notes()
    result = train(recipe(steps=6), tmp_path / "run", progress=notes)
    folder = RunFolder(tmp_path / "run")
    assert folder.config == recipe(steps=6)
    assert folder.result == result == Result.from_data(json.loads((tmp_path / "run" / "result.json").read_text()))
    assert folder.tokenizer.encode("ab") == [97, 98]
    data = folder.read("data")
    assert data["corpus"]["name"] == "corpus.txt" and len(data["corpus"]["sha256"]) == 64
    assert data["tokenizer"]["vocab_size"] == 256
    environment = folder.read("env")
    assert environment["versions"]["torch"] == torch.__version__ and environment["threads"] == 1
    assert environment["device"] == "cpu" and environment["precision"] == "float32"

    records = read_metrics(folder.metrics)
    assert [record.step for record in records] == [1, 2, 3, 4, 5, 6]
    assert [record.step for record in records if record.validation_loss is not None] == [5, 6]
    assert result.status == "finished" and result.steps == 6 and result.tokens == 6 * 4 * 12
    assert result.validation_loss == records[-1].validation_loss and result.bpb == records[-1].bpb
    assert result.best_validation_loss == min(records[4].validation_loss or 9, records[5].validation_loss or 9)
    # Bytes are the tokens, so the only difference between the two losses is the unit.
    assert result.bpb == pytest.approx((result.validation_loss or 0) / 0.6931471805599453)
    assert result.parameters == sum(parameter.numel() for parameter in Decoder(folder.config.decoder(256)).parameters())
    assert result.training_flops_per_token == 3 * result.forward_flops_per_token > 6 * 16 * 256
    assert result.peak_memory_bytes > 1e6 and result.peak_device_memory_bytes == 0
    text = "\n".join(notes.lines)
    assert "weight decay" in text and "embedding, matrix" in text and "device cpu, float32, 1 threads, compile off" in text


def test_arms_with_one_seed_share_initial_values_by_name(recipe: Recipe, tmp_path: Path) -> None:
    sublayers = [[{"kind": "attention", "n_heads": 2}, "swiglu"]]
    model = {"d_model": 16, "n_layers": 2, "blocks": sublayers}
    initial = {}
    for name, depth, seed in [("control", "residual", 1), ("arm", "deep_delta", 1), ("other", "residual", 2)]:
        train(recipe(steps=1, seed=seed, model={**model, "depth": depth}), tmp_path / name)
        initial[name] = RunFolder(tmp_path / name).read("initial_parameters")
    assert initial["control"].items() < initial["arm"].items()
    changed = [key for key, value in initial["control"].items() if initial["other"][key] != value]
    assert "embedding.weight" in changed


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 1}, "seed=0 there, 1 in this recipe"),
        ({"schedule": "wsd"}, "schedule.kind='cosine' there, 'wsd' in this recipe"),
        (
            {"model": {"d_model": 8, "n_layers": 2, "blocks": [[{"kind": "attention", "n_heads": 2}, "swiglu"]]}},
            "model.d_model=16",
        ),
        ({"model": {"d_model": 16, "n_layers": 2, "blocks": [["attention", "swiglu"]]}}, "model.blocks.0.0.n_heads=2 there, 4"),
    ],
)
def test_another_recipe_is_refused_by_key(changes: dict[str, Any], message: str, recipe: Recipe, tmp_path: Path) -> None:
    train(recipe(steps=2), tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(CheckpointError, match=message) as caught:
        train(recipe(steps=2, **changes), tmp_path / "run")
    assert "must be equal to resume; use the recipe of the folder, or start in a new folder" in str(caught.value)
    assert before == {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}


def test_a_key_that_came_after_the_run_has_its_default(recipe: Recipe, tmp_path: Path) -> None:
    short, whole = tmp_path / "short", tmp_path / "whole"
    train(recipe(), short, should_stop=iter([False] * 7 + [True] * 9).__next__)
    path = short / "config.json"
    data = json.loads(path.read_text())
    del data["model"]["blocks"][0][0]["rope_scaling"], data["recompute"]
    path.write_text(json.dumps(data))
    train(read_recipe(path), short)
    train(recipe(), whole)
    assert [r.loss for r in read_metrics(short / "metrics.jsonl")] == [r.loss for r in read_metrics(whole / "metrics.jsonl")]
    # And is another than the default of the recipe only where it says so.
    with pytest.raises(CheckpointError, match="recompute='off' there, 'block' in this recipe"):
        train(recipe(recompute="block"), short)


def test_a_tokenizer_of_the_users_own_stays_theirs(
    recipe: Recipe, tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run records its tokenizer under a name that the file of the user may have too."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tokenizer.json").write_text(train_bpe(Corpus.open(TextConfig(path=corpus)), 300))
    config = recipe(data={"corpus": str(corpus), "seq_len": 12, "tokenizer": "tokenizer.json"})
    train(config, tmp_path / "run", should_stop=iter([False] * 3 + [True] * 9).__next__)
    assert train(config, tmp_path / "run").status == "finished"
    assert audit_run(tmp_path / "run", tokens=24).step == 20


def test_a_changed_corpus_is_refused_by_both_names(recipe: Recipe, tmp_path: Path, corpus: Path) -> None:
    train(recipe(), tmp_path / "run", should_stop=lambda: True)
    corpus.write_text(corpus.read_text() + " more")
    with pytest.raises(CheckpointError, match=r"corpus: 'corpus.txt' \(\w{12}\) in run folder .*, 'corpus.txt' \(\w{12}\) now"):
        train(recipe(), tmp_path / "run")


def test_a_changed_tokenizer_is_refused(recipe: Recipe, tmp_path: Path) -> None:
    train(recipe(), tmp_path / "run", should_stop=lambda: True)
    data = json.loads((tmp_path / "run" / "data.json").read_text())
    data["tokenizer"]["fingerprint"] = "0" * 64
    (tmp_path / "run" / "data.json").write_text(json.dumps(data))
    with pytest.raises(
        CheckpointError, match=r"tokenizer: 256 tokens \(000000000000\) in run folder .*, 256 tokens \(\w{12}\) now"
    ):
        train(recipe(), tmp_path / "run")


def test_a_recipe_that_cannot_start_leaves_the_folder_free(recipe: Recipe, tmp_path: Path) -> None:
    bad = {"corpus": str(tmp_path / "missing.txt"), "seq_len": 12}
    with pytest.raises(DataError, match="path"):
        train(recipe(data=bad), tmp_path / "run")
    assert train(recipe(steps=1), tmp_path / "run").status == "finished"


def test_a_corpus_shorter_than_a_window_is_refused(recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("only a few words")
    with pytest.raises(DataError, match=r"must have at least seq_len \+ 1 = 13"):
        train(recipe(data={"corpus": str(tmp_path / "short.txt"), "seq_len": 12}), tmp_path / "run")


def test_one_process_at_a_time(recipe: Recipe, tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run").locked(), pytest.raises(CheckpointError, match="another process trains in it"):
        train(recipe(), tmp_path / "run")
    assert train(recipe(steps=1), tmp_path / "run").status == "finished"


def test_a_damaged_config_is_one_line(recipe: Recipe, tmp_path: Path) -> None:
    train(recipe(steps=1), tmp_path / "run")
    (tmp_path / "run" / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config.json: cannot be read \(Expecting property name"):
        train(recipe(steps=1), tmp_path / "run")


def test_metrics_behind_the_checkpoint_are_refused(recipe: Recipe, tmp_path: Path) -> None:
    train(recipe(), tmp_path / "run", should_stop=lambda: len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == 7)
    os.truncate(tmp_path / "run" / "metrics.jsonl", 100)
    with pytest.raises(CheckpointError, match=r"ends at step 0; must reach step 7 of the checkpoint; restore the file"):
        train(recipe(), tmp_path / "run")


def test_metrics_are_cut_at_the_checkpoint_and_a_torn_line_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, 0)
    records = [StepRecord(step, step / 3, float("nan"), 0.1, 5, 0.5, bpb=1 / step) for step in range(1, 6)]
    for record in records:
        log.append(record)
    log.close()
    with open(path, "ab") as file:
        file.write(b'{"step": 6, "loss": 1.0, "grad')
    assert [record.loss for record in read_metrics(path)] == [record.loss for record in records]
    assert b"NaN" not in path.read_bytes()
    log = MetricsLog(path, 3)
    log.append(records[3])
    log.close()
    assert [record.step for record in read_metrics(path)] == [1, 2, 3, 4]
    assert path.read_bytes().count(b"\n") == 4


def test_speed_is_the_median_after_the_first_steps() -> None:
    seconds = [9.0, 9.0, *[1.0] * 10, *[3.0] * 8]
    records = [StepRecord(step + 1, 1.0, 1.0, 0.1, 7, value) for step, value in enumerate(seconds)]
    summary = summarise(records, tokens_per_step=10)
    assert summary["step_seconds"] == 1.0 and summary["tokens_per_second"] == 10.0
    assert summary["train_seconds"] == sum(seconds) and summary["target_tokens"] == 7 * 20


def test_a_changed_environment_is_told() -> None:
    before = {"versions": {"torch": "1", "twoaxis": "0"}, "threads": 2, "device": "cpu", "git_commit": None}
    now = {"versions": {"torch": "2", "twoaxis": "0"}, "threads": 4, "device": "cpu", "git_commit": None}
    filler = {"device_name": "", "precision": "float32", "platform": "x"}
    assert changed_environment({**before, **filler}, {**now, **filler}) == ["threads 2 -> 4", "torch version 1 -> 2"]


def test_a_recipe_is_read_from_toml_and_from_the_folder(recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text('steps = 5\nschedule = "wsd"\n[model]\nd_model = 16\nn_layers = 1\n')
    config = read_recipe(tmp_path / "r.toml", ["model.depth.kind=deep_delta", "schedule.decay_fraction=0.5", "batch_size=3"])
    assert config.model["depth"]["kind"] == "deep_delta" and config.batch_size == 3 and config.steps == 5
    assert config.schedule.to_data() == {"kind": "wsd", "warmup_steps": None, "min_ratio": 0.0, "decay_fraction": 0.5}
    train(recipe(steps=1), tmp_path / "run")
    assert read_recipe(tmp_path / "run" / "config.json") == recipe(steps=1)
    assert TrainConfig.from_data(json.loads(json.dumps(config.to_data()))) == config
    with pytest.raises(ConfigError, match=r"recipe .*nowhere.toml: cannot be read \(No such file"):
        read_recipe(tmp_path / "nowhere.toml")
    (tmp_path / "bad.toml").write_text("steps = ")
    with pytest.raises(ConfigError, match=r"bad.toml: is not toml \(Invalid value"):
        read_recipe(tmp_path / "bad.toml")


def test_recipes_and_studies_are_not_taken_for_each_other(tmp_path: Path) -> None:
    """Catches messages about the keys that are missing, of which none is meant."""
    (tmp_path / "r.toml").write_text("[model]\nd_model = 16\n")
    (tmp_path / "s.toml").write_text('[arms.a]\nmodel.depth = "residual"\n')
    with pytest.raises(ConfigError, match=r"s.toml is a study: must be a recipe; run it with `twoaxis study .*s.toml`$"):
        read_recipe(tmp_path / "s.toml")
    with pytest.raises(StudyError, match=r"r.toml is a recipe: must be a study; run it with `twoaxis train .*r.toml`, or make"):
        read_study(tmp_path / "r.toml")


@pytest.mark.parametrize("name", ["config", "result"])
def test_a_file_that_is_no_recipe_or_result_is_named(recipe: Recipe, tmp_path: Path, name: str) -> None:
    train(recipe(steps=1), tmp_path / "run")
    (tmp_path / "run" / f"{name}.json").write_text("{}")
    with pytest.raises(CheckpointError, match=rf"{name}\.json: cannot be read \(\w+ is missing in the \w+"):
        getattr(RunFolder(tmp_path / "run"), name)


def test_a_run_that_begins_with_a_model_records_its_values(recipe: Recipe, tmp_path: Path) -> None:
    train(recipe(steps=1), tmp_path / "run")
    old, data = load_trained(tmp_path / "run"), recipe().to_data()
    save_trained(tmp_path / "new", old.model, old.tokenizer, {"steps": 1, "data": {"corpus": data["data"]["corpus"]}})
    folder = RunFolder(tmp_path / "new")
    train(folder.config, folder.path, should_stop=lambda: True)
    assert folder.read("initial_parameters") == parameters_sha256(old.model)


def test_the_recipe_of_a_run_folder_is_trained_there(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a new model that is trained in `runs/config` in place of the imported one."""
    settings = recipe(steps=1)
    model = Decoder.build(settings.decoder(256))
    kept = {key: value for key, value in settings.to_data().items() if key not in ("model", "data")}
    corpus = {"corpus": settings.to_data()["data"]["corpus"], "seq_len": 12}
    monkeypatch.chdir(tmp_path)
    save_trained("new", model, ByteTokenizer(), {**kept, "data": corpus})
    assert main(["train", "new/config.json"]) == 0
    assert RunFolder("new").result == train_recipe("new/config.json").result and not Path("runs").exists()
    assert train_recipe(Path("new/config.json")).folder == Path("new")


def test_weights_of_a_run_are_not_left_behind_without_a_word(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a new model that is trained in place of the imported one, because another folder is named."""
    settings = recipe(steps=1)
    kept = {key: value for key, value in settings.to_data().items() if key not in ("model", "data")}
    corpus = {"corpus": settings.to_data()["data"]["corpus"], "seq_len": 12}
    monkeypatch.chdir(tmp_path)
    save_trained("new", Decoder.build(settings.decoder(256)), ByteTokenizer(), {**kept, "data": corpus})
    refused = "run folder='other': must be 'new', since the recipe there does not hold its weights; train there, or copy"
    with pytest.raises(ConfigError, match=f"^{refused}"):
        train_recipe("new/config.json", "other")
    assert main(["train", "new/config.json", "--run", "other"]) == 2
    said = capsys.readouterr().err
    assert refused in said and said.count("\n") == 1 and not Path("other").exists()
    new = "new weights are trained, by the recipe of new; train in that folder to go on with those of that run"
    for folder, notes in (("new", 0), ("other", 1), ("other", 0)):
        assert main(["train", "new/config.json", "--run", folder]) == 0
        assert capsys.readouterr().err.count(new) == notes


@pytest.mark.parametrize(("kind", "verb", "mixer"), [("twoaxis", "import", ""), ("llama", "retrofit", " --depth MIXER")])
def test_the_configuration_of_a_model_is_no_recipe(tmp_path: Path, kind: str, verb: str, mixer: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": kind, "hidden_size": 8}))
    remedy = (
        f"`twoaxis {verb} {tmp_path}{mixer} --out RUN` makes a run of it, which `twoaxis train RUN/config.json` goes on with"
    )
    with pytest.raises(ConfigError) as caught:
        read_recipe(path)
    assert str(caught.value) == f"{path} is the configuration of a model: must be a recipe; {remedy}"


def test_a_run_from_before_begin_markers_is_trained_on_without_them(recipe: Recipe, tmp_path: Path) -> None:
    """Catches training with a begin marker, and generation without it."""
    recorded = json.loads(subword("<s>").definition)
    assert recorded.pop("begin_of_document") == [1]
    old, data = load_tokenizer(json.dumps(recorded)), {"corpus": recipe().to_data()["data"]["corpus"]}
    save_trained(tmp_path / "new", Decoder.build(recipe().decoder(280)), old, {"data": data})
    trained = RunFolder(tmp_path / "new").config.data
    tokenizer = prepare(trained.corpus, trained.tokenizer.in_run_folder(tmp_path / "new")).tokenizer
    assert tokenizer.begin_of_document == load_trained(tmp_path / "new").tokenizer.begin_of_document == ()
    assert tokenizer.encode("of the House") == old.encode("of the House")
