"""Code that is translated to JavaScript stands in one folder and imports nothing outside it."""

import ast
from collections.abc import Iterator
from pathlib import Path

from ..scripts import load_script

FOLDER = "src/twoaxis/planner/formulas/"
PACKAGE = "twoaxis.planner.formulas"
ALONE = {"typing"}
"""What the translated modules may import besides each other: names of types, which the translation leaves out."""

DRAWING = {f"{PACKAGE}.{name}" for name in ("svg", "figures", "written")}
"""Those that write texts and figures for a reader."""

SHOWING = ("src/twoaxis/planner/page/", "src/twoaxis/display/", FOLDER)


def imported(tree: ast.Module) -> Iterator[str]:
    """All modules that a module may import, `from package import module` among them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "."
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_what_is_translated_stands_in_one_folder(root: Path) -> None:
    script = load_script(root / "docs" / "page_formulas.py")
    assert root / FOLDER == script.FORMULAS
    assert {*script.MODULES, "__init__.py"} == {path.name for path in (root / FOLDER).iterdir() if path.is_file()}


def test_translated_code_imports_only_itself(package_sources: dict[str, ast.Module]) -> None:
    for path, tree in package_sources.items():
        if path.startswith(FOLDER):
            strangers = {
                name for name in imported(tree) if name.partition(".")[0] not in ALONE and not name.startswith(PACKAGE)
            }
            assert not strangers, f"{path} imports {sorted(strangers)}, which no browser has"


def test_only_what_shows_imports_texts_and_figures_from_it(package_sources: dict[str, ast.Module]) -> None:
    for path, tree in package_sources.items():
        if not path.startswith(SHOWING):
            taken = DRAWING & set(imported(tree))
            assert not taken, f"{path} imports {sorted(taken)}: numbers are written by twoaxis.display.numbers"
