"""`twoaxis claims`: what it prints for people and machines, and its exit status."""

import dataclasses
import json

import pytest

import twoaxis.claims
from twoaxis.claims import Finding, select
from twoaxis.cli import main


def test_prints_statement_verdict_and_evidence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["claims", "8"]) == 0
    out = capsys.readouterr().out
    (claim,) = select([8])
    assert out.startswith("8. The algebra of Deep Delta Learning: holds within 1e-12\n")
    for text in (claim.statement, claim.source, claim.tested, *claim.compute().evidence):
        assert text in out
    assert "largest difference" in out


def test_ends_with_a_table_of_verdicts(capsys: pytest.CaptureFixture[str], tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.chdir(tmp_path)
    assert main(["claims", "10", "9"]) == 0
    table = capsys.readouterr().out.split("Verdicts")[1]
    assert [line.split()[0] for line in table.strip().splitlines()[1:]] == ["9", "10"]
    assert "undecided" in table and "holds within 1e-11" in table


def test_json_gives_everything_and_comes_back(capsys: pytest.CaptureFixture[str], tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.chdir(tmp_path)
    assert main(["claims", "8", "10", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["number"] for one in found] == [8, 10]
    for one in found:
        (claim,) = select([one["number"]])
        finding = claim.find()
        # Tuples come back as lists; every number as it was.
        assert one == json.loads(json.dumps(claim.to_data(finding)))
        assert one["sentence"] == finding.sentence
        assert one["measured"] == finding.measured
    assert found[1]["table"]["rows"][0][1] == found[1]["links"][0] == "studies/depth_retrieval.toml"


def test_a_claim_that_does_not_hold_is_exit_1(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    refuted = dataclasses.replace(select([8])[0], compute=lambda: Finding("does not hold", evidence=("it was not so",)))
    monkeypatch.setattr(twoaxis.claims, "CLAIMS", (refuted,))
    assert main(["claims"]) == 1
    out = capsys.readouterr().out
    assert "does not hold" in out and "it was not so" in out


@pytest.mark.parametrize("words", [["claims", "11"], ["claims", "0", "3"], ["claims", "many"]], ids=lambda w: " ".join(w))
def test_unknown_claim_is_one_line_and_exit_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.strip().splitlines()) == 1
