"""The pages of docs are what `make docs` would write now, and every mixer of tokens or depth has its schematic."""

import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from twoaxis import DEPTH, FEED_FORWARD, LOCAL, SEQUENCE

from ..scripts import computed_pages, load_script

AXES = {"depth": DEPTH, "sequence": SEQUENCE, "feed_forward": FEED_FORWARD, "local": LOCAL}
ROWS = [pytest.param(axis, row, id=f"{axis}-{row.kind}") for axis, table in AXES.items() for row in table]


@pytest.fixture(scope="module")
def build(root: Path) -> ModuleType:
    return load_script(root / "docs" / "build.py")


@pytest.fixture(scope="module")
def computed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return computed_pages(tmp_path_factory)


@pytest.mark.parametrize(("axis", "row"), ROWS)
def test_page_is_up_to_date(axis: str, row, root: Path, build: ModuleType) -> None:  # type: ignore[no-untyped-def]
    page = root / "docs" / "mixers" / axis / f"{row.kind}.md"
    assert page.read_text(encoding="utf-8") == build.page(axis, row), "run `make docs`"
    assert page.with_suffix(".svg").exists() == (axis != "feed_forward")


def test_pages_of_checks_and_state_maps_are_up_to_date(root: Path, build: ModuleType) -> None:
    for name in ("checks", "state_maps"):
        written = (root / "docs" / f"{name}.md").read_text(encoding="utf-8")
        assert written == getattr(build, f"{name}_page")(), "run `make docs`"


def test_schematics_share_a_scale_and_have_a_dark_form(root: Path) -> None:
    drawings = list((root / "docs" / "mixers").rglob("*.svg"))
    styles = {re.findall(r"<style>.*</style>", path.read_text(encoding="utf-8"))[0] for path in drawings}
    assert len(drawings) > 40 and len(styles) == 1 and "prefers-color-scheme:dark" in styles.pop()


def test_index_is_up_to_date(root: Path, build: ModuleType) -> None:
    assert (root / "docs" / "mixers" / "README.md").read_text(encoding="utf-8") == build.index(), "run `make docs`"


def test_table_of_methods_is_up_to_date_and_comes_first(root: Path, computed: dict[str, Any]) -> None:
    assert (root / "docs" / "design.md").read_text(encoding="utf-8") == computed["design"], "run `make docs`"
    links = re.findall(r"\]\(([^)]*)\)", (root / "docs" / "README.md").read_text(encoding="utf-8"))
    assert links[0] == "design.md" and all((root / "docs" / link).is_file() for link in links)


def test_page_of_claims_is_up_to_date(root: Path, computed: dict[str, Any]) -> None:
    assert (root / "docs" / "claims.md").read_text(encoding="utf-8") == computed["claims"], "run `make docs`"


def test_pages_of_studies_are_up_to_date(root: Path, build: ModuleType) -> None:
    pages = root / "docs" / "studies"
    assert {path.stem for path in pages.glob("*.md")} == {"README", *build.questions()}, "run `make docs`"
    assert (pages / "README.md").read_text(encoding="utf-8") == build.studies_index(), "run `make docs`"
    for name in build.questions():
        assert (pages / f"{name}.md").read_text(encoding="utf-8") == build.study_page(name), "run `make docs`"


def test_the_table_of_retrofits_has_every_depth_mixer() -> None:
    from retrofit_table import methods

    measured = {depth["kind"] if isinstance(depth, dict) else depth for _, depth, _ in methods()}
    assert measured - {None} == {row.kind for row in DEPTH} - {"residual"}


def test_the_page_of_retrofits_gives_the_commands_of_its_rows(root: Path) -> None:
    """Catches a row whose options are not those of the script, numbers of the warning that no row has, and an old text."""
    from retrofit_table import PAGE
    from retrofit_training import ARMS, HEADING, Trained, part

    written = PAGE.read_text(encoding="utf-8").partition(HEADING)[2]
    cells = [line.strip("| ").split(" | ") for line in written.splitlines() if line.startswith("| ")][1:]
    rows = [Trained(name, int(parameters.replace(",", "")), *map(float, losses)) for name, _, parameters, *losses in cells]
    (memory,) = re.findall(r"was (\d+\.\d) GB", written)
    assert HEADING + written == part(rows, 200, float(memory)), "write the part with `part` of docs/retrofit_training.py"
    assert [row.name for row in rows] == [arm.name for arm in ARMS]
