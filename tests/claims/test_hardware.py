"""The claim about hardware can come out for, against and open; the benchmarks that it cites are those of the repository."""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from twoaxis.claims import benchmarks, chunks, hardware, select
from twoaxis.claims.benchmarks import KEPT, KeptTable, Ratio, kept_table, kept_tables
from twoaxis.core.measure import saved_bytes
from twoaxis.ledger.meter import DTYPES, without_memory
from twoaxis.ops.local_attention import local_attention

from ..scripts import DOCS, load_script

Patch = pytest.MonkeyPatch

FAST, SLOW = "1.10 (1.05..1.15)", "1.90 (1.80..2.00)"
CHEAP, EXPENSIVE = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script(DOCS / "kept_benchmarks.py")


def plant(patch: Patch, swa: str | None, depth: str, swa_bytes: Any, depth_bytes: Any) -> None:
    """Doctored results of both axes, and bytes that each placement adds."""

    def table(title: str, column: str, rows: list[list[str]]) -> KeptTable:
        return KeptTable("benchmarks/results/doctored.md", {"machine": "a machine", "torch": "0"}, title, ("x", column), rows)

    reads = table("Depth mixers, some", "step (min..max)", [[name, depth] for name in hardware.TIMED])
    windows = table("Training step of a decoder with local mixing", "ratio", [["short_swa 16", swa or FAST]])
    patch.setattr(benchmarks, "kept_tables", lambda path: (reads, windows) if swa else ())
    patch.setattr(hardware, "added", lambda size, depth: swa_bytes if depth is None else depth_bytes)


@pytest.mark.parametrize(
    ("swa", "depth", "swa_bytes", "depth_bytes", "verdict"),
    [
        (FAST, SLOW, CHEAP, EXPENSIVE, "holds"),
        (SLOW, FAST, EXPENSIVE, CHEAP, "does not hold at this scale"),
        (SLOW, FAST, CHEAP, CHEAP, "does not hold at this scale"),
        (SLOW, FAST, CHEAP, EXPENSIVE, "undecided"),
        (FAST, FAST, CHEAP, EXPENSIVE, "undecided"),
        (None, FAST, CHEAP, EXPENSIVE, "undecided"),
        (FAST, SLOW, (0.0, 0.04, 0.04), (0.04, 0.0, 0.0), "undecided"),
    ],
    ids=["for", "against", "seconds against", "they disagree", "ranges overlap", "no benchmark", "nothing material"],
)
def test_hardware_says_each_verdict(
    swa: str | None, depth: str, swa_bytes: Any, depth_bytes: Any, verdict: str, monkeypatch: Patch
) -> None:
    plant(monkeypatch, swa, depth, swa_bytes, depth_bytes)
    (claim,) = select([12])
    found = claim.find()
    assert found.verdict == verdict, found.evidence
    assert (f"in {KEPT}." in " ".join(found.evidence)) == (swa is None)
    assert found.links == (("benchmarks/results/doctored.md",) if swa else ())


def test_the_numbers_of_the_repository_are_used(monkeypatch: Patch) -> None:
    # The page of docs, which a test of its own computes anew, has all of them.
    reads = {name: hardware.DEPTH_READS[name] for name in ("depth attention, K = 8", "depth attention, all states")}
    monkeypatch.setattr(hardware, "SIZES", hardware.SIZES[-1:])
    monkeypatch.setattr(hardware, "DEPTH_READS", reads)
    (claim,) = select([12])
    found = claim.find()
    assert found.table is not None
    assert len(found.table.rows) == 1 + len(reads)
    # A read of all 16 earlier states of 32 blocks sends a key and a value of each through the middle boundary.
    row = next(row for row in found.table.rows if row[:2] == ("32 x 4096", "depth attention, all states"))
    assert row[3] == "+3,200.0 %"
    local, depth = kept_table("Training step of a decoder with local mixing"), kept_table("Depth mixers")
    assert local is not None and depth is not None and found.links == ("benchmarks/results/cpu.md",)
    assert f"short_swa 16, {local.ratios('ratio')['short_swa 16']}" in " ".join(found.evidence)
    own = depth.ratios("step")["depth_attention 8, own"]
    assert f"own matrices before every sublayer {own}" in " ".join(found.evidence)


@pytest.mark.parametrize("size", hardware.SIZES, ids=lambda size: size.name)
def test_the_mask_is_what_the_engine_saves_beyond_keys_and_outputs(size: hardware.Size) -> None:
    T, heads, width = size.shape.tokens, size.heads, size.width // size.heads
    length = max(size.window, 32)
    n, span = -(-T // length), length + size.window - 1
    queries, outputs = (size.shape.batch * heads * n * length * width for _ in range(2))
    keys, statistics = 2 * size.shape.batch * n * span * width, size.shape.batch * heads * n * length
    with without_memory("eager"):
        dtype = DTYPES[size.shape.element_bytes]
        q, k, v = (torch.empty(size.shape.batch, n, T, width, dtype=dtype, requires_grad=True) for n in (heads, 1, 1))
        saved = saved_bytes(lambda: local_attention(q, k, v, window=size.window), lambda _: [q, k, v])
    mask = saved - (queries + outputs + keys) * size.shape.element_bytes - statistics * 4
    assert hardware.mask_bytes(size) == size.layers * mask > 0


def test_the_file_is_up_to_date(script: ModuleType) -> None:
    assert KEPT.read_text(encoding="utf-8") == script.text(), "run `make docs`"


def test_tables_are_read_with_their_headings_and_machine(script: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "some.md"
    text = "* machine: a box\n* torch: 2\n\n### One\n\n| a | b |\n|---|---|\n| x | **1.00** (0.90..1.10) |\n\nwords\n\n"
    text += "| c |\n|---|\n| 3 |\n"
    path.write_text(text, encoding="utf-8")
    first, second = (KeptTable(**table) for table in script.tables(path))
    assert (first.title, first.where, first.rows) == ("One", "a box, torch 2", [["x", "1.00 (0.90..1.10)"]])
    assert first.ratios("b") == {"x": Ratio(1.0, 0.9, 1.1)}
    assert (second.columns, second.rows) == (["c"], [["3"]])


def test_benchmarks_do_not_depend_on_the_working_directory(tmp_path: Path, monkeypatch: Patch) -> None:
    here = kept_tables()
    kept_tables.cache_clear()
    monkeypatch.chdir(tmp_path)
    assert kept_tables() == here and here


def test_a_missing_file_is_no_table_and_refutes_nothing(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(benchmarks, "KEPT", tmp_path / "none.json")
    assert kept_table("Depth mixers") is None
    assert chunks.growth() == "Time is measured in benchmarks alone; none is kept."


def test_growth_is_that_of_the_kept_result() -> None:
    bounds = kept_table("Bounds")
    assert bounds is not None
    (row,) = (row for row in bounds.rows if row[0].startswith(chunks.TIMES))
    assert f": {row[bounds.columns.index('measured (min..max)')]} ({bounds.machine['machine']}, " in chunks.growth()


def test_growth_is_read_by_the_name_of_its_column(monkeypatch: Patch) -> None:
    """The table of bounds once began with what is measured, and now with the absolute value."""
    row = [f"{chunks.TIMES} (linear is 4)", "2 ms", "-", "4.50 x", "at most 6 x", "yes"]
    columns = ("what", "ours", "best other", "measured (min..max)", "bound", "kept")
    machine = {"machine": "a machine", "torch": "0"}
    windows, bounds = (
        KeptTable("a.md", machine, "Windowed attention", ("x",), ()),
        KeptTable("a.md", machine, "Bounds", columns, [row]),
    )
    monkeypatch.setattr(benchmarks, "kept_tables", lambda path: (windows, bounds))
    assert "(linear is 4): 4.50 x (a machine" in chunks.growth()
