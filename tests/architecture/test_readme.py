"""The README says what is so: its table is the tables', its commands exist. Its Python is the first cell of the tutorial."""

import re
import tomllib
from pathlib import Path

from twoaxis import DEPTH, FEED_FORWARD, LOCAL, SEQUENCE
from twoaxis.cli.app import app

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_no_mixer_is_missing():
    axes = {"along depth": DEPTH, "along positions": SEQUENCE, "inside a sublayer": LOCAL, "feed-forwards": FEED_FORWARD}
    for words, table in axes.items():
        (names,) = re.findall(rf"^\| {words} \| (.*) \|$", README, re.MULTILINE)
        assert re.findall(r"\[(\w+)\]\(docs/mixers/\w+/\1\.md\)", names) == [row.kind for row in table], "run `make docs`"


def test_every_command_shown_is_a_verb():
    shown = set(re.findall(r"^twoaxis (\w+)", README, re.MULTILINE))
    assert shown == {command.name for command in app.registered_commands}


def test_readme_is_short():
    assert len(README.splitlines()) <= 110


def test_files_it_names_exist():
    for name in re.findall(r"(?:examples|studies|docs)/[\w./-]+\w", README):
        assert (ROOT / name).exists(), name
        if name.endswith(".toml"):
            tomllib.loads((ROOT / name).read_text(encoding="utf-8"))
