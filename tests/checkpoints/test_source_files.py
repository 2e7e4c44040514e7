"""What begins, ends and frames texts of a published model goes the whole way: folder, run, training, export, and back."""

import importlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import processors

from twoaxis.api import load_model
from twoaxis.checkpoints.published_folder import chat_template, generation_defaults
from twoaxis.cli import main
from twoaxis.core.errors import CheckpointError, DataError
from twoaxis.data import prepare
from twoaxis.data.tokenizer import SubwordTokenizer
from twoaxis.interop.evaluate.perplexity import text_passage
from twoaxis.interop.serve.protocol import CompletionRequest, Message
from twoaxis.interop.serve.work import ChatFormat, Limits, Served, work_of
from twoaxis.train import RunFolder, load_trained

from .hf_folder import byte_tokenizer, write_folder

SPECIAL = ("<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>")
BEGIN, END, PAD, START, STOP = range(256, 261)
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
GENERATION = {"eos_token_id": [END, STOP], "temperature": 0.3, "do_sample": True, "cache_implementation": "static"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with a tokenizer that begins texts, a chat template, two tokens that end answers, and code that nobody runs."""
    folder = tmp_path_factory.mktemp("chat")
    write_folder(folder, vocab_size=264)
    byte_tokenizer(*SPECIAL, begin="<s>").save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    config |= {"chat_template": TEMPLATE, "auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    (folder / "text.txt").write_text("".join(f"line {i} of a text, {i * i}.\n\n" for i in range(100)))
    return folder


@pytest.fixture(scope="module")
def run(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    data = [f"data.corpus={source / 'text.txt'}", "data.seq_len=16", "steps=2", "batch_size=2", "validation_tokens=64"]
    assert main(["retrofit", str(source), *data, "--depth", "denseformer", "--out", str(out), "--tokens", "64"]) == 0
    return out


def test_texts_begin_as_the_file_says(source: Path) -> None:
    tokenizer = load_model(source).tokenizer
    plain = tokenizer.encode("ab")
    assert (tokenizer.begin_of_document, tokenizer.end_of_document, len(plain)) == ((BEGIN,), END, 2)
    assert tokenizer.prompt("ab") == [BEGIN, *plain]
    assert tokenizer.prompt("") == [BEGIN]
    passage = text_passage(tokenizer, "ab")
    assert ([*map(int, passage.tokens)], passage.first) == ([BEGIN, *plain], 1)
    chat = ChatFormat.of(tokenizer).prompt([Message(role="user", content="a")], tokenizer)
    assert (chat[0], chat.count(BEGIN), chat[1]) == (BEGIN, 1, START)


def test_documents_of_shards_begin_so_too(source: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.txt").write_text(f"{name} and more\n")
    tokenizer = {"kind": "file", "path": str(source / "tokenizer.json"), "end_of_document": "</s>"}
    data = prepare(str(source / "text.txt"), tokenizer, cache=tmp_path / "cache")
    tokens = data.train.tokens[:]
    begins = [index for index, token in enumerate(tokens.tolist()) if token == BEGIN]
    ends = [index for index, token in enumerate(tokens.tolist()) if token == END]
    assert begins[0] == 0 and len(begins) == len(ends) == data.train.header.n_documents
    assert [end + 1 for end in ends[:-1]] == begins[1:]


def test_tokenizers_without_a_begin_are_as_they_were() -> None:
    tokenizer = SubwordTokenizer(byte_tokenizer("</s>").to_str(), "</s>")
    assert tokenizer.begin_of_document == () and "begin_of_document" not in json.loads(tokenizer.definition)
    assert tokenizer.prompt("") == [256] and tokenizer.prompt("a") == tokenizer.encode("a")


def test_a_run_may_be_moved(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    moved = tmp_path / "elsewhere"
    shutil.copytree(run, moved)
    assert main(["train", str(moved / "config.json"), "--run", str(moved)]) == 0
    assert load_trained(moved).step == 2
    assert main(["audit", str(moved), "--tokens", "32"]) == 0
    capsys.readouterr()
    # In another folder it would begin with a new model.
    assert main(["train", str(moved / "config.json"), "--run", str(tmp_path / "other")]) == 2
    assert "must be in the folder of its run, which begins with a model" in capsys.readouterr().err


def test_a_tokenizer_larger_than_the_model_is_refused(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = tmp_path / "small"
    write_folder(small)
    shutil.copy(source / "tokenizer.json", small)
    assert main(["retrofit", str(small), "--depth", "denseformer", "--out", str(tmp_path / "run")]) == 2
    assert "tokens of the tokenizer=261: must be at most the model's vocab_size=256" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_damaged_files_are_one_line(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, content, message in (
        ("tokenizer.json", b"\xff\xfe", "tokenizer.json: is text in UTF-16"),
        ("tokenizer_config.json", b'{"eos_token": 3}', "eos_token=3: must be a token of the tokenizer"),
        ("tokenizer_config.json", b"{", "tokenizer_config.json: cannot be read"),
    ):
        folder = tmp_path / "damaged"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(source, folder)
        (folder / name).write_bytes(content)
        assert main(["retrofit", str(folder), "--depth", "denseformer", "--out", str(tmp_path / "run")]) == 2
        error = capsys.readouterr().err
        assert message in error and len(error.strip().splitlines()) == 1


def test_an_export_gives_back_what_came_with_the_model(run: Path, source: Path, tmp_path: Path) -> None:
    transformers: Any = pytest.importorskip("transformers", reason="needs transformers")
    out = tmp_path / "out"
    assert main(["export", str(run), "--to", "hf", "--out", str(out)]) == 0
    theirs, ours = (transformers.AutoTokenizer.from_pretrained(folder) for folder in (source, out))
    assert (ours.bos_token, ours.eos_token, ours.pad_token) == ("<s>", "</s>", "<pad>")
    assert ours.chat_template == TEMPLATE
    for text in ("plain", "<|im_start|>user", "naïve </s>"):
        assert ours(text).input_ids == theirs(text).input_ids
    assert ours("ab").input_ids == load_trained(run).tokenizer.prompt("ab")
    found = transformers.GenerationConfig.from_pretrained(out)
    assert (found.eos_token_id, found.temperature, found.do_sample) == ([END, STOP], 0.3, True)
    assert found.cache_implementation is None
    assert "auto_map" not in (out / "tokenizer_config.json").read_text()
    again = tmp_path / "again"
    assert main(["import", str(out), "--out", str(again)]) == 0
    assert RunFolder(again).tokenizer.begin_of_document == (BEGIN,)
    assert main(["export", str(again), "--to", "hf", "--out", str(tmp_path / "twice")]) == 0
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "twice").chat_template == TEMPLATE
    assert transformers.GenerationConfig.from_pretrained(tmp_path / "twice").eos_token_id == [END, STOP]


def test_what_a_file_puts_behind_texts_is_left_out(tmp_path: Path) -> None:
    """A prompt that ends with the end of a document is none that a model goes on from."""
    pytest.importorskip("transformers", reason="needs transformers")
    from twoaxis.interop.hugging_face.conversion import to_fast_tokenizer

    engine = byte_tokenizer("<s>", "</s>")
    for single in ("<s> $A </s>", "$A </s>", "</s> <s> $A"):
        marks = [("<s>", 256), ("</s>", 257)]
        engine.post_processor = processors.TemplateProcessing(single=single, special_tokens=marks)
        tokenizer = SubwordTokenizer(engine.to_str(), "</s>")
        assert to_fast_tokenizer(tokenizer)("ab").input_ids == tokenizer.prompt("ab")


def test_a_folder_of_ours_is_read_in_float32_and_from_safetensors_only(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    from twoaxis.interop.hugging_face import export_folder

    trained = load_trained(run)
    half = export_folder(trained.model.bfloat16(), tmp_path / "half", trained.tokenizer)
    assert {p.dtype for p in load_model(half).model.parameters()} == {torch.float32}
    assert main(["import", str(half), "--out", str(tmp_path / "run")]) == 0
    assert load_trained(tmp_path / "run").step == 0
    weights = half / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[: len(content) // 2])
    capsys.readouterr()
    for message in ("model.safetensors: cannot be read", "a pickle, which is never read"):
        assert main(["import", str(half), "--out", str(tmp_path / "none")]) == 2
        error = capsys.readouterr().err
        assert message in error and "Traceback" not in error
        weights.unlink(missing_ok=True)
        torch.save(trained.model.state_dict(), half / "pytorch_model.bin")


def test_generation_defaults() -> None:
    def defaults(text: str) -> dict[str, Any]:
        return generation_defaults({"generation_config.json": text.encode()})

    assert generation_defaults({}) == {}
    assert defaults('{"temperature": 0.6, "top_p": 0.9, "eos_token_id": 2, "pad_token_id": null}') == {"eos_token_id": 2}
    assert defaults('{"temperature": 0.6, "do_sample": true}') == {"temperature": 0.6, "do_sample": True}
    assert defaults('{"do_sample": true, "top_k": 0}') == {"do_sample": True, "top_k": 0}
    for text, message in (
        ("{", "cannot be read"),
        ("[]", "must be a table"),
        ('{"eos_token_id": ["a"]}', "must be the number of a token"),
        ('{"do_sample": true, "temperature": "hot"}', "temperature='hot': must be a number"),
        ('{"do_sample": true, "temperature": 0}', "temperature=0: must be a number"),
        ('{"do_sample": true, "temperature": true}', "temperature=True: must be a number > 0"),
        ('{"do_sample": true, "temperature": Infinity}', "temperature=inf: must be a number > 0"),
        ('{"do_sample": true, "top_k": 2.5}', "top_k=2.5: must be a whole number >= 0"),
        ('{"do_sample": true, "top_p": 1.5}', "top_p=1.5: must be a number > 0 and <= 1"),
        ('{"do_sample": "yes"}', "do_sample='yes': must be true or false"),
    ):
        with pytest.raises(CheckpointError, match=message):
            defaults(text)


def test_what_ends_an_answer(source: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in (source, run):
        assert load_model(folder).ends == {END, STOP}
    served = Served("toy", load_model(run).tokenizer, 64, Limits(), load_model(run).ends)
    request = CompletionRequest.read(b'{"prompt": "a"}')
    assert work_of(request, served).generations[0].stop_tokens == {END, STOP}
    words = ["--prompt", "a", "--max-new-tokens", "4", "--temperature", "0", "--json"]
    capsys.readouterr()
    assert main(["generate", str(source), *words]) == 0
    written = json.loads(capsys.readouterr().out)["tokens"]
    assert written
    other = tmp_path / "other"
    shutil.copytree(source, other)
    (other / "generation_config.json").write_text(json.dumps({"eos_token_id": written[-1]}))
    assert main(["generate", str(other), *words]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == written[: written.index(written[-1])]


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The prompts that `twoaxis generate` gives to the model, which writes nothing."""
    asked: list[list[int]] = []

    def stream(model: object, rows: list[list[int]], *args: object, **options: object) -> list[Any]:
        asked.extend(rows)
        return []

    monkeypatch.setattr(importlib.import_module("twoaxis.model.generate"), "stream", stream)
    return asked


def test_prompts_spell_special_tokens_on_request(
    source: Path, prompts: list[list[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a word they once became letters, which the model has never seen there."""
    text, tokenizer = "<|im_start|>user", load_model(source).tokenizer
    words = ["generate", str(source), "--prompt"]
    assert main([*words, text]) == 0
    assert "note: <|im_start|> in the prompt: read as text; --special-tokens reads" in capsys.readouterr().err
    assert main([*words, text, "--special-tokens"]) == 0
    assert "note: <|im_start|> in the prompt: read as special tokens\n" in capsys.readouterr().err
    assert main([*words, "<s>a", "--special-tokens"]) == 0
    assert main([*words, "plain"]) == 0
    assert prompts == [
        [BEGIN, *tokenizer.encode(text)],
        [BEGIN, START, *tokenizer.encode("user")],
        [BEGIN, *tokenizer.encode("a")],
        [BEGIN, *tokenizer.encode("plain")],
    ]
    assert START not in prompts[0]
    capsys.readouterr()
    assert main([*words, "plain"]) == 0
    assert capsys.readouterr().err == ""


def test_chats_are_put_as_the_template_says(
    source: Path, run: Path, tmp_path: Path, prompts: list[list[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = load_model(source).tokenizer
    expected = [START, *tokenizer.encode("user\nHi <|im_end|>"), STOP, *tokenizer.encode("\n")]
    for folder in (source, run):
        assert main(["generate", str(folder), "--chat", "--prompt", "Hi <|im_end|>"]) == 0
        captured = capsys.readouterr()
        assert "Hi" not in captured.out and "<|im_end|> in the prompt: read as text\n" in captured.err
    assert prompts == [expected, expected]
    other = tmp_path / "other"
    shutil.copytree(source, other)
    for template, message in (
        ("{{ raise_exception('only about cats') }}", "chat_template.jinja: refuses the conversation (only about cats); send"),
        ("{% for", "chat_template.jinja: is not a Jinja2 template (line 1: "),
    ):
        (other / "chat_template.jinja").write_text(template)
        assert main(["generate", str(other), "--chat"]) == 2
        assert message in capsys.readouterr().err
    (other / "chat_template.jinja").unlink()
    config = json.loads((other / "tokenizer_config.json").read_text())
    for template, message in (
        (None, "has no chat template: must have one; name a chat model, or leave it out"),
        ([{"name": "tool_use", "template": "x"}], "must be a text, or a list with one named 'default'"),
        (3, "chat_template of tokenizer_config.json=3: must be a text"),
    ):
        (other / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
        assert main(["generate", str(other), "--chat"]) == 2
        assert message in capsys.readouterr().err
    assert main(["generate", str(source), "--chat", "--special-tokens"]) == 2
    assert "--chat with --special-tokens: must be one of them" in capsys.readouterr().err


def test_of_several_templates_the_default_one_counts() -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "{{ eos_token }}{{ pad_token }}"}]
    config = {"chat_template": named, "eos_token": {"content": "</s>"}, "pad_token": None}
    files = {"tokenizer_config.json": json.dumps(config).encode(), "special_tokens_map.json": b'{"pad_token": "<p>"}'}
    template = chat_template(files)
    assert template is not None and template.render([]) == "</s><p>"
    template = chat_template({**files, "chat_template.jinja": b"\xef\xbb\xbfbeside"})
    assert template is not None and template.render([]) == "beside"
    assert chat_template({}) is None


def test_an_empty_folder_behind_a_link_is_filled(run: Path, tmp_path: Path) -> None:
    from twoaxis.train import save_trained

    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    trained = load_trained(run)
    save_trained(tmp_path / "link", trained.model, trained.tokenizer)
    assert (tmp_path / "real" / "config.json").is_file() and (tmp_path / "link").is_symlink()
    with pytest.raises(DataError, match="is not empty"):
        save_trained(tmp_path / "link", trained.model, trained.tokenizer)
