"""`python docs/engines.py`: writes `docs/engines.md`, the pairs of mixers that other inference engines can run."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from twoaxis import DEPTH, SEQUENCE, ConfigError, Decoder, DecoderConfig
from twoaxis.core.registry import Row, Table
from twoaxis.interop.engines import REASONS, obstacles

PAGE = Path(__file__).parent / "engines.md"
UNBUILT = "the two cannot stand in one model at all"
ALL_REASONS = (*REASONS, UNBUILT)

HEAD = """# Pairs that other engines can run

Written by `make docs`. An inference engine that runs models of transformers with its own attention keeps keys and values of one
attention per block and nothing else. What that leaves of this library, by depth mixer (rows) and sequence mixer (columns) with
their variants from `twoaxis list`: ✓ runs, a number is the reason why not.

"""

TAIL = """
Whatever the pair: one attention in each block, the same heads everywhere, full attention and at most one window. A block such
as `["short_swa", "attention", "swiglu"]` becomes two, `["short_swa"]` and `["attention", "swiglu"]`. `twoaxis export --to vllm`
refuses what cannot run and says why.

## What was tested

Up to three variants of each depth mixer run with each sequence mixer that has a ✓, inside a small engine of the tests that is
written from the calling contract of vLLM's Transformers backend: pages of keys and values outside the model, prompts of several
requests in one call, cut in chunks and mixed with single tokens of others. Logits equal those of the model's own pass to 1e-10
in float64. **vLLM and SGLang themselves were not run**; their side of the contract was read in their source, in versions that
support transformers 5.

## How each engine finds a model

* **vLLM**: `twoaxis export RUN --to vllm --out DIR`, then `vllm serve DIR` where twoaxis is installed too. Its entry point
  `vllm.general_plugins` has vLLM run the architecture through its Transformers backend; no code comes with the folder, and
  nothing needs to be trusted.
* **SGLang**: `twoaxis export RUN --to sglang --out DIR`, then `--model-impl transformers --trust-remote-code`. The folder holds
  a line of code that imports twoaxis. It asks for the same two things as vLLM, keyword arguments that reach attention and
  `_supports_attention_backend`, so the same pairs are expected to run.
* **`transformers serve`**: not at all, since it looks architectures up in transformers itself; use `twoaxis serve`.

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
    columns = list(grouped(SEQUENCE, lambda sequence: answer(DEPTH["residual"].config(), sequence)))
    sequences = [group.row.example(group.names[0]) for group in columns]
    rows = grouped(DEPTH, lambda depth: tuple(answer(depth, sequence) for sequence in sequences))
    lines = ["| | " + " | ".join(group.label for group in columns) + " |", "|---" * (len(columns) + 1) + "|"]
    lines += [f"| {group.label} | " + " | ".join(map(written, group.answers)) + " |" for group in rows]
    reasons = [f"{number}. {reason[0].upper()}{reason[1:]}." for number, reason in enumerate(ALL_REASONS, 1)]
    return HEAD + "\n".join([*lines, "", *reasons, ""]) + TAIL


def pair(depth: Any, sequence: Any) -> DecoderConfig:
    """A small model of both mixers."""
    return DecoderConfig(vocab_size=11, d_model=8, n_layers=3, depth=depth, blocks=((sequence, "swiglu"),))


def answer(depth: Any, sequence: Any) -> tuple[str, ...]:
    """The reasons why an engine cannot run this pair; empty if it can."""
    try:
        config = pair(depth, sequence)
    except ConfigError:
        return (UNBUILT,)
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


def written(reasons: tuple[str, ...]) -> str:
    """A cell."""
    return ", ".join(str(ALL_REASONS.index(reason) + 1) for reason in reasons) or "✓"


if __name__ == "__main__":
    sys.exit(main())
