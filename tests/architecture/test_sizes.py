"""A file holds one idea and a function one thought; both say what they are for."""

import ast
from collections import Counter

MOST_FILES, MOST_NAMESAKES = 412, 12
"""Python files of the package, and names that several of them share, `__init__` and `base` aside; both only fall."""

MAX_FILE_LINES = 500
TABLES = ("depth/__init__.py",)
"""Files that are a table with a row for each method, however many there are."""
MAX_FUNCTION_LINES = 60


def test_files_are_short_and_say_what_they_are_for(package_sources: dict[str, ast.Module]) -> None:
    assert package_sources
    for path, tree in package_sources.items():
        assert ast.get_docstring(tree), f"{path} has no module docstring"
        last = max((node.end_lineno or 0 for node in tree.body), default=0)
        assert last <= MAX_FILE_LINES or path.endswith(TABLES), f"{path} has {last} lines, more than {MAX_FILE_LINES}: split it"


def test_functions_are_short(package_sources: dict[str, ast.Module]) -> None:
    for path, tree in package_sources.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                assert lines <= MAX_FUNCTION_LINES, f"{path}: {node.name} has {lines} lines, more than {MAX_FUNCTION_LINES}"


def test_files_are_few_and_have_names_of_their_own(package_sources: dict[str, ast.Module]) -> None:
    names = Counter(path.rpartition("/")[2] for path in package_sources)
    namesakes = sorted(name for name, count in names.items() if count > 1 and name not in ("__init__.py", "base.py"))
    assert len(package_sources) <= MOST_FILES, f"{len(package_sources)} files: merge what says one idea"
    assert len(namesakes) <= MOST_NAMESAKES, namesakes
