"""Every file that is read, cut short, with flipped bits and replaced by others: one line or the right value, and no trace.

What keeps a checksum has to notice all of them; elsewhere a flipped bit may be another right value.
"""

import io
import json
import pickle
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import normalizers

from twoaxis.audit.run import read_audit
from twoaxis.checkpoints.published_folder import (
    chat_template,
    end_of_document,
    generation_defaults,
    read_pretrained,
    read_source_files,
    read_tensors,
    read_tokenizer,
)
from twoaxis.cli import main
from twoaxis.core.errors import TwoAxisError
from twoaxis.data import prepare
from twoaxis.data.corpus import Corpus, parse_corpus
from twoaxis.data.tokenizer import SubwordTokenizer
from twoaxis.interop.serve.protocol import ChatRequest, CompletionRequest
from twoaxis.planner.hardware.device import device_text, read_device
from twoaxis.planner.model.read import read_model
from twoaxis.study.design import read_study
from twoaxis.study.report_data import read_report
from twoaxis.study.running.study_folder import StudyFolder, run_keys
from twoaxis.train import load_trained, read_metrics
from twoaxis.train.checkpoint import load_checkpoint
from twoaxis.train.environment import changed_environment
from twoaxis.train.recipe import read_recipe
from twoaxis.train.run_folder import RunFolder

from ..checkpoints.gguf_files import write_gguf
from ..checkpoints.hf_folder import byte_tokenizer, write_folder
from .damage import CUTS, damaged

CHECKPOINT = "run/checkpoints/step-00000003"


@dataclass(frozen=True)
class Reader:
    """What reads a file.

    Attributes:
        file: that is damaged, within what is given.
        read: everything that is read of it, from the folder of what is given.
        notices: whether a checksum tells every damage.
    """

    file: str
    read: Callable[[Path], Any]
    notices: bool = False


def _study(given: Path) -> Any:
    folder = StudyFolder(given / "study")
    plan = folder.plan
    kept = folder.baselines, folder.timing_before, folder.timing_after, folder.learning_rates, folder.command
    return folder.study, plan, kept, [(folder.record(key), folder.audit(key)) for key in run_keys(plan)]


def _shards(given: Path) -> Any:
    data = prepare(str(given / "lossy.txt"), LOSSY | {"path": str(given / "lossy.json")}, given / "cache").to_data()
    return data, prepare(str(given / "text.txt"), {"kind": "bpe", "vocab_size": 260}, given / "cache").to_data()


def _claim(given: Path) -> None:
    folder = RunFolder(given / "run")
    changed_environment(folder.read("env"), {"versions": {}})
    folder.claim(folder.config, prepare(str(given / "text.txt"), {"kind": "bpe", "vocab_size": 260}, given / "cache"))


def _published(given: Path) -> Any:
    files = read_source_files(given / "hf")
    template = chat_template(files)
    return generation_defaults(files), end_of_document(given / "hf"), template and template.render([MESSAGE])


def _text(given: Path, name: str) -> Any:
    corpus = Corpus.open(parse_corpus(str(given / name)))
    return list(corpus.documents("train"))


LOSSY = {"kind": "file", "end_of_document": "<|end|>"}
MESSAGE = {"role": "user", "content": "Hello"}
RUN = "study/runs/plain/seed-0"
READERS = [
    Reader("hf/model.safetensors", lambda given: read_tensors(given / "hf")),
    Reader("shards/model.safetensors.index.json", lambda given: read_tensors(given / "shards")),
    Reader("hf/config.json", lambda given: (read_pretrained(given / "hf"), read_model(given / "hf"))),
    Reader("hf/tokenizer.json", lambda given: SubwordTokenizer(read_tokenizer(given / "hf") or "").encode("of the House")),
    Reader("hf/tokenizer_config.json", _published),
    Reader("hf/generation_config.json", _published),
    Reader("hf/special_tokens_map.json", _published),
    Reader("hf/chat_template.jinja", _published),
    Reader("model.gguf", lambda given: read_pretrained(given / "model.gguf")),
    Reader("recipe.toml", lambda given: read_recipe(given / "recipe.toml")),
    Reader("recipe.json", lambda given: read_recipe(given / "recipe.json")),
    Reader("study.toml", lambda given: read_study(given / "study.toml")),
    Reader("machine.toml", lambda given: read_device(given / "machine.toml")),
    Reader("text.txt", lambda given: _text(given, "text.txt")),
    Reader("text.jsonl", lambda given: _text(given, "text.jsonl")),
    Reader("text.parquet", lambda given: _text(given, "text.parquet")),
    Reader("cache/shards/*/train.tokens", _shards, notices=True),
    Reader("cache/shards/*/validation.restored.json", _shards),
    Reader("cache/tokenizers/*.json", _shards),
    Reader("run/config.json", lambda given: (RunFolder(given / "run").config, read_recipe(given / "run" / "config.json"))),
    Reader("run/data.json", _claim),
    Reader("run/env.json", _claim),
    Reader("run/tokenizer.json", lambda given: load_trained(given / "run")),
    Reader("run/metrics.jsonl", lambda given: read_metrics(given / "run" / "metrics.jsonl")),
    Reader("run/result.json", lambda given: RunFolder(given / "run").result),
    Reader("run/audit.json", lambda given: read_audit(given / "run")),
    *(
        Reader(f"{CHECKPOINT}/{name}", lambda given: load_checkpoint(given / CHECKPOINT), notices=True)
        for name in ("state.json", "model.safetensors", "optimizer.safetensors")
    ),
    Reader("study/report.json", lambda given: read_report(given / "study")),
    *(
        Reader(f"study/{name}", _study)
        for name in (
            "study.json",
            "plan.json",
            "baselines.json",
            "timing_before.json",
            "timing_after.json",
            "tuned.json",
            "command.txt",
        )
    ),
    *(
        Reader(f"{RUN}/{name}.json", _study)
        for name in ("config", "data", "env", "initial_parameters", "result", "audit", "reused")
    ),
    Reader("study/runs/plain/seed-1.failure.json", _study),
    Reader("completion.json", lambda given: CompletionRequest.read((given / "completion.json").read_bytes())),
    Reader("chat.json", lambda given: ChatRequest.read((given / "chat.json").read_bytes())),
]

DAMAGES = 68
"""How often each file is damaged; files of a few bytes have fewer places to cut."""


@pytest.fixture(scope="module")
def files(given: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is given, with a file of every other kind beside it."""
    root = tmp_path_factory.mktemp("files") / "given"
    shutil.copytree(given, root)
    write_folder(root / "hf", vocab_size=258)
    write_gguf(root / "model.gguf", root / "hf")
    (root / "shards").mkdir()
    tensors = read_tensors(root / "hf")
    save_file(tensors, root / "shards" / "all.safetensors")
    text = (root / "text.txt").read_text()
    pyarrow.parquet.write_table(pyarrow.table({"text": text.splitlines()}), root / "text.parquet")
    (root / "text.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in text.splitlines()))
    (root / "machine.toml").write_text(device_text(read_device("h100")))
    written = {
        "shards/model.safetensors.index.json": {"weight_map": dict.fromkeys(tensors, "all.safetensors")},
        "hf/tokenizer_config.json": {"eos_token": "a", "bos_token": {"content": "b"}, "chat_template": "{{ bos_token }}"},
        "hf/generation_config.json": {"eos_token_id": [2, 7], "do_sample": True, "temperature": 0.5},
        "hf/special_tokens_map.json": {"eos_token": "a"},
        "recipe.json": read_recipe(root / "recipe.toml").to_data(),
        "study/tuned.json": {"plain": 0.01},
        f"{RUN}/reused.json": {"from": "other/runs/plain/seed-0"},
        f"{RUN}/audit.json": {"format": 1},
        "study/runs/plain/seed-1.failure.json": {"exit_code": 1, "message": "killed"},
        "completion.json": {"prompt": ["a", "b"], "max_tokens": 3, "stop": "c", "stream_options": {"include_usage": True}},
        "chat.json": {"messages": [{"role": "user", "content": "a"}], "temperature": 0.5},
    }
    for name, data in written.items():
        (root / name).write_text(json.dumps(data))
    shutil.copy(root / "study/timing_after.json", root / "study/timing_before.json")
    (root / "hf/chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    (root / "study/runs/plain/seed-1/result.json").unlink()
    assert main(["audit", str(root / "run"), "--tokens", "16"]) == 0
    # All in small letters, of which it is kept how much that loses.
    lossy = byte_tokenizer("<|end|>")
    lossy.normalizer = normalizers.Lowercase()
    lossy.save(str(root / "lossy.json"))
    (root / "lossy.txt").write_text(text.replace("line", "Line"))
    _shards(root)
    return root


@pytest.mark.parametrize("reader", READERS, ids=[reader.file for reader in READERS])
def test_damaged_files_are_one_line_or_the_right_value(reader: Reader, files: Path) -> None:
    file = min(files.glob(reader.file))
    content, right = file.read_bytes(), plain(reader.read(files))
    outcomes = Counter[str]()
    try:
        for what, damage in damaged(content):
            put(file, damage)
            try:
                found = plain(reader.read(files))
            except TwoAxisError as error:
                assert len(str(error).splitlines()) == 1 and len(str(error)) > 20, f"{what}: {error}"
                outcomes["one line"] += 1
            except Exception as error:
                raise AssertionError(f"{file.name}, {what}: {type(error).__name__}: {error}") from error
            else:
                outcomes["the same" if found == right else "another value"] += 1
                assert found == right or not reader.notices, what
    finally:
        put(file, content)
    assert plain(reader.read(files)) == right
    assert sum(outcomes.values()) in range(DAMAGES - CUTS, DAMAGES + 1)


def put(file: Path, content: bytes) -> None:
    """Replaces what a file holds in place: some systems write a file that was emptied first to the disk when it is closed."""
    with open(file, "r+b") as stream:
        stream.write(content)
        stream.truncate()


class Contents(pickle.Pickler):
    """Writes tensors as their bytes, since storages have numbers of their own."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return bytes, (value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes(),)
        return NotImplemented


def plain(value: Any) -> bytes:
    """What can be compared with ==."""
    stream = io.BytesIO()
    Contents(stream).dump(value)
    return stream.getvalue()
