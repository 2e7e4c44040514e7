"""`twoaxis claims`: what it prints for people and machines, and its exit status."""

import dataclasses
import json
from typing import Any

import pytest

import twoaxis.claims
from twoaxis.claims import Finding, select
from twoaxis.cli import main


def test_prints_statement_verdict_and_evidence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["claims", "8"]) == 0
    out = capsys.readouterr().out
    (claim,) = select([8])
    assert out.startswith("8. The algebra of Deep Delta Learning: holds within 1e-12\n")
    said = " ".join(out.split())
    for text in (claim.statement, claim.source, claim.tested, *claim.compute().evidence):
        assert text in said
    assert "largest difference" in said


def test_ends_with_a_table_of_verdicts(capsys: pytest.CaptureFixture[str], tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.chdir(tmp_path)
    assert main(["claims", "17", "9"]) == 0
    table = capsys.readouterr().out.split("Verdicts")[1]
    assert [line.split()[0] for line in table.strip().splitlines()[1:] if line[:5].strip()] == ["9", "17"]
    assert "holds within 1e-11" in table


@pytest.mark.parametrize("columns", [80, 100, 300])
def test_lines_fit_the_terminal(columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["claims", "8", "13", "14", "15"]) in (0, 1)
    lines = capsys.readouterr().out.splitlines()
    assert 60 < max(map(len, lines)) <= min(columns, 110)
    # The rule by which a claim is decided is printed with it.
    assert "Rule:" in "\n".join(lines)


def test_verdicts_are_the_same_in_any_folder(capsys: pytest.CaptureFixture[str], tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    main(["claims", "13", "14", "15", "16", "--json"])
    here = capsys.readouterr().out
    monkeypatch.chdir(tmp_path)
    main(["claims", "13", "14", "15", "16", "--json"])
    assert capsys.readouterr().out == here


def test_json_gives_everything_and_comes_back(capsys: pytest.CaptureFixture[str], tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.chdir(tmp_path)
    assert main(["claims", "8", "13", "--json"]) in (0, 1)
    found = json.loads(capsys.readouterr().out)
    assert [one["number"] for one in found] == [8, 13]
    for one in found:
        (claim,) = select([one["number"]])
        finding = claim.find()
        # Tuples come back as lists; every number as it was.
        assert one == json.loads(json.dumps(claim.to_data(finding)))
        assert one["sentence"] == finding.sentence
        assert {each["what"]: each["difference"] for each in one["measured"]} == finding.measured
    assert found[1]["rule"] and not found[0]["rule"]
    assert all(link.startswith("studies/") for link in found[1]["links"])


@pytest.mark.parametrize(
    ("verdict", "status"),
    [
        ("does not hold", 1),
        ("does not hold at this scale", 1),
        ("not computed", 1),
        ("holds", 0),
        ("holds exactly", 0),
        ("undecided", 0),
        ("no study yet", 0),
    ],
)
def test_exit_status_is_1_for_a_claim_that_came_out_against(
    verdict: Any, status: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    decided = dataclasses.replace(select([8])[0], compute=lambda: Finding(verdict, evidence=("it was so",)))
    monkeypatch.setattr(twoaxis.claims, "CLAIMS", (decided,))
    assert main(["claims"]) == status
    out = capsys.readouterr().out
    assert verdict in out and "it was so" in out


@pytest.mark.parametrize("words", [["claims", "19"], ["claims", "0", "3"], ["claims", "many"]], ids=lambda w: " ".join(w))
def test_unknown_claim_is_one_line_and_exit_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.strip().splitlines()) == 1
