"""The table of methods: all of them, with counts that formulas by hand give, and losses of valid studies only."""

import json
from typing import Any, Literal

import pytest

from twoaxis import DEPTH
from twoaxis.cli import main
from twoaxis.core.design import MixingDesign
from twoaxis.core.kept_reports import KeptReport
from twoaxis.core.registry import Row, Table
from twoaxis.depth import DepthConfig, ResidualConfig
from twoaxis.planner import design_table as module
from twoaxis.planner.design_table import MethodRow, design_table
from twoaxis.planner.ledger import ledger
from twoaxis.planner.methods import methods
from twoaxis.planner.model import read_model
from twoaxis.planner.quantities import Precision

D, BLOCKS = 4096, 32
SUBLAYERS = 2 * BLOCKS
PLAIN = {"depth": {"kind": "residual"}, "mixers": {"attention": 2, "swiglu": 2}}


@pytest.fixture(scope="module")
def rows() -> dict[str, MethodRow]:
    return {row.name: row for row in design_table(())}


def test_every_method_has_a_row(rows: dict[str, MethodRow]) -> None:
    assert {method.name for method in methods()} <= set(rows)
    assert {row.kind for row in DEPTH} <= {row.kind for row in rows.values()}
    assert next(iter(rows)) == "residual"


def test_only_depth_attention_with_shared_matrices_over_block_states_is_literal() -> None:
    literal = {(row.kind, name) for row in DEPTH for name in row.examples if row.example(name).design.literal}
    examples = DEPTH["depth_attention"].examples
    assert literal == {
        ("depth_attention", name)
        for name, options in examples.items()
        if options.get("projections", "shared") == "shared" and options.get("granularity", "block") == "block"
    }
    assert 0 < len(literal) < len(examples)


def test_counts_are_those_of_formulas(rows: dict[str, MethodRow]) -> None:
    params = {name: row.counts.params for name, row in rows.items()}
    # W_Q, W_K, W_V and W_O once, and the gain of the norm; two vectors for each read but the first, and one more read.
    assert params["Depth ShortSWA"] == 4 * D * D + D
    assert params["AttnRes full"] == 2 * D * SUBLAYERS
    assert params["DenseFormer 1x1"] == BLOCKS * (BLOCKS + 3) // 2
    assert params["residual scalars"] == 2 * SUBLAYERS
    sent = {name: row.counts.boundary_bytes_per_token for name, row in rows.items()}
    assert sent["residual"] == 2 * D
    assert sent["DDL"] == sent["ShortSWA w=128"] == 0
    assert sent["mHC"] == 3 * 2 * D
    # Keys and values of seven earlier states.
    assert sent["Depth ShortSWA"] == 7 * 2 * 2 * D
    # A constant factor on a norm saves nothing.
    assert {name for name, row in rows.items() if row.counts.saved_bytes_per_token <= 0} == {"LayerNorm scaling"}


def test_the_control_is_the_whole_model(rows: dict[str, MethodRow]) -> None:
    counts, control = (
        ledger(read_model(module.PRESET), tokens=module.TOKENS, precision=Precision(), engine="fused"),
        rows["residual"],
    )
    assert control.counts.params == counts.params["all"]
    assert control.counts.flops_per_token == counts.forward_flops["all"]
    assert control.counts.saved_bytes_per_token == counts.saved_bytes / module.TOKENS


def report(arms: dict[str, Any], passed: bool = True) -> KeptReport:
    compared = {"paired_differences": [-0.5, -0.5], "mean_difference": -0.5, "ci95": [-0.75, -0.25], "verdict": "better"}
    data = {"control": {"control": True, "role": "control", **PLAIN}}
    for name, mixers in arms.items():
        role = "companion" if "~" in name else "treatment"
        data[name] = {"control": False, "role": role, "charged": {"tokens": {"comparison": compared}}, **PLAIN, **mixers}
    gate = {"passed": passed, "sentence": "Gate."}
    return KeptReport("study", "current", "s.json", {"question": "?", "complete": True, "gate": gate, "arms": data})


ARMS = {
    "block_attnres": {"depth": {"kind": "attention_residuals", "block_size": 4}},
    "code_target": {"depth": {"kind": "deep_delta", "value_target": "code"}},
    "own_matrices": {"depth": {"kind": "depth_attention", "projections": "own"}},
    # Records from before these had options, so what they have is not today's default.
    "old_depth_attention": {"depth": {"kind": "depth_attention", "window": 8, "mode": "add"}},
    "old_scalars": {"depth": {"kind": "residual_scalars"}},
    "more_attention": {"mixers": {**PLAIN["mixers"], "attention": 4}},
    "swa": {"mixers": {**PLAIN["mixers"], "short_swa": 2}},
    "conv~generated": {"mixers": {**PLAIN["mixers"], "short_conv": 2}},
    "both": {"depth": {"kind": "denseformer"}, "mixers": {**PLAIN["mixers"], "short_swa": 2}},
    "canon": {"mixers": {**PLAIN["mixers"], "attention+canon": 2}},
}


def test_losses_are_those_of_arms_with_the_method_and_nothing_else() -> None:
    found = {row.name: [(study, pair.arm) for study, pair in row.losses] for row in design_table((report(ARMS),))}
    assert {name: arms for name, arms in found.items() if arms} == {
        "AttnRes blocks": [("study", "block_attnres")],
        "AttnRes blocks, two-phase": [("study", "block_attnres")],
        "ShortSWA w=128": [("study", "swa")],
    }


def test_a_study_that_did_not_pass_its_gate_gives_no_loss() -> None:
    assert not any(row.losses for row in design_table((report(ARMS, passed=False),)))


class Outside(ResidualConfig):
    kind: Literal["outside"] = "outside"  # type: ignore[assignment]

    @property
    def design(self) -> MixingDesign:
        return super().design


def test_a_mixer_of_another_package_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    table: Table[DepthConfig] = Table("depth mixer", DepthConfig, "no.such.group", [*DEPTH, Row(Outside, "", {"default": {}})])
    monkeypatch.setattr(module, "DEPTH", table)
    (row,) = (row for row in design_table(()) if row.kind == "outside")
    assert (row.axis, row.counts.params, row.design) == ("depth", 0, ResidualConfig().design)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def test_it_reads_at_80_columns(terminal: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    made = design_table((report(ARMS),))
    monkeypatch.setattr(module, "design_table", lambda: made)
    assert main(["list", "--design"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "section 2.2: Depth ShortSWA." in out and "1 for the model" in out and "none of this form" in out
    text = " ".join(out.split())
    assert "\N{MINUS SIGN}0.500" in text and "n = 2" in text


def test_json_has_all_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "sequence", "--design", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["shape"].startswith("dense-7b: 32 blocks")
    by_name = {row["name"]: row for row in found["methods"]}
    assert set(by_name) == {method.name for method in methods() if method.axis == "sequence"}
    assert by_name["ShortConv"]["design"]["weights"] == "static"
    assert [loss["study"] for loss in by_name["ShortConv"]["losses"]] == ["local", "local_mixing"]


def test_an_axis_without_designs_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "local", "--design"]) == 2
    assert "axis='local': must be depth or sequence with --design" in capsys.readouterr().err
