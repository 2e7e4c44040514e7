"""No file is ever unpickled and no text is ever run as code."""

import ast
from collections.abc import Iterator

import pytest

FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_ATTRIBUTES = {("torch", "load"), ("torch", "save"), ("numpy", "load"), ("np", "load")}


def unsafe(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] in FORBIDDEN_MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.module.split(".")[0] in FORBIDDEN_MODULES:
                yield node.module
            yield from (f"{node.module}.{a.name}" for a in node.names if (node.module, a.name) in FORBIDDEN_ATTRIBUTES)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_CALLS:
            yield f"{node.func.id}()"
        elif isinstance(node, ast.Attribute) and (ast.unparse(node.value), node.attr) in FORBIDDEN_ATTRIBUTES:
            yield ast.unparse(node)


@pytest.mark.parametrize(
    "code",
    ["import pickle", "from pickle import loads", "torch.load('x')", "from torch import load", "eval('1')", "exec('1')"],
)
def test_finds_what_it_looks_for(code: str) -> None:
    assert list(unsafe(ast.parse(code)))


def test_nothing_unsafe(package_sources: dict[str, ast.Module]) -> None:
    found = {path: names for path, tree in package_sources.items() if (names := list(unsafe(tree)))}
    assert not found
