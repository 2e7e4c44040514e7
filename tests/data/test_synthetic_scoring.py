"""What counts in a synthetic task: the answers and nothing else, in training and validation alike."""

from pathlib import Path

import pytest
import torch

from twoaxis.core.errors import ConfigError, DataError
from twoaxis.data import CORPORA, PackedSampler, prepare, validation_batches
from twoaxis.data.batch import Batch, Packing
from twoaxis.data.prepare import PreparedData
from twoaxis.data.synthetic import SyntheticConfig
from twoaxis.data.synthetic.kinds import MqarConfig
from twoaxis.model import Decoder
from twoaxis.ops.cross_entropy import IGNORE
from twoaxis.train import TrainConfig, read_metrics, train
from twoaxis.train.token_loss import TokenLoss
from twoaxis.train.trainer import evaluate

from .synthetic_solvers import SOLVERS, answers

TASKS = [row.config for row in CORPORA if issubclass(row.config, SyntheticConfig)]


def read(task: SyntheticConfig, folder: Path, packing: Packing = "joined") -> tuple[PreparedData, list[Batch]]:
    data = prepare(task, cache=folder)
    length = task.sample_length
    batches = validation_batches(data.validation, 64, length, 10**6, packing, data.answer_cues)
    return data, batches


@pytest.mark.parametrize("packing", ["isolated", "joined"])
@pytest.mark.parametrize("config", TASKS, ids=lambda config: config.model_fields["kind"].default)
def test_exactly_the_answers_count(config: type[SyntheticConfig], packing: Packing, tmp_path: Path) -> None:
    task = config(n_train=40, n_validation=9)
    data, (validation,) = read(task, tmp_path, packing)
    sampler = PackedSampler(data.train, 8, task.sample_length, 0, packing, data.answer_cues)
    for batch in (validation, sampler.next()):
        for tokens, targets in zip(batch.tokens.tolist(), batch.targets.tolist(), strict=True):
            text = bytes(tokens).decode()
            expected = {len(before) - 1: answer for before, answer in answers(text, task)}
            counted = {at: chr(target) for at, target in enumerate(targets) if target != IGNORE}
            assert counted == expected
            assert [SOLVERS[task.source.name](text[: at + 1], task) for at in counted] == list(counted.values())


def test_other_corpora_count_everything(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a=b and c=d\n" * 50)
    data = prepare(str(tmp_path / "text.txt"), cache=tmp_path)
    assert data.answer_cues == ()
    batch = PackedSampler(data.train, 4, 16, 0, "joined", data.answer_cues).next()
    assert batch.n_targets == 64


def test_windows_must_hold_whole_samples() -> None:
    data = {"model": {"d_model": 16, "n_layers": 1}, "data": {"corpus": {"kind": "mqar"}, "seq_len": 30}}
    with pytest.raises(ConfigError, match="seq_len=30: must be a multiple of the 28 tokens of a 'mqar' sample; set it to 28"):
        TrainConfig.from_data(data)
    data["data"] = {"corpus": "mqar", "seq_len": 56}
    assert TrainConfig.from_data(data).data.corpus == MqarConfig()


def test_other_tokenizers_are_refused(tmp_path: Path) -> None:
    task = MqarConfig(n_train=50, n_validation=5)
    with pytest.raises(DataError, match=r"corpus 'mqar' with a tokenizer of \d+ tokens: must be read one character a token"):
        prepare(task, {"kind": "bpe", "vocab_size": 300}, cache=tmp_path)


def recipe(corpus: object, **changes: object) -> TrainConfig:
    model = {"d_model": 16, "n_layers": 1, "blocks": [[{"kind": "attention", "n_heads": 2}, "swiglu"]]}
    data = {"corpus": corpus, "seq_len": 28}
    shared = {"batch_size": 8, "steps": 4, "validate_every": 2, "validation_tokens": 28 * 20, "device": "cpu"}
    return TrainConfig.from_data({"model": model, "data": data, **shared, **changes})


def test_accuracy_is_the_part_of_answers_that_are_the_most_likely_token(tmp_path: Path) -> None:
    config = recipe({"kind": "mqar", "n_train": 40, "n_validation": 20})
    data, batches = read(MqarConfig(n_train=40, n_validation=20), tmp_path)
    model = Decoder.build(config.decoder(256), seed=0)
    token_loss = TokenLoss(model, config)
    validation = evaluate(token_loss.evaluate, batches, data, token_loss.hits)
    right = total = 0
    for batch in batches:
        best = model(batch.tokens).argmax(-1)
        for row, column in (batch.targets != IGNORE).nonzero().tolist():
            right += int(best[row, column] == batch.targets[row, column])
            total += 1
    assert (validation.accuracy, validation.tokens) == (right / total, total)
    perfect = evaluate(token_loss.evaluate, batches, data, lambda batch: torch.tensor(batch.n_targets))
    assert perfect.accuracy == 1.0
    assert evaluate(token_loss.evaluate, batches, data).accuracy is None


def test_a_run_records_its_accuracy(tmp_path: Path) -> None:
    result = train(recipe({"kind": "mqar", "n_train": 40, "n_validation": 20}), tmp_path / "run")
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [record.validation_accuracy is not None for record in records] == [False, True, False, True]
    assert result.validation_accuracy == records[-1].validation_accuracy
    assert result.target_tokens == 4 * 8 * 4


def test_a_run_on_text_has_no_accuracy(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a=b and c=d\n" * 200)
    result = train(recipe(str(tmp_path / "text.txt")), tmp_path / "run")
    assert result.validation_accuracy is None
    assert "accuracy" not in (tmp_path / "run" / "metrics.jsonl").read_text()
