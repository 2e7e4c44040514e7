"""A model inside lm-eval: its three requests, tasks from local files, and what is refused."""

import itertools
import json
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("lm_eval", reason="needs the extra twoaxis[evaluate]")

import datasets.config
from lm_eval.api.instance import Instance

from twoaxis import ConfigError, DataError, Decoder
from twoaxis.cli import main
from twoaxis.data import Tokenizer
from twoaxis.data.tokenizer import ByteTokenizer, SubwordTokenizer
from twoaxis.interop.evaluate import open_tasks, run_tasks, score_texts
from twoaxis.interop.evaluate.language_model import DecoderLM
from twoaxis.interop.evaluate.tasks import Continuation, _configurations
from twoaxis.model import Sampling, generate
from twoaxis.model.likelihood import loglikelihood
from twoaxis.train import save_trained

from ..hf_models import small_decoder
from ..small_tokenizer import subword

EXAMPLES = Path(__file__).parents[3] / "examples" / "evaluate"
LONGEST = 24
PAIRS = [
    ("Fellow citizens", " of the Senate"),
    ("Fellow citizens of the ", "House"),
    ("", "Senate"),
    ("  ", "Zoë"),
    ("a much longer context, which does not fit, " * 3, "and of the House"),
    ("Senate", " and " * 2 * LONGEST),
    ("House", ""),
]


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    tried = []

    def refuse(*where: Any, **options: Any) -> None:
        tried.append(where)
        raise OSError("there is no network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    yield
    assert not tried


@pytest.fixture(scope="module")
def model() -> Decoder:
    return small_decoder("windows", vocab_size=280, max_seq_len=LONGEST, n_layers=1, tie_embeddings=False)


def ask(kind: Any, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=one, idx=index) for index, one in enumerate(arguments)]


@torch.no_grad()
def direct(model: Decoder, tokenizer: Tokenizer, context: str, continuation: str) -> tuple[float, bool]:
    """Sums the terms of the continuation, one by one, from the whole logits of one pass over what fits."""
    whole, before = tokenizer.encode(context + continuation), len(tokenizer.encode(context.rstrip()))
    begin = [] if tokenizer.end_of_document is None else [tokenizer.end_of_document]
    tokens = whole if before else begin + whole
    scored = len(whole) - before
    if not scored:
        return 0.0, True
    read = tokens[-LONGEST - 1 :]
    logp = torch.log_softmax(model(torch.tensor([read[:-1]]))[0], dim=-1)  # type: ignore[index]
    pairs = list(zip(logp, read[1:], strict=True))[-scored:]
    uniform = -torch.log(torch.tensor(280.0)).item() if not before and not begin else 0.0
    greedy = all(int(row.argmax()) == token for row, token in pairs) and uniform == 0.0
    return uniform + sum(float(row[token]) for row, token in pairs), greedy


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), subword()], ids=["byte", "subword"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_loglikelihoods_have_one_term_for_each_token_of_the_continuation(
    model: Decoder, tokenizer: Tokenizer, batch_size: int
) -> None:
    notes: list[str] = []
    pairs = [pair for pair in PAIRS if len(pair[1]) <= LONGEST]
    found = DecoderLM(model, tokenizer, batch_size, notes.append).loglikelihood(ask("loglikelihood", *pairs))
    for (context, continuation), (nats, greedy) in zip(pairs, found, strict=True):
        expected, best = direct(model, tokenizer, context, continuation)
        assert (nats, greedy) == (pytest.approx(expected, abs=1e-6), best), (context, continuation)
    long = [len(tokenizer.encode("".join(pair))) - LONGEST - 1 for pair in pairs]
    cut = [tokens for tokens in long if tokens > 0]
    assert notes == [
        f"warning: {len(cut)} contexts do not fit in max_seq_len=24 with what follows them: "
        f"up to {max(cut)} of their first tokens were left out"
    ]


def test_greedy_is_what_greedy_decoding_writes() -> None:
    tokenizer, letters = ByteTokenizer(), small_decoder("plain", vocab_size=128)
    written = tokenizer.decode(generate(letters, [tokenizer.encode("Fellow")], 3)[0])
    other = chr((ord(written[-1]) + 1) % 128)
    request = ask("loglikelihood", ("Fellow", written), ("Fellow", written[:2] + other), ("Fellow", other + written))
    assert [greedy for _, greedy in DecoderLM(letters, tokenizer).loglikelihood(request)] == [True, False, False]


def test_a_continuation_longer_than_the_model_takes(model: Decoder) -> None:
    context, continuation = PAIRS[5]
    notes: list[str] = []
    lm = DecoderLM(model, ByteTokenizer(), note=notes.append)
    [(nats, _)] = lm.loglikelihood(ask("loglikelihood", (context, continuation)))
    assert not notes, "the whole context was read"
    lm.loglikelihood(ask("loglikelihood", ("a" * 20, "b" * 30), ("a" * 40, "b" * 30)))
    assert notes == [
        "warning: 2 contexts do not fit in max_seq_len=24 with what follows them: up to 27 of their first tokens were left out"
    ]
    tokens = list((context + continuation).encode())
    total = 0.0
    with torch.no_grad():
        for index in range(len(context), len(tokens)):
            begin = max(0, min(len(tokens) - 1, LONGEST + max(0, -(-(index - LONGEST) // 12)) * 12) - LONGEST)
            logits: Any = model(torch.tensor([tokens[begin:index]]))
            total += float(torch.log_softmax(logits[0, -1], dim=-1)[tokens[index]])
    assert nats == pytest.approx(total, rel=1e-9)


@pytest.mark.parametrize(("context", "continuation", "read"), [("of th", "e", 1), ("Fellow citizen", "s", 5)])
def test_a_continuation_that_merges_with_its_context_is_scored(
    context: str, continuation: str, read: int, model: Decoder
) -> None:
    """It once had probability 1, so that it was always the best one."""
    [(nats, greedy)] = DecoderLM(model, subword()).loglikelihood(ask("loglikelihood", (context, continuation)))
    *before, last = subword().encode(context + continuation)
    assert len(before) == read < len(subword().encode(context))
    logp = loglikelihood(model, before, [last])
    assert (nats, greedy) == (logp.nats, logp.greedy) and nats < 0


def test_a_model_that_has_diverged_is_refused() -> None:
    diverged = small_decoder("plain", vocab_size=280)
    diverged.embedding.weight.data.fill_(torch.nan)
    adapter = DecoderLM(diverged, subword())
    with pytest.raises(DataError, match=r"^continuation 1: its loss is nan: must be a number; evaluate a model that has not"):
        adapter.loglikelihood(ask("loglikelihood", ("Fellow", " citizens")))
    with pytest.raises(DataError, match=r"^text 1: its loss is nan: must be a number; evaluate a model that has not diverged$"):
        adapter.loglikelihood_rolling(ask("loglikelihood_rolling", ("Fellow citizens",)))


def test_rolling_scores_are_those_of_texts(model: Decoder) -> None:
    texts = {str(index): text for index, (text, _) in enumerate(PAIRS) if text}
    found = DecoderLM(model, subword()).loglikelihood_rolling(ask("loglikelihood_rolling", *((one,) for one in texts.values())))
    expected = [-one.nats for one in score_texts(model, subword(), texts, stride=LONGEST)]
    assert found == pytest.approx(expected, rel=1e-12)
    assert DecoderLM(model, subword()).loglikelihood_rolling(ask("loglikelihood_rolling", ("",))) == [0.0]


def test_generation_of_ragged_contexts(model: Decoder) -> None:
    tokenizer, notes = subword(), []
    end = tokenizer.end_of_document
    assert end is not None
    contexts = ["Fellow citizens", "a", "", "a context that does not fit" * 4, "of the House"]
    how = {"until": [], "max_gen_toks": 7}
    requests = ask("generate_until", *((context, how) for context in contexts))
    found = DecoderLM(model, tokenizer, 2, notes.append).generate_until(requests)
    expected = []
    for context in contexts:
        prompt = (tokenizer.encode(context) or [end])[-(LONGEST - 7) :]
        expected.append(tokenizer.decode(generate(model, [prompt], 7, stop_token=end)[0]))
    assert found == expected and len(set(found)) == len(contexts)
    assert len(notes) == 1 and notes[0].startswith("warning: 1 contexts do not fit in max_seq_len=24")
    # The text ends before whatever stop string comes first, in each row for itself.
    longest = max(found, key=len)
    stop = longest[2:4]
    stopped = DecoderLM(model, tokenizer).generate_until(
        ask("generate_until", *((context, {**how, "until": [stop, longest[3:5]]}) for context in contexts))
    )
    for before, after in zip(found, stopped, strict=True):
        places = [before.find(one) for one in (stop, longest[3:5]) if one in before]
        assert after == before[: min(places, default=None)]
    assert longest[:2] in stopped


def test_generation_ends_with_the_document(model: Decoder) -> None:
    tokenizer = subword()
    prompts = [tokenizer.encode(context) for context in ("Fellow citizens", "a", "of the House")]
    free = generate(model, prompts, 7)
    # Whatever token the first row writes third is the end now.
    tokenizer.end_of_document = free[0][2]
    requests = ask("generate_until", *((tokenizer.decode(prompt), {"max_gen_toks": 7}) for prompt in prompts))
    expected = [tokenizer.decode(row[: row.index(free[0][2])] if free[0][2] in row else row) for row in free]
    found = DecoderLM(model, tokenizer).generate_until(requests)
    assert found == expected and found[2] == tokenizer.decode(free[2])


def test_requests_of_several_kinds_in_one_call(model: Decoder) -> None:
    adapter = DecoderLM(model, subword())
    kinds = [{"max_gen_toks": 3}, {"max_gen_toks": 6}, {"max_gen_toks": 3, "temperature": 2.0, "seed": 1}]
    mixed = adapter.generate_until(ask("generate_until", *(("Fellow", kind) for kind in kinds * 2)))
    apart = [adapter.generate_until(ask("generate_until", ("Fellow", kind)))[0] for kind in kinds]
    assert mixed[:2] == apart[:2] == mixed[3:5] and apart[1].startswith(apart[0])


def test_repeats_draw_differently_in_batches_of_any_size(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, how = subword(), {"max_gen_toks": 6, "temperature": 2.0, "seed": 5}
    contexts, rows, generator = ["Fellow citizens", "Senate"], list[int](), Sampling.generator
    requests = [one for one in ask("generate_until", *((context, how) for context in contexts)) for _ in range(4)]
    monkeypatch.setattr(Sampling, "generator", lambda self, row=0: rows.append(row) or generator(self, row))
    one, three, all_at_once = (DecoderLM(model, tokenizer, size).generate_until(requests) for size in (1, 3, 16))
    assert one == three == all_at_once
    assert len(set(one[:4])) == len(set(one[4:])) == 4
    # Neither repeats nor contexts share their draws, and every call has the same ones.
    assert len(rows) == 24 and len(set(rows)) == 8
    for context, repeat in ((0, 0), (1, 2)):
        drawn = Sampling(temperature=2.0, seed=5).replace(seed=5 + rows[4 * context + repeat])
        again = generate(model, [tokenizer.encode(contexts[context])], 6, drawn, tokenizer.end_of_document)[0]
        assert one[4 * context + repeat] == tokenizer.decode(again)


def test_other_tokens_may_end_what_is_written(model: Decoder) -> None:
    written = generate(model, [subword().encode("Fellow")], 7)[0]
    ends = frozenset({written[3]})
    [text] = DecoderLM(model, subword(), ends=ends).generate_until(ask("generate_until", ("Fellow", {"max_gen_toks": 7})))
    assert text == subword().decode(written[: written.index(written[3])])


def test_ids_that_the_tokenizer_lacks_are_never_written() -> None:
    padded = small_decoder("plain", vocab_size=300)
    padded.embedding.weight.data[280:] *= 100
    prompt = subword().encode("Fellow")
    assert generate(padded, [prompt], 1)[0][0] >= 280
    [text] = DecoderLM(padded, subword()).generate_until(ask("generate_until", ("Fellow", {"max_gen_toks": 5})))
    assert text == subword().decode(generate(padded, [prompt], 5, stop_token=subword().end_of_document, vocab_size=280)[0])


def test_a_stop_string_may_be_a_special_token(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = subword()
    written = generate(model, [tokenizer.encode("Fellow")], 7)[0]
    tokenizer.end_of_document = None

    monkeypatch.setattr(SubwordTokenizer, "special_tokens", {"<|stop|>": written[3]})
    [text] = DecoderLM(model, tokenizer).generate_until(
        ask("generate_until", ("Fellow", {"max_gen_toks": 7, "until": ["<|stop|>"]}))
    )
    assert text == tokenizer.decode(written[: written.index(written[3])])


def test_what_a_task_may_ask_of_generation() -> None:
    assert Continuation.read({"temperature": None, "do_sample": None, "max_gen_toks": None, "until": None}, 64) == (
        Continuation.read({}, 64)
    )
    assert Continuation.read({}, 64).max_new_tokens == 32
    assert Continuation.read({"do_sample": True}, 64).sampling.temperature == 1
    assert Continuation.read({"do_sample": False, "temperature": 0.5}, 64).sampling.temperature == 0
    assert Continuation.read({"temperature": 0.5, "top_k": 3, "until": "x"}, 64).sampling.top_k == 3
    with pytest.raises(ConfigError, match="has no 'num_beams'"):
        Continuation.read({"num_beams": 4}, 64)
    with pytest.raises(ConfigError, match=r"max_gen_toks=64: must be in 0\.\.63"):
        Continuation.read({"max_gen_toks": 64}, 64)


def test_a_group_that_is_a_member_of_itself_is_refused() -> None:
    def entry(*members: str) -> SimpleNamespace:
        return SimpleNamespace(cfg={"task": list(members) or "leaf"}, tags=frozenset())

    manager: Any = SimpleNamespace(task_index={"a": entry("b", "c"), "b": entry("c", "a"), "c": entry(), "d": entry("c", "c")})
    with pytest.raises(ConfigError, match=r"^task 'a': is a member of itself \(a > b > a\); remove it"):
        list(_configurations(manager, ["a"]))
    assert len(list(_configurations(manager, ["d", "c"]))) == 4


def test_tasks_of_a_folder(model: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(EXAMPLES, tmp_path / "tasks")
    monkeypatch.chdir(tmp_path)
    tokenizer, seen = subword(), []
    tasks = open_tasks(["idioms", "sentences", "idioms"], Path("tasks"))
    assert tasks.names == ("idioms", "sentences")
    found = run_tasks(model, tokenizer, tasks, progress=lambda *now: seen.append(now))
    rows = [json.loads(line) for line in (EXAMPLES / "idioms.jsonl").read_text().splitlines()]
    right = 0
    for row in rows:
        scores = [direct(model, tokenizer, row["text"], f" {ending}")[0] for ending in row["endings"]]
        right += scores.index(max(scores)) == row["right"]
    idioms = found["tasks"]["idioms"]
    assert (idioms["examples"], idioms["version"]) == (len(rows), 1)
    assert idioms["metrics"]["acc,none"]["value"] == pytest.approx(right / len(rows))
    texts = [json.loads(line)["text"] for line in (EXAMPLES / "sentences.jsonl").read_text().splitlines()]
    scores = score_texts(model, tokenizer, dict(enumerate(texts)), stride=LONGEST)  # type: ignore[arg-type]
    bits = sum(one.bpb * one.text_bytes for one in scores) / sum(one.text_bytes for one in scores)
    assert found["tasks"]["sentences"]["metrics"]["bits_per_byte,none"]["value"] == pytest.approx(bits, rel=1e-9)
    assert {stage for stage, _, _ in seen} == {"scoring continuations", "scoring texts"}
    assert json.dumps(found)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = tmp_path / "run", tmp_path / "out.json"
    save_trained(run, small_decoder("plain", vocab_size=256, max_seq_len=32).float(), ByteTokenizer())
    words = ["evaluate", str(run), "--tasks", "sentences, idioms", "--include", str(EXAMPLES), "--limit", "2"]
    assert main([*words, "--out", str(out)]) == 0
    printed = capsys.readouterr()
    assert "bits_per_byte,none" in printed.out and "lm-eval" in printed.out
    assert "warning: " in printed.err
    report = json.loads(out.read_text())
    assert {name: one["examples"] for name, one in report["tasks"].items()} == {"idioms": 2, "sentences": 2}
    assert main([*words, "--json", "--batch-size", "1"]) == 0
    again = json.loads(capsys.readouterr().out)
    for name, one in report["tasks"].items():
        for metric, value in one["metrics"].items():
            assert again["tasks"][name]["metrics"][metric]["value"] == pytest.approx(value["value"], rel=1e-5)


TASK = "task: {}\noutput_type: loglikelihood_rolling\ntest_split: test\ndoc_to_target: text\ndoc_to_text: ''\n"


def test_what_is_refused(model: Decoder, tmp_path: Path) -> None:
    folder = tmp_path / "tasks"
    with pytest.raises(ConfigError, match=r"include='.*tasks': must be a folder with task files"):
        open_tasks(["one"], folder)
    folder.mkdir()
    with pytest.raises(ConfigError, match="holds no task"):
        open_tasks(["one"], folder)
    (folder / "hub.yaml").write_text(TASK.format("hub") + "dataset_path: someone/something\n")
    (folder / "web.yaml").write_text(
        TASK.format("web") + "dataset_path: json\ndataset_kwargs: {data_files: {test: 'https://example.com/x.jsonl'}}\n"
    )
    (folder / "group.yaml").write_text("group: all\ntask: [hub, web]\n")
    (folder / "gone.yaml").write_text(
        TASK.format("gone") + "dataset_path: json\ndataset_kwargs: {data_files: {test: no.jsonl}}\n"
    )
    with pytest.raises(ConfigError, match=r"task 'hup': must be one of all, gone, hub, web, .* did you mean 'hub'"):
        open_tasks(["hup"], folder)
    with pytest.raises(ConfigError, match=r"task 'arc_easy': must be one of .*; write a file for it"):
        open_tasks(["arc_easy"], folder)
    for name in ("web", "all"):
        with pytest.raises(ConfigError, match=r"task web: reads https://example.com/x.jsonl: must read local files"):
            open_tasks([name], folder)
    for name, reason in (("hub", "someone/something"), ("gone", "no.jsonl")):
        with pytest.raises(DataError, match=rf"tasks {name}: cannot be run \(.*{reason}.*\); name files in"):
            run_tasks(model, subword(), open_tasks([name], folder))
    (folder / "bad.yaml").write_text("task: [unclosed\n")
    with pytest.raises(ConfigError, match=r"task file .*bad\.yaml: is not YAML \("):
        open_tasks(["hub"], folder)


LISTED = """
task: listed
dataset_path: json
dataset_kwargs: {data_files: {test: texts.jsonl}}
output_type: generate_until
test_split: test
doc_to_text: text
doc_to_target: text
generation_kwargs: {until: [], max_gen_toks: 3, top_p: null}
metric_list:
  - {metric: !function measures.length, aggregation: !function measures.listed, higher_is_better: true}
"""
MEASURES = """
def length(references, predictions, **_):
    return len(predictions[0])

def listed(values):
    return list(values)

def mean(values):
    import numpy
    return numpy.array(numpy.mean(values))
"""


def test_a_task_may_measure_what_is_no_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "listed.yaml").write_text(LISTED)
    (tmp_path / "measures.py").write_text(MEASURES)
    (tmp_path / "texts.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    run = save_trained(tmp_path / "run", small_decoder("plain", vocab_size=256, max_seq_len=32).float(), ByteTokenizer())
    words = ["evaluate", str(run), "--tasks", "listed", "--include", str(tmp_path)]
    assert main(words) == 0
    assert "[3.0, 3.0]" in capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    [found] = json.loads(capsys.readouterr().out)["tasks"]["listed"]["metrics"].values()
    assert found["value"] == [3.0, 3.0]
    (tmp_path / "listed.yaml").write_text(LISTED.replace("measures.listed", "measures.mean"))
    assert main([*words, "--json"]) == 0
    [found] = json.loads(capsys.readouterr().out)["tasks"]["listed"]["metrics"].values()
    assert found["value"] == 3.0
    (tmp_path / "listed.yaml").write_text(LISTED.replace("top_p", "temperature"))
    assert main(words) == 2
    assert "task listed: generation_kwargs.temperature is null: must be a number" in capsys.readouterr().err


@pytest.mark.parametrize("begin", [None, "<|begin|>"], ids=["plain", "begin"])
def test_lm_eval_says_the_same_of_the_exported_folder(begin: str | None, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs the extra twoaxis[hf]")
    pytest.importorskip("accelerate", reason="lm-eval's own model needs it")
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from twoaxis.checkpoints.decoder_folder import read_decoder
    from twoaxis.interop.hugging_face import export_folder

    decoder = small_decoder("streams", vocab_size=280, max_seq_len=LONGEST, tie_embeddings=False).float()
    folder = export_folder(decoder, tmp_path / "hf", subword(begin))
    build: Any = HFLM
    theirs = build(AutoModelForCausalLM.from_pretrained(folder), tokenizer=AutoTokenizer.from_pretrained(folder), device="cpu")
    pairs = [pair for pair in PAIRS if pair[0].strip() and 0 < len(pair[1]) <= LONGEST] + [("", "Senate")]
    texts = [(context,) for context, _ in PAIRS if context.strip()]
    how = {"until": ["e"], "max_gen_toks": 5, "do_sample": False}
    prompts = [(context, how) for context, _ in PAIRS if context.strip()]
    for ours in (DecoderLM(decoder, subword(begin), 2), DecoderLM(*read_decoder(folder), 2)):  # type: ignore[arg-type]
        scores = [lm.loglikelihood(ask("loglikelihood", *pairs)) for lm in (ours, theirs)]
        for (nats, greedy), (expected, best) in zip(*scores, strict=True):
            assert (nats, greedy) == (pytest.approx(expected, abs=1e-4), best)
        # Theirs puts a begin marker twice before a whole text, and scores the second.
        if begin is None:
            rolling = [lm.loglikelihood_rolling(ask("loglikelihood_rolling", *texts)) for lm in (ours, theirs)]
            assert rolling[0] == pytest.approx(rolling[1], abs=1e-4)
        written = [
            list(itertools.chain(*(lm.generate_until(ask("generate_until", one)) for one in prompts))) for lm in (ours, theirs)
        ]
        assert written[0] == written[1]
