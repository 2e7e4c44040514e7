"""The table of mutants stays true: every place is still there, once, and every test that is named exists."""

import shlex

import pytest

from .run import ROOT, Mutant, mutants

ALL = mutants()


@pytest.mark.parametrize("mutant", ALL, ids=lambda mutant: mutant.name)
def test_a_mutant_can_be_planted(mutant: Mutant) -> None:
    changed = mutant.mutated(ROOT)
    if mutant.file.endswith(".py"):
        compile(changed, mutant.file, "exec")
    assert mutant.new != mutant.old and mutant.why
    assert mutant.tests and all((ROOT / shlex.split(tests)[0]).exists() for tests in mutant.tests)


def test_there_are_enough_of_them_and_each_has_its_name() -> None:
    assert len(ALL) >= 20 and len({mutant.name for mutant in ALL}) == len(ALL)
    folders = {mutant.file.split("/")[2] for mutant in ALL}
    assert {"core", "ops", "depth", "sequence", "local", "checkpoints"} <= folders
