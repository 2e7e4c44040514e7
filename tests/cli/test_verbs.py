"""Every verb: what it prints for people and machines, its exit status, and its one-line errors."""

import io
import json
import shlex
import sys
from types import SimpleNamespace

import pytest

from twoaxis import DEPTH, FEED_FORWARD, SEQUENCE, ConfigError, Decoder, DecoderConfig, __version__, testing
from twoaxis.cli import main
from twoaxis.cli.app import GROUPS, STATUSES
from twoaxis.cli.app import VERBS as EVERY_VERB
from twoaxis.data.tokenizer import ByteTokenizer
from twoaxis.ops.cpu import library
from twoaxis.testing import construction
from twoaxis.train import save_trained

from ..fresh import run_fresh

VERBS = (
    "list",
    "show",
    "claims",
    "train",
    "audit",
    "plan",
    "study",
    "report",
    "evaluate",
    "generate",
    "serve",
    "retrofit",
    "check",
)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipe")
    text = folder / "text.txt"
    text.write_text("".join(f"line {i} of a small text that repeats itself, {i * i}.\n" for i in range(400)))
    path = folder / "tiny.toml"
    path.write_text(
        f"steps = 3\nbatch_size = 2\nvalidate_every = 3\nvalidation_tokens = 64\ncheckpoint_every = 2\n"
        f'[data]\ncorpus = "{text}"\nseq_len = 16\n'
        f'[model]\nd_model = 16\nn_layers = 1\nmax_seq_len = 64\nblocks = [[{{kind = "attention", n_heads = 2}}, "swiglu"]]\n'
    )
    return path


@pytest.fixture(scope="module")
def run(recipe, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    assert main(["train", str(recipe), "--run", str(folder)]) == 0
    return folder


def error_of(capsys, *words: str) -> str:
    assert main(list(words)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1, captured.err
    return lines[0]


def test_list_names_every_row(capsys):
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    for row in (*DEPTH, *SEQUENCE, *FEED_FORWARD):
        assert row.kind in out
        assert all(word in out for word in row.summary.split())


def test_list_as_json(capsys):
    assert main(["list", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["kind"] for row in found["depth"]] == [row.kind for row in DEPTH]


def test_list_of_one_axis_says_source_start_and_size(capsys):
    assert main(["list", "depth", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["depth"]
    rows = {row["kind"]: row for row in found["depth"]}
    assert rows["residual_scalars"]["parameters"] == 48
    assert rows["deep_delta"]["at_initialisation"] == "none"
    assert all(row["source"] and row["status"] for row in rows.values())
    assert rows["lime"]["evidence"] == "certified"
    assert rows["laurel"]["evidence"] == "reconstructed"
    assert rows["deep_cross_attention"]["evidence"] == "reconstructed; certified: package, v1"


def test_list_of_an_unknown_axis(capsys):
    assert "did you mean 'depth'?" in error_of(capsys, "list", "dept")


@pytest.mark.parametrize("kind", [row.kind for row in (*DEPTH, *SEQUENCE, *FEED_FORWARD)])
def test_show_has_equation_source_cost_and_parameters(kind, capsys):
    assert main(["show", kind]) == 0
    out = capsys.readouterr().out
    for field in (
        "Equation:",
        "Source:",
        "Deviates:",
        "Init:",
        "Cost:",
        "Parameters of ",
        "matmul flops per token",
    ):
        assert field in out


def test_show_takes_options_and_says_what_they_change(capsys):
    assert main(["show", "deep_delta", "gate=two_layer", "gate_width=5", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["options"]["gate_width"] == 5
    assert found["cost"]["parameters"] == 2 * (5 * 256 + 5 + 1 + 256)
    assert {"name": "sublayer 22.gate.hidden_weight", "shape": [5, 256]}.items() <= found["parameters"][1].items()
    assert found["init_equivalence"]["relation"] == "none"


@pytest.mark.parametrize(
    ("words", "evidence"),
    [
        (["muddformer"], "certified: equals public code in outputs and all gradients (golden tensors muddformer-plainhid-f64)"),
        (["muddformer", "impl=reference"], "certified: equals public code"),
        (["muddformer", "window=2"], "reconstructed from text, or an option of ours"),
        (["attention_residuals", "n_heads=4"], "reconstructed from text"),
        (["attention_residuals", "block_size=6"], "certified: equals public code"),
        (["swiglu"], "certified: equals public code"),
        (["local_swa"], "reconstructed from text"),
    ],
)
def test_show_says_whether_these_options_are_certified(words, evidence, capsys):
    assert main(["show", *words]) == 0
    assert f"Evidence: {evidence}" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("verb", VERBS)
def test_help_teaches(verb, capsys):
    assert main([verb, "--help"]) == 0
    out = capsys.readouterr().out
    assert "Usage:" in out
    if verb != "list":
        assert "Example: twoaxis" in " ".join(out.split())


@pytest.mark.parametrize("words", [[], ["--debug"]])
def test_no_verb_prints_the_help(words, capsys):
    """Catches a help that is treated as an error: folded into one line on standard error, exit status 2."""
    assert main(words) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert len(captured.out.splitlines()) > 10
    assert all(f"\n  {verb} " in captured.out for verb in VERBS)


def test_the_help_has_groups_whole_sentences_and_exit_statuses(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert "..." not in out.replace("[ARGS]...", "") and max(map(len, out.splitlines())) <= 80
    words = " ".join(out.split())
    assert all(f" {title}: " in words for title in GROUPS)
    assert all(" ".join(verb.__doc__.partition("\n\n")[0].split()) in words for _, verb in EVERY_VERB)
    assert all(f" {status} {meaning}" in words for status, meaning in STATUSES)


@pytest.mark.parametrize(
    ("words", "number", "expected"),
    [
        ("twoaxis retr", 1, {"retrofit"}),
        ("twoaxis show deep_d", 2, {"deep_delta"}),
        ("twoaxis check seq", 2, {"sequence"}),
        ("twoaxis check sequence short_s", 3, {"short_swa"}),
        ("twoaxis retrofit model --depth laurel", 4, {"laurel", "laurel_gemma3n"}),
    ],
)
def test_verbs_axes_and_mixers_complete(words, number, expected, capsys, monkeypatch):
    monkeypatch.setenv("_TWOAXIS_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(number))
    assert main([]) == 0
    assert set(capsys.readouterr().out.split()) == expected


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == __version__


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["shw"], "unknown verb 'shw'; did you mean 'show'?"),
        (["frobnicate"], "unknown verb 'frobnicate'; choose one of audit, check, claims, "),
        (["--debugg", "list"], "unknown option '--debugg'; did you mean '--debug'?"),
        (["list", "--jsno"], "unknown option '--jsno'; did you mean '--json'?"),
        (["list", "--color"], "unknown option '--color'; choose one of --design, --help, --json"),
        (["show"], "name is missing: a kind that `twoaxis list` prints, such as deep_delta; try `twoaxis show "),
        (["generate", "x", "--seed", "a"], "--seed='a': "),
        (["generate", "x", "--top-k=0"], "--top-k='0': "),
        (["train", "recipe.yaml"], "recipe recipe.yaml: is YAML: must be TOML, or JSON with a name that ends in .json"),
        (["show", "deep_delt"], "unknown mixer 'deep_delt'; did you mean 'deep_delta'?"),
        (["show", "deep_delta", "beta_init=3"], "beta_init=3.0: must be inside (0, 2)"),
        (["show", "deep_delta", "beta"], "must have the form key=value"),
        (["train", "no-such.toml"], "recipe no-such.toml: cannot be read"),
        (["study", "no-such.toml"], "study no-such.toml: cannot be read"),
        (["report", "no-such-folder"], "holds no study and no report"),
        (["generate", "no-such-run"], "no-such-run"),
        (["check", "dept"], "unknown axis 'dept'; did you mean 'depth'?"),
        (["claims", "19"], "claim=19: must be in 1..18; leave it out to see all of them"),
        (["check", "depth", "residul"], "unknown depth mixer 'residul'; did you mean 'residual'?"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(words, expected, capsys):
    assert expected in error_of(capsys, *words)


def test_recipe_errors_name_the_key(recipe, tmp_path, capsys):
    folder = str(tmp_path / "run")
    assert "did you mean 'steps'?" in error_of(capsys, "train", str(recipe), "stepz=1", "--run", folder)
    assert "window=0: must be >= 1" in error_of(
        capsys, "train", str(recipe), 'model.blocks=[[{kind="short_swa", window=0}]]', "--run", folder
    )
    assert not (tmp_path / "run").exists()


def test_a_file_that_holds_no_table_is_one_line(tmp_path, capsys):
    path = tmp_path / "list.json"
    path.write_text("[1]")
    for verb in ("train", "study"):
        assert "must hold a table of keys and values" in error_of(capsys, verb, str(path))


def test_debug_shows_the_trace():
    with pytest.raises(Exception, match="unknown mixer"):
        main(["--debug", "show", "deep_delt"])


def test_train_prints_its_result_as_json_and_progress_apart(recipe, tmp_path, capsys):
    assert main(["train", str(recipe), "steps=2", "--run", str(tmp_path / "run"), "--json"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert found["status"] == "finished"
    assert found["steps"] == 2
    assert "step 2 of 2" in captured.err


def test_train_again_returns_the_same_result(run, recipe, capsys):
    before = (run / "result.json").read_text()
    assert main(["train", str(recipe), "--run", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["validation_loss"] == json.loads(before)["validation_loss"]
    assert (run / "result.json").read_text() == before


def test_generate_is_reproducible_and_greedy_ignores_the_seed(run, capsys):
    texts = []
    for seed in ("0", "0", "1"):
        assert main(["generate", str(run), "--prompt", "line ", "--max-new-tokens", "8", "--seed", seed, "--json"]) == 0
        texts.append(json.loads(capsys.readouterr().out)["tokens"])
    assert texts[0] == texts[1] != texts[2]
    greedy = []
    for seed in ("0", "1"):
        words = ["generate", str(run), "--max-new-tokens", "8", "--temperature", "0", "--seed", seed, "--json"]
        assert main(words) == 0
        greedy.append(json.loads(capsys.readouterr().out)["tokens"])
    assert greedy[0] == greedy[1]
    assert len(greedy[0]) == 8


def test_generate_streams_the_prompt_and_the_text(run, capsys):
    assert main(["generate", str(run), "--prompt", "line 1", "--max-new-tokens", "4", "--temperature", "0"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("line 1")
    assert main(["generate", str(run), "--prompt", "line 1", "--max-new-tokens", "4", "--temperature", "0", "--json"]) == 0
    assert out == "line 1" + json.loads(capsys.readouterr().out)["text"] + "\n"


@pytest.mark.parametrize("words", [["generate", "--max-new-tokens", "1"], ["evaluate", "--text"], ["serve", "--port", "0"]])
def test_what_runs_a_model_says_that_kernels_are_built(words, run, recipe, capsys, monkeypatch):
    def no_engine(*given: object) -> None:
        raise ConfigError("the test ends here")

    monkeypatch.setattr("twoaxis.interop.serve.scheduler.Engine", no_engine)
    given = [words[0], str(run), *words[1:], *([str(recipe)] if words[0] == "evaluate" else [])]
    line = "compiles kernels for this processor, once"
    for due in (True, False):
        monkeypatch.setattr(library, "must_compile", lambda due=due: due)
        assert main(given) == (2 if words[0] == "serve" else 0)
        assert sum(one.endswith(line) for one in capsys.readouterr().err.splitlines()) == due


def test_generate_refuses_what_does_not_fit(run, capsys):
    message = error_of(capsys, "generate", str(run), "--prompt", "x" * 70)
    assert "at most max_seq_len=64" in message
    assert "prompt 0 without tokens" in error_of(capsys, "generate", str(run), "--prompt", "")
    assert "top_p=0.0: must be > 0" in error_of(capsys, "generate", str(run), "--top-p", "0")
    assert f"seed={2**64}: must be < {2**64}" in error_of(capsys, "generate", str(run), "--seed", str(2**64))
    for number in ("inf", "nan"):
        for name in ("temperature", "top-p"):
            assert name.replace("-", "_") in error_of(capsys, "generate", str(run), f"--{name}", number).replace("-", "_")


def test_generate_takes_the_most_likely_token_at_extremes(run, capsys):
    texts = []
    for options in (["--temperature", "0"], ["--temperature", "1e-40"], ["--top-p", "1e-46"]):
        assert main(["generate", str(run), "--max-new-tokens", "4", *options]) == 0
        texts.append(capsys.readouterr().out)
    assert len(set(texts)) == 1


def test_generate_writes_no_id_that_the_tokenizer_lacks(tmp_path, capsys):
    model = Decoder.build(DecoderConfig(vocab_size=300, d_model=8, n_layers=1, max_seq_len=64))
    model.embedding.weight.data[256:] *= 100
    run = save_trained(tmp_path / "run", model, ByteTokenizer())
    for temperature in ("0", "1"):
        assert main(["generate", str(run), "--max-new-tokens", "9", "--temperature", temperature, "--json"]) == 0
        assert len(json.loads(capsys.readouterr().out)["tokens"]) == 9


def test_generate_reads_standard_input_as_utf_8(run, capsys, monkeypatch):
    def read(data: bytes) -> list[str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), "ascii"))
        return ["generate", str(run), "--prompt", "-", "--max-new-tokens", "1"]

    assert main(read("caf\xe9".encode())) == 0
    assert capsys.readouterr().out.startswith("caf\xe9")
    assert "standard input: byte 0xe9 at offset 3 is not UTF-8" in error_of(capsys, *read("caf\xe9".encode("latin-1")))
    assert "standard input: is text in UTF-16" in error_of(capsys, *read("text".encode("utf-16")))


def test_check_prints_a_line_per_mixer_and_check(capsys):
    assert main(["check", "depth", "residual", "--quick"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.split()[:3] == ["ok", "residual", "default"] for line in lines[:-1])
    assert lines[-1] == f"{len(lines) - 1} of {len(lines) - 1} checks hold"
    assert main(["check", "feed_forward", "relu2", "--quick", "--json"]) == 0
    assert all(one["ok"] for one in json.loads(capsys.readouterr().out))


ADAPTERS = """
from twoaxis.testing import ForeignDepth


class _Base(ForeignDepth):
    starts_as = "exact"

    def write(self, index, state, update, carry):
        return state + self.factor * update


class Right(_Base):
    \"\"\"Adds updates.\"\"\"

    factor = 1.0


class Halved(_Base):
    factor = 0.5
"""


def test_check_takes_adapters_and_writes_a_page(tmp_path, monkeypatch, capsys):
    file, page = tmp_path / "adapters.py", tmp_path / "page.html"
    file.write_text(ADAPTERS)
    wanted = [
        check for check in testing.FOREIGN_CHECKS + testing.depth_checks() if check.name in ("init_equivalence", "pipeline_cut")
    ]
    monkeypatch.setattr(testing, "foreign_checks", lambda adapter: (*wanted, construction.config_round_trip))
    assert main(["check", f"{file}:Right", "--quick"]) == 0
    capsys.readouterr()
    assert main(["check", str(file), "--html", str(page)]) == 1
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert [line.split()[0] for line in lines[:6]] == ["ok", "ok", "--", "FAIL", "ok", "--"]
    assert lines[3].startswith("FAIL Halved               default      init_equivalence: logits, with init_equivalence exact: ")
    assert lines[-1] == "3 of 4 checks hold; 2 were not run"
    written = page.read_text()
    assert "1 of 4 checks fail; 2 were not run." in written and "the module has no configuration of ours" in written
    assert "://" not in written


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("{file}:Haved", "adapters.py has no adapter 'Haved'; did you mean 'Halved'?"),
        ("{file}:_Base", "adapters.py has no adapter '_Base'"),
        ("json:dumps", "json has no adapter 'dumps'; define one"),
        ("no_such_module:X", "no_such_module: cannot be run (ModuleNotFoundError: No module named 'no_such_module')"),
        ("{file}.missing.py", "missing.py: No such file or directory"),
    ],
)
def test_check_refuses_what_is_no_adapter(word, expected, tmp_path, capsys):
    file = tmp_path / "adapters.py"
    file.write_text(ADAPTERS)
    assert expected in error_of(capsys, "check", word.format(file=file))


def test_a_study_records_the_command_that_made_it(tmp_path, monkeypatch):
    recorded = []
    monkeypatch.setattr("twoaxis.study.read_study", lambda *words: SimpleNamespace(arms=(), processes=1))
    monkeypatch.setattr("twoaxis.study.running.run_study", lambda *words, **options: recorded.append(options["command_line"]))
    monkeypatch.setattr("twoaxis.study.report.write_report", lambda folder: folder)
    monkeypatch.setattr("twoaxis.cli.study.print_report", lambda written, as_json: 0)
    monkeypatch.setattr("twoaxis.study.running.ray_engine.RayEngine", lambda jobs, gpus: None)
    words = ["replicates=3", "--out", str(tmp_path / "out"), "--jobs", "2", "--engine", "ray", "--track", '{kind="wandb"}']
    assert main(["study", "study.toml", *words]) == 0
    assert recorded == [shlex.join(["twoaxis", "study", "study.toml", *words])]


WITHOUT_AN_OUTPUT = """import os
import sys

import torch._dynamo

from twoaxis.cli import main
from twoaxis.cli.app import GROUPS, STATUSES
from twoaxis.cli.app import VERBS as EVERY_VERB

for closed in ({1: "stdout"}, {2: "stderr"}, {1: "stdout", 2: "stderr"}):
    run = "-".join(closed.values())
    if not (process := os.fork()):
        # As an interpreter starts that is given none.
        for number, name in closed.items():
            os.close(number)
            setattr(sys, name, None)
            setattr(sys, f"__{name}__", None)
        os._exit(main(["train", sys.argv[1], "--run", os.path.join(sys.argv[2], run)]))
    assert os.waitpid(process, 0)[1] == 0, run
"""


def test_without_an_output_or_both_a_success_is_one(recipe, tmp_path):
    found = run_fresh(WITHOUT_AN_OUTPUT, str(recipe), str(tmp_path))
    assert found.returncode == 0, found.stderr
    assert all((tmp_path / name / "result.json").is_file() for name in ("stdout", "stderr", "stdout-stderr"))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["generate", "--prompt", "run", "--json"],
            "twoaxis: run is missing: a run folder, a Hugging Face folder with safetensors, or a GGUF file; "
            'try `twoaxis generate runs/delta --prompt "Fellow citizens" --temperature 0`; see `twoaxis generate --help`',
        ),
        (
            ["import", "folder"],
            "twoaxis: --out is missing: the run folder to write, new or empty; "
            "try `twoaxis import delta-hf/checkpoint-500 --tokenizer delta-hf --out runs/imported`; "
            "see `twoaxis import --help`",
        ),
        (
            ["generate", "r", "--max-new-tokens", "3", "--max-new-tokens", "x"],
            "twoaxis: --max-new-tokens='x': must be a valid integer, unable to parse string as an integer; "
            "see `twoaxis generate --help`",
        ),
    ],
)
def test_usage_errors_name_what_was_given(words, expected, capsys):
    assert main(words) == 2
    assert capsys.readouterr().err.strip() == expected


def test_one_of_several_processes_says_what_it_alone_has_met(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    assert main(["train", str(tmp_path / "missing.toml")]) == 2
    assert capsys.readouterr().err.startswith("twoaxis: rank 3: ")
    monkeypatch.setenv("WORLD_SIZE", "4")
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("[model]\nd_model = 8\nn_layers = 1\n")
    assert main(["train", str(recipe), "--run", str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err == ""
