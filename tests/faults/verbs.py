"""Every verb that writes, on models and texts so small that it ends in a moment."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Verb:
    """A verb that writes.

    Attributes:
        name: of the case.
        words: its command line, from what is given and an empty folder to write into.
        faults: how many faults it is tested with, by kind; each once where there is no number.
        begins: the folder of what is given that is copied to write into.
        resumes: whether it may leave whole parts of its output when it is stopped, and goes on from them.
    """

    name: str
    words: Callable[[Path, Path], list[object]]
    faults: dict[str, int]
    begins: str = ""
    resumes: bool = False


SOME = {"full": 4, "read-only": 1, "SIGTERM": 2, "SIGKILL": 3}
FEW = {"full": 3, "read-only": 1, "SIGTERM": 1, "SIGKILL": 2}

VERBS = (
    Verb("train", lambda given, out: ["train", given / "recipe.toml", "--run", out / "a" / "run"], SOME, resumes=True),
    Verb("study", lambda given, out: ["study", given / "study.toml", "--out", out / "study"], FEW, resumes=True),
    Verb("export", lambda given, out: ["export", given / "run", "--to", "sglang", "--out", out / "a" / "hf"], SOME),
    Verb("import", lambda given, out: ["import", given / "hf", "--out", out / "run"], SOME),
    Verb(
        "retrofit",
        lambda given, out: ["retrofit", given / "hf", "--sequence", "short_conv", "--tokens", 8, "--out", out / "run"],
        SOME,
    ),
    Verb("audit", lambda given, out: ["audit", out / "run", "--tokens", 16], FEW, begins="run"),
    Verb(
        "evaluate",
        lambda given, out: ["evaluate", given / "run", "--text", given / "short.txt", "--out", out / "a" / "result.json"],
        FEW,
    ),
    Verb("report", lambda given, out: ["report", out / "study"], FEW, begins="study"),
    Verb("plan", lambda given, out: ["plan", given / "model.toml", "--html", out / "page.html"], FEW),
    Verb("calibrate", lambda given, out: ["plan", "--calibrate", "--out", out / "machine.toml"], FEW),
)

NEEDS_TRANSFORMERS = ("export", "import", "retrofit")

RECIPE = """
steps = 3
batch_size = 2
validate_every = 3
validation_tokens = 32
checkpoint_every = 1
keep_checkpoints = 2
device = "cpu"
[data]
corpus = "{text}"
seq_len = 16
tokenizer = {{kind = "bpe", vocab_size = 260}}
[model]
d_model = 16
n_layers = 1
max_seq_len = 32
blocks = [[{{kind = "attention", n_heads = 2}}, "swiglu"]]
"""

STUDY = """
question = "Does it help?"
control = "plain"
replicates = [0, 1]
budget = {{steps = 2}}
decision = {{smallest_effect = 0.05}}
[arms.plain]
[arms.scalars]
model = {{depth = "residual_scalars"}}
[base]
batch_size = 2
validate_every = 2
validation_tokens = 32
device = "cpu"
[base.data]
corpus = "{text}"
seq_len = 16
[base.model]
d_model = 16
n_layers = 1
max_seq_len = 16
blocks = [[{{kind = "attention", n_heads = 2}}, "swiglu"]]
"""


MODEL = "vocab_size = 64\nd_model = 64\nn_layers = 2\n"


def write_inputs(path: Path) -> None:
    """Writes the text, the recipe, the study and a model to plan."""
    text = path / "text.txt"
    text.write_text("".join(f"line {number} of a small text, {number * number}.\n" for number in range(120)))
    (path / "short.txt").write_text(text.read_text()[:200])
    (path / "recipe.toml").write_text(RECIPE.format(text=text))
    (path / "study.toml").write_text(STUDY.format(text=text))
    (path / "model.toml").write_text(MODEL)
