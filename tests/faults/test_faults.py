"""Every verb that writes, on a full disk, on a read-only one, and stopped by SIGTERM and SIGKILL while it writes.

What it writes is whole or absent each time, the user gets one line and no trace, and the next start with the same words comes
to the same files, without anything left of the first one.
"""

import json
import random
import re
import shutil
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load

from twoaxis.train import StepRecord

from .conftest import Forks
from .verbs import NEEDS_TRANSFORMERS, VERBS, Verb

FAULTS = {"full": 34, "read-only": 10, "SIGTERM": 14, "SIGKILL": 24}
"""How many faults are tried in all."""

DRAFT = re.compile(r"\.tmp$|\.draft$")
STATUS = {"full": (2,), "read-only": (2,), "SIGTERM": (130, 0), "SIGKILL": (-9,)}
"""How a verb ends; the last step of a run ends it in spite of a SIGTERM."""


def test_the_number_of_faults_is_what_it_says() -> None:
    assert sum((Counter(verb.faults) for verb in VERBS), Counter()) == Counter(FAULTS)


@pytest.mark.parametrize("verb", VERBS, ids=[verb.name for verb in VERBS])
def test_output_is_whole_or_absent(verb: Verb, forks: Forks, given: Path, tmp_path: Path) -> None:
    if verb.name in NEEDS_TRANSFORMERS:
        pytest.importorskip("transformers", reason="needs the extra twoaxis[hf]")
        if not (given / "hf").exists():
            assert forks.run(["export", given / "run", "--out", given / "hf"], given).status == 0

    def fresh(name: str) -> Path:
        out = tmp_path / name
        out.mkdir()
        if verb.begins:
            shutil.copytree(given / verb.begins, out / verb.begins)
            # A report made again within a minute is the same to the byte.
            (out / verb.begins / "report.html").unlink(missing_ok=True)
        return out

    out = fresh("whole")
    before = contents(out)
    whole = forks.run(verb.words(given, out), out)
    assert whole.status == 0, whole.said
    expected = contents(out)
    assert expected.keys() > before.keys() or expected != before
    for number, (fault, at) in enumerate(faults(verb, whole.count)):
        out = fresh(f"{number}-{fault}-{at}")
        ended = forks.run(verb.words(given, out), out, fault, at)
        assert ended.status in STATUS[fault], f"{fault} at {at} of {whole.count}: {ended}"
        if fault != "SIGKILL":
            said = ended.said.splitlines()
            assert (said[-1].startswith("twoaxis: ") or not ended.status) and "Traceback" not in ended.said, ended.said
        left = contents(out)
        check_left(verb, left, before, expected, fault)
        # With nothing left behind, the next start is the first one again.
        if left != before:
            again = forks.run(verb.words(given, out), out)
            assert again.status == 0, f"after {fault} at {at} of {whole.count}: {again.said}"
            check_same(contents(out), expected)
        shutil.rmtree(out)


def faults(verb: Verb, count: int) -> list[tuple[str, int]]:
    """Full disks from the first to the last thing that is written, and signals at random ones."""
    chance = random.Random(verb.name)
    found = []
    for fault, number in verb.faults.items():
        if fault == "full":
            found += [(fault, round(index * (count - 1) / (number - 1))) for index in range(number)]
        else:
            found += [(fault, chance.randrange(count)) for _ in range(number)]
    return found


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def check_left(verb: Verb, left: dict[str, bytes], before: dict[str, bytes], expected: dict[str, bytes], fault: str) -> None:
    """What a broken-off verb has left is whole, or is what was there before."""
    drafts = {name for name in left if any(DRAFT.search(part) for part in Path(name).parts)}
    assert not drafts or fault == "SIGKILL", f"left behind: {drafts}"
    written = {name: content for name, content in left.items() if name not in drafts}
    assert written.keys() <= expected.keys() | before.keys() or verb.resumes
    for name, content in written.items():
        if content != before.get(name):
            check_whole(name, content)
    if not verb.resumes:
        output = [{name for name in files if not name.startswith("cache/")} for files in (written, before, expected)]
        assert output[0] in output[1:], f"half of the output: {output[0]}"


def check_whole(name: str, content: bytes) -> None:
    """A file that is complete, as far as its format tells."""
    ends = {".html": b"</html>\n", ".svg": b"</svg>", ".png": b"IEND\xaeB`\x82", ".csv": b"\n", ".jinja": b""}
    suffix = Path(name).suffix
    if suffix == ".json":
        json.loads(content)
    elif suffix == ".toml":
        tomllib.loads(content.decode())
    elif suffix == ".safetensors":
        load(content)
    elif suffix in ends:
        assert content.rstrip(b"\n").endswith(ends[suffix].rstrip(b"\n")), name


def check_same(found: dict[str, bytes], expected: dict[str, bytes]) -> None:
    """The same files, equal in all that no clock and no path goes into."""
    assert found.keys() == expected.keys()
    for name, content in expected.items():
        if name.endswith((".safetensors", ".tokens", "tokenizer.json")):
            assert found[name] == content, name
        elif name.endswith(".json"):
            assert keys_of(json.loads(found[name])) == keys_of(json.loads(content)), name
        elif name.endswith("metrics.jsonl"):
            assert records_of(found[name]) == records_of(content), name


def keys_of(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: keys_of(value) for key, value in data.items()}
    return type(data).__name__


def records_of(content: bytes) -> list[StepRecord]:
    return [StepRecord.from_line(line)._replace(seconds=0.0) for line in content.splitlines()]
