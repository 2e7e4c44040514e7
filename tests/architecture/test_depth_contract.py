"""The contract of the depth axis stays small, and one file holds one published method."""

import ast
import statistics

from twoaxis.depth import DEPTH

MOST_HOOKS = 15
MOST_LINES, MEDIAN_LINES = 300, 200
CONTRACT = {"DepthConfig", "DepthMixer", "DepthEnds"}
SHARED = {"__init__", "around", "axis", "base", "heads", "history", "streams"}
"""Files that are no part of one method."""


def hooks(node: ast.ClassDef) -> list[str]:
    """The public methods and properties of a class that a subclass may define."""
    found = []
    for part in node.body:
        if isinstance(part, ast.FunctionDef) and not part.name.startswith("_"):
            decorators = {ast.unparse(decorator) for decorator in part.decorator_list}
            if not decorators & {"final", "classmethod"}:
                found.append(f"{node.name}.{part.name}")
    return found


def test_the_contract_has_few_hooks(package_sources: dict[str, ast.Module]) -> None:
    tree = package_sources["src/twoaxis/depth/base.py"]
    found = [name for node in tree.body if isinstance(node, ast.ClassDef) and node.name in CONTRACT for name in hooks(node)]
    assert len(found) <= MOST_HOOKS, found


def test_mixers_are_short(package_sources: dict[str, ast.Module]) -> None:
    folder = "src/twoaxis/depth/"
    lengths = {
        path.removeprefix(folder).removesuffix(".py"): max(node.end_lineno or 0 for node in tree.body)
        for path, tree in package_sources.items()
        if path.startswith(folder)
    }
    assert not {name: length for name, length in lengths.items() if length > MOST_LINES and name not in SHARED}
    methods = {row.config.__module__.rpartition(".")[2] for row in DEPTH if row.config.__module__.startswith("twoaxis.")}
    assert statistics.median(lengths[name] for name in methods) <= MEDIAN_LINES
