"""A file holds one idea and a function one thought; both say what they are for."""

import ast

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60


def test_files_are_short_and_say_what_they_are_for(package_sources: dict[str, ast.Module]) -> None:
    assert package_sources
    for path, tree in package_sources.items():
        assert ast.get_docstring(tree), f"{path} has no module docstring"
        last = max((node.end_lineno or 0 for node in tree.body), default=0)
        assert last <= MAX_FILE_LINES, f"{path} has {last} lines, more than {MAX_FILE_LINES}: split it by idea"


def test_functions_are_short(package_sources: dict[str, ast.Module]) -> None:
    for path, tree in package_sources.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                assert lines <= MAX_FUNCTION_LINES, f"{path}: {node.name} has {lines} lines, more than {MAX_FUNCTION_LINES}"
