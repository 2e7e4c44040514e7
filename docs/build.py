"""`python docs/build.py`: writes a page and a schematic per mixer, the pages of checks, claims, the planner, and each study.

With names of the planner's pages, as in `python docs/build.py published`, it writes only these.
Texts of a page come from the docstring, the claim or the report, numbers from declared FLOPs, traced memory, the computation or
the report, and figures from running the mixer or from the report.
"""

import json
import re
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from twoaxis.claims import CLAIMS, Claim, Finding
from twoaxis.claims.claim import PAPER
from twoaxis.cli.list import AXES, COSTS, cost_cells, design_cells, loss_cell
from twoaxis.cli.models import REFERENCE_SHAPE, REFERENCE_STACK, depth_cost, depth_trace
from twoaxis.core.design import LETTERS
from twoaxis.core.registry import sections, source
from twoaxis.depth import DEPTH, DepthConfig
from twoaxis.planner.design_table import MethodRow, design_table, stated_shape

# So that modules next to this file are found if a test loads it.
sys.path.append(str(Path(__file__).parent))
from markup import escaped as _escaped
from markup import table as _table
from planner.published.page import published_figure, published_page
from planner.scale import scale_data, scale_text
from planner.scale.figures import scale_figures
from planner.scale.page import scale_page
from reference_pages import checks_page, state_maps_page
from relations import relation_rows
from schematics import schematic
from study_pages import questions, studies_index, study_page

DOCS = Path(__file__).parent
README = DOCS.parent / "README.md"
MIXERS = DOCS / "mixers"
STUDIES = DOCS / "studies"
PLANNER = DOCS / "planner"
FIXTURES = DOCS.parent / "tests" / "parity" / "fixtures"
TITLES = {
    "depth": "The depth axis",
    "sequence": "The sequence axis",
    "feed_forward": "Feed-forwards",
    "local": "Inside a sublayer",
}


READS = {
    "depth": "What each sublayer reads of the embedding and of earlier updates, measured in a small model",
    "sequence": "What each token reads of earlier tokens, measured at toy size",
    "local": "What each token reads of earlier tokens, measured at toy size",
}
"""What the schematic of a mixer shows; a feed-forward has none, since it reads its own token only."""


def main(*names: str) -> int:
    """Writes docs/mixers, docs/studies, docs/planner and docs/claims.md, or only the named pages of the planner."""
    PLANNER.mkdir(exist_ok=True)
    if unknown := set(names) - set(PLANNER_PAGES):
        print(
            f"docs/build.py: no page {sorted(unknown)[0]!r}; choose from {', '.join(PLANNER_PAGES)}, or none for all",
            file=sys.stderr,
        )
        return 2
    for name in names or PLANNER_PAGES:
        PLANNER_PAGES[name]()
    if names:
        return 0
    shutil.rmtree(MIXERS, ignore_errors=True)
    for axis, table in AXES.items():
        (MIXERS / axis).mkdir(parents=True)
        for row in table:
            (MIXERS / axis / f"{row.kind}.md").write_text(page(axis, row), encoding="utf-8")
            if drawing := schematic(axis, row):
                (MIXERS / axis / f"{row.kind}.svg").write_text(drawing, encoding="utf-8")
    (MIXERS / "README.md").write_text(index(), encoding="utf-8")
    write_readme()
    (DOCS / "checks.md").write_text(checks_page(), encoding="utf-8")
    (DOCS / "state_maps.md").write_text(state_maps_page(), encoding="utf-8")
    (DOCS / "claims.md").write_text(claims_page(), encoding="utf-8")
    shutil.rmtree(STUDIES, ignore_errors=True)
    STUDIES.mkdir()
    for name in questions():
        (STUDIES / f"{name}.md").write_text(study_page(name), encoding="utf-8")
    (STUDIES / "README.md").write_text(studies_index(), encoding="utf-8")
    return 0


def write_readme() -> None:
    """Writes the names of all mixers into the README."""
    lines = README.read_text(encoding="utf-8").splitlines(keepends=True)
    for axis, names in readme_names().items():
        (index,) = (index for index, line in enumerate(lines) if line.startswith(f"| {axis} |"))
        lines[index] = f"| {axis} | {names} |\n"
    README.write_text("".join(lines), encoding="utf-8")


def readme_names() -> dict[str, str]:
    """The mixers of each table with links to their pages, by the words before them."""
    words = {
        "along depth": "depth",
        "along positions": "sequence",
        "inside a sublayer": "local",
        "feed-forwards": "feed_forward",
    }
    return {
        start: ", ".join(f"[{row.kind}](docs/mixers/{axis}/{row.kind}.md)" for row in AXES[axis])
        for start, axis in words.items()
    }


def write_published() -> None:
    """Writes the page that compares predictions of the planner with published numbers."""
    (PLANNER / "published.md").write_text(published_page("published.svg"), encoding="utf-8")
    (PLANNER / "published.svg").write_text(published_figure().svg(), encoding="utf-8")


def write_scale() -> None:
    """Writes the page of the costs of every method at three shapes and three contexts."""
    data = scale_data()
    (PLANNER / "scale.json").write_text(scale_text(data), encoding="utf-8")
    (PLANNER / "scale.md").write_text(scale_page(data), encoding="utf-8")
    for figure in scale_figures(data):
        (PLANNER / f"{figure.name}.svg").write_text(figure.svg(), encoding="utf-8")


def write_design() -> None:
    """Writes the table of methods."""
    (DOCS / "design.md").write_text(design_page(), encoding="utf-8")


PLANNER_PAGES = {"design": write_design, "published": write_published, "scale": write_scale}


def design_page() -> str:
    """Every method by how it forms its weights, its costs at one shape, and its loss in valid studies."""
    rows = design_table()
    columns = list(design_cells(rows[0]))
    literal = ", ".join(row.name for row in rows if row.design.literal)
    names = [f"[{row.name}](mixers/{_folder(row.kind)}/{row.kind}.md)" for row in rows]
    designs = [(*design_cells(row).values(),) for row in rows]
    costs = [(*cost_cells(row), loss_cell(row)) for row in rows]
    rebuilt = ", ".join(row.name for row in rows if row.kind in DEPTH and DEPTH[row.kind].status == "contrib")
    lines = [
        "# Methods, side by side\n",
        "Every method of the depth axis, and of the sequence axis ShortSWA, ShortConv, Canon and KV shift: what asks for "
        "sources, what is summed, who shares the parameters, and where the sum goes; then what it costs and what it does to "
        "the loss. Generated by `make docs`; `twoaxis list --design` prints the same, with `--json` all of it.\n",
        f"**Literal instance of arXiv:2603.16039, section 2.2: {literal}.** One W_Q, W_K and W_V for all depths, as sequence "
        "attention has one for all positions, over a window of states between blocks. The paper leaves open where the read "
        "goes, so the injection decides nothing here. ELC-BERT and DenseFormer are named there as no instances.\n".replace(
            "_", "\\_"
        ),
        "## How weights are formed\n",
        _escaped(LETTERS) + "\n",
        *_linked_table(("method", *columns), names, designs),
        "*weights*: what they depend on apart from parameters; *reader* is the newest state, beyond its competing as a source. "
        "Factors of norms are no weights. *earlier tokens*: whether they enter. *sets of parameters*: that make weights and "
        "values; those of the sequence axis are shared by all positions. Checks in `twoaxis check depth` measure on each "
        "depth mixer what weights depend on, how parameters are shared, and whether sources grow in number with depth. "
        f"Reconstructed without the authors' text or code: {rebuilt}.\n",
        "## What each costs, and its loss\n",
        f"{_escaped(stated_shape())}. The first row is the whole control, all others are beyond it. All but parameters are "
        "per token. *saved*: kept for the backward pass. *sent*: over the stage boundary that carries most. *loss*: nats per "
        "token minus the control's, with the interval of the verdict, from studies whose control passed the validity gate, "
        "if the arm has this form; sizes, such as windows, may differ, and other forms are on the pages of the studies; "
        f"{_valid_studies(rows)}.\n",
        *_linked_table(("method", *COSTS, "loss"), names, costs),
        "## Special cases\n",
        "Both methods around the same sublayers, in float64 and away from initial values; parameters that both have are equal. "
        "*difference*: the largest one of logits, over their largest magnitude. About 1e-6 is the eps of a norm that enters "
        "twice or at another scale. A test computes every row.\n",
        *_table(("special case", "of", "with", "difference"), relation_rows()),
    ]
    return "\n".join(lines)


def _valid_studies(rows: Iterable[MethodRow]) -> str:
    names = sorted({study for row in rows for study, _ in row.losses})
    return f"there are {len(names)}: {', '.join(names)}" if names else "there is none yet"


def _folder(kind: str) -> str:
    """The axis of a mixer, which is the folder of its page."""
    return next(axis for axis, table in AXES.items() if kind in table)


def _linked_table(columns: Iterable[str], names: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """A table whose first column is Markdown already."""
    head, rule, *body, last = _table(columns, [("", *row) for row in rows])
    return [head, rule, *(f"| {name} {line[3:]}" for name, line in zip(names, body, strict=True)), last]


def index() -> str:
    """The page that lists all pages."""
    lines = ["# Mixers\n", "Generated by `make docs`; one page each, from docstrings, declared costs and runs.\n"]
    lines += [
        "Evidence: a *certified* form equals public code in outputs and all gradients (golden tensors of tests/parity): code "
        "run as it is or, where a page says *transcribed*, its lines in a frame of ours, since its repository does not run "
        "here. The operator counts, whatever its sizes. A *reconstructed* form follows a text, a listing or code that was "
        "changed, or is an option of ours. The column gives the status of the default form, then the forms whose status "
        "differs.\n"
    ]
    for axis, table in AXES.items():
        lines += [f"## {TITLES[axis]}\n", "| kind | what it does | source | evidence |", "|---|---|---|---|"]
        for row in table:
            link = f"[{row.kind}]({axis}/{row.kind}.md)"
            lines.append(f"| {link} | {row.summary} | {_escaped(source(row.config))} | {row.evidence} |")
        lines.append("")
    return "\n".join(lines)


def page(axis: str, row: Any) -> str:
    """The page of one mixer."""
    said = sections(row.config)
    lines = [f"# {row.kind}\n", said["Summary"] + "\n"]
    if axis in READS:
        lines += [f"![{READS[axis]}]({row.kind}.svg)\n", f"*{READS[axis]}; all mixers share the scale.{_heads(axis, row)}*\n"]
    lines += ["```text", said["Equation"], "```\n"] if "Equation" in said else []
    for name in ("Source", "Deviates", "Shapes", "Init", "Cost", "Places", "Published", "Further", "Raises"):
        if name in said:
            lines += [f"**{name}.** {_escaped(said[name])}\n"]
    if "Args" in said:
        lines += ["**Options.**\n", *_options(said["Args"], row.config.model_fields), ""]
    if axis == "depth":
        equivalence = row.config().init_equivalence
        relation = equivalence.relation.replace("_", " ")
        lines += [f"**Fresh model against the plain one.** {relation}: {_escaped(equivalence.reason)}\n"]
        lines += _cost_table(row.config())
    lines += [f"**Evidence.** {_evidence(row)}\n"]
    lines += [f"**Status.** {row.status}. Try `twoaxis show {row.kind}` and `twoaxis check {axis}`.\n"]
    return "\n".join(lines)


def _heads(axis: str, row: Any) -> str:
    """A remark on depth mixers whose reads are not all there is to see."""
    if axis != "depth":
        return ""
    config = row.example(next(iter(row.examples)))
    with torch.device("meta"):
        mixers, _ = config.build(config.prepare(REFERENCE_STACK))
    if not any(mixer.mixes_heads for mixer in mixers):
        return ""
    return " It also mixes heads inside attention, which is not drawn."


def _evidence(row: Any) -> str:
    """The forms that equal public code, with their golden tensors, and the forms that follow a text."""
    shown = ", ".join(f"{name} (`{fixture}`{_transcribed(fixture)})" for name, fixture in row.certified.items())
    rest = ", ".join(name for name in row.examples if name not in row.certified)
    said = [f"Certified by golden tensors of public code: {shown}."] if shown else []
    return " ".join([*said, *([f"Reconstructed from text, or options of ours: {rest}."] if rest else [])])


def _transcribed(fixture: str) -> str:
    """Whether the code behind golden tensors ran as it is, by what the fixture says of itself."""
    about = json.loads((FIXTURES / f"{fixture}.json").read_text(encoding="utf-8"))
    return ", transcribed" if "transcribed" in json.dumps(about).lower() else ""


def claims_page() -> str:
    """The page of the paper's claims; measured differences stay off it, since each machine has its own."""
    # An error of a computation is no verdict for a page.
    found = [(claim, claim.compute()) for claim in CLAIMS]
    lines = [
        "# The claims of the paper\n",
        f"*Residual Stream Duality in Modern Transformer Architectures*, {PAPER}, claim by claim, in our words; sections are "
        "numbered as in its authors' PDF. Claims 1 to 11 are computed, claim 12 weighs bytes and kept benchmarks, claims 13 to "
        "18 need training and are decided by kept studies. Computed by `make docs`; `twoaxis claims` computes them on your "
        "machine and adds the largest differences found there.\n",
        "| claim | verdict |",
        "|---|---|",
        *(f"| {claim.number}. {claim.title} | {finding.sentence} |" for claim, finding in found),
        "",
    ]
    for claim, finding in found:
        lines += _claim(claim, finding)
    return "\n".join(lines)


def _claim(claim: Claim, finding: Finding) -> list[str]:
    lines = [f"## {claim.number}. {claim.title}\n", f"{_escaped(claim.statement)}\n"]
    lines += [f"**Source.** {_escaped(claim.source)}\n", f"**Tested.** {_escaped(claim.tested)}\n"]
    lines += [f"**Rule.** {_escaped(claim.rule)}\n"] if claim.rule else []
    lines += [f"**Verdict.** {finding.sentence}\n", *(f"* {_escaped(line)}" for line in finding.evidence), ""]
    if finding.table is not None:
        lines += _table(finding.table.columns, finding.table.rows)
    if finding.links:
        lines += ["Files: " + ", ".join(f"[{link}](../{link})" for link in finding.links) + "\n"]
    return lines


def _options(text: str, names: Iterable[str]) -> list[str]:
    """One item for each `name: meaning`, which may take several lines."""
    items = re.split(rf"\n(?=(?:{'|'.join(names)}): )", text)
    return [f"* `{name}`: {_escaped(meaning)}" for name, _, meaning in (item.partition(": ") for item in items)]


def _cost_table(config: DepthConfig) -> list[str]:
    stack = config.prepare(REFERENCE_STACK)
    total, traced = depth_cost(config), depth_trace(config)
    operations = (*traced.sublayers, traced.ends)
    tokens = REFERENCE_SHAPE.total_tokens
    rows = {
        "parameters added": total.params,
        "flops per token, forward": total.flops // tokens,
        "numbers per token in the last state": traced.state_elements(stack.n_sublayers),
        "bytes per token saved for backward, beyond states": sum(operation.saved for operation in operations) // tokens,
        "bytes cached after 512 tokens": sum(operation.cache for operation in operations),
    }
    lines = [
        "**Cost** in 12 blocks of attention and SwiGLU, width 256, 512 tokens, float32; parameters and FLOPs are declared, the "
        "state and bytes traced:\n",
        "| what | count |",
        "|---|---|",
    ]
    return [*lines, *(f"| {what} | {count:,} |" for what, count in rows.items()), ""]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
