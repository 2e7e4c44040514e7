"""Plants every mutant in a copy of the sources, runs its tests there, and prints which of them noticed; run it as a script.

`python tests/mutants/run.py [WORDS]` takes the mutants whose names hold these words. It ends with 1 if one survives, and with 2
if the tests fail without a mutant. It is no part of `make test`, which takes seconds where this takes minutes.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
COPIED = ("src", "tests", "conftest.py", "pyproject.toml")


@dataclass(frozen=True)
class Mutant:
    """One change: what stands once in a file, what stands there instead, and the tests that have to notice."""

    name: str
    why: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def mutated(self, root: Path) -> str:
        """The file with the change.

        Raises:
            ValueError: a place that is not there, or there more than once.
        """
        text = (root / self.file).read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: {self.old!r} stands {text.count(self.old)} times in {self.file}, must be once")
        return text.replace(self.old, self.new)


def mutants() -> list[Mutant]:
    """All of them, as the table has them."""
    table = tomllib.loads(Path(__file__).with_name("mutants.toml").read_text())
    return [Mutant(**{**entry, "tests": tuple(entry["tests"])}) for entry in table["mutant"]]


def failures(root: Path, tests: str) -> list[str]:
    """The first test that fails in a copy, by its id; nothing when all pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *shlex.split(tests)]
    environment = {**os.environ, "PYTHONPATH": str(root / "src"), "PYTHONDONTWRITEBYTECODE": "1", "CONFORMANCE": "every"}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        # Such as a mutant that cannot be imported: no test of ours has said what is wrong.
        raise SystemExit(f"pytest {tests} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    found = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return found or ["a test without a name"] * done.returncode


def killer(root: Path, mutant: Mutant) -> str | None:
    """The test that notices a mutant, or None."""
    file = root / mutant.file
    right = file.read_text()
    file.write_text(mutant.mutated(root))
    try:
        return next((found for tests in mutant.tests for found in failures(root, tests)), None)
    finally:
        file.write_text(right)


def main() -> int:
    """Runs those that are asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("words", nargs="*", help="only mutants whose name holds one of these")
    words = parser.parse_args().words
    chosen = [mutant for mutant in mutants() if not words or any(word in mutant.name for word in words)]
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name in COPIED:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, root / name)
        for tests in dict.fromkeys(tests for mutant in chosen for tests in mutant.tests):
            if failed := failures(root, tests):
                print(f"fails without a mutant: {failed[0]}", file=sys.stderr)
                return 2
        for mutant in chosen:
            found = killer(root, mutant)
            survivors += found is None
            print(
                f"{'SURVIVED' if found is None else 'killed  '} {mutant.name}: {found or ', '.join(mutant.tests)}", flush=True
            )
    print(f"{len(chosen)} mutants, {survivors} survived")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())
