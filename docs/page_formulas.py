"""`python docs/page_formulas.py`: writes the planner's formulas as JavaScript, which its page runs in a browser.

It reads their Python source, refuses what has another meaning in JavaScript, and translates it.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pscript

PLANNER = Path(__file__).parent.parent / "src" / "twoaxis" / "planner"
FORMULAS = PLANNER / "formulas"
WRITTEN = PLANNER / "page" / "formulas.js"
MODULES = tuple(sorted(path.name for path in FORMULAS.glob("*.py") if path.name != "__init__.py"))
"""The translated modules: all of the folder, and no others; each may use the functions of all."""

HEADER = "// Written by docs/page_formulas.py from the Python of the planner: `make docs` writes it anew.\n"

ALLOWED = (
    *(ast.Module, ast.FunctionDef, ast.arguments, ast.arg, ast.Return, ast.Assign, ast.AugAssign, ast.Expr, ast.For, ast.While),
    *(ast.If, ast.IfExp, ast.BoolOp, ast.And, ast.Or, ast.Not, ast.UnaryOp, ast.USub, ast.BinOp, ast.Add, ast.Sub, ast.Mult),
    *(ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.Compare, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Call),
    *(ast.Name, ast.Load, ast.Store, ast.Constant, ast.List, ast.Dict, ast.Tuple, ast.Subscript, ast.Slice, ast.ListComp),
    *(ast.comprehension, ast.Attribute, ast.Break, ast.Continue),
)
BUILT_IN = {"min", "max", "abs", "len", "range", "int", "str"}
RESERVED = {
    *("arguments", "await", "case", "catch", "class", "const", "debugger", "default", "delete", "do", "enum", "eval", "export"),
    *(
        "extends",
        "false",
        "function",
        "implements",
        "in",
        "instanceof",
        "interface",
        "let",
        "new",
        "null",
        "package",
        "private",
    ),
    *("protected", "public", "static", "super", "switch", "this", "throw", "true", "try", "typeof", "undefined", "var", "void"),
    *("with", "yield", "Math", "String", "Array", "Object"),
}
LARGEST = 2**53


def main() -> int:
    """Writes the file."""
    WRITTEN.write_text(javascript(), encoding="utf-8")
    return 0


def javascript() -> str:
    """The formulas as one JavaScript object, `formulas`, of all their public functions.

    Raises:
        ValueError: a formula has another meaning in JavaScript, or two have one name.
    """
    trees = {name: stripped(ast.parse((FORMULAS / name).read_text(encoding="utf-8"))) for name in MODULES}
    names = [definition(node) for tree in trees.values() for node in tree.body]
    found = [f"{name}: {problem}" for name, tree in trees.items() for problem in problems(tree, set(names))]
    found += [f"{name} is defined twice" for name in sorted(set(names)) if names.count(name) > 1]
    if found:
        raise ValueError("\n".join(found))
    body = pscript.py2js("\n".join(ast.unparse(plain(tree)) for tree in trees.values()), inline_stdlib=True)
    functions = [node.name for tree in trees.values() for node in tree.body if isinstance(node, ast.FunctionDef)]
    public = ", ".join(name for name in functions if not name.startswith("_"))
    return f'{HEADER}"use strict";\nconst formulas = (() => {{\n{body}\nreturn {{ {public} }};\n}})();\n'


def stripped(tree: ast.Module) -> ast.Module:
    """Functions and constants, without imports, aliases of types, and docstrings."""
    kept: list[ast.stmt] = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            node.body = [each for each in node.body if not _is_text(each)]
            kept.append(node)
        elif isinstance(node, ast.Assign) and not any(isinstance(each, ast.Name) for each in ast.walk(node.value)):
            kept.append(node)
        elif not (isinstance(node, ast.Import | ast.ImportFrom | ast.Assign) or _is_text(node)):
            raise ValueError(f"line {node.lineno}: {ast.unparse(node)}")
    return ast.Module(kept, [])


def plain(tree: ast.Module) -> ast.Module:
    """Without annotations, and with JavaScript operators instead of functions that imitate Python operators on lists."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.returns = None
            node.body.insert(0, ast.parse("PSCRIPT_OVERLOAD = False").body[0])
        if isinstance(node, ast.arg):
            node.annotation = None
    return tree


def definition(node: ast.stmt) -> str:
    """The name that a statement at the top of a module defines."""
    if isinstance(node, ast.FunctionDef):
        return node.name
    assert isinstance(node, ast.Assign), ast.unparse(node)
    return ast.unparse(node.targets[0])


def problems(tree: ast.Module, known: set[str]) -> Iterator[str]:
    """Yields the expressions of a module that have no meaning in JavaScript, or another one.

    Args:
        tree: its functions and constants.
        known: the functions and constants of all modules.
    """
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(tree):
        if (reason := _reason(node, known)) is not None:
            yield f"line {getattr(node, 'lineno', 0)}: {reason}"
    for function in functions.values():
        for test in _tests(function):
            if not _is_bool(test, function):
                yield f"line {test.lineno}: {ast.unparse(test)} need not be a boolean; compare it with something"
        yield from _loops(function)


def _reason(node: ast.AST, known: set[str]) -> str | None:
    """Why a node cannot be translated."""
    written = ast.unparse(node) if isinstance(node, ast.expr) else type(node).__name__
    if isinstance(node, ast.expr_context | ast.operator | ast.cmpop | ast.boolop | ast.unaryop):
        return None if isinstance(node, ALLOWED) else f"{written} is outside the subset"
    if not isinstance(node, ALLOWED):
        if isinstance(node, ast.Pass | ast.expr | ast.stmt | ast.keyword):
            return f"{written} is outside the subset"
        return None
    if isinstance(node, ast.Call):
        return _call(node, known)
    if isinstance(node, ast.Attribute) and node.attr != "append":
        return f"{written}: the only method is append"
    if isinstance(node, ast.Compare) and len(node.ops) > 1:
        return f"{written} compares twice"
    if isinstance(node, ast.Compare | ast.BinOp):
        sides = [node.left, *node.comparators] if isinstance(node, ast.Compare) else [node.left, node.right]
        if any(isinstance(side, ast.List | ast.Tuple | ast.Dict | ast.ListComp) for side in sides):
            return f"{written}: operators have another meaning for lists"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) and _subtracts(node):
        return f"{written}: % of a negative number has another sign"
    if isinstance(node, ast.Subscript) and any(isinstance(part, ast.USub) for part in ast.walk(node.slice)):
        return f"{written} counts from the end"
    if isinstance(node, ast.Constant) and isinstance(node.value, int) and abs(node.value) > LARGEST:
        return f"{written} is no exact number"
    if isinstance(node, ast.Name | ast.arg) and (node.id if isinstance(node, ast.Name) else node.arg) in RESERVED:
        return f"{written} is a word of JavaScript"
    if isinstance(node, ast.arguments) and (node.defaults or node.kwonlyargs or node.vararg or node.kwarg or node.posonlyargs):
        return "arguments are given in order, and all of them"
    return None


def _call(node: ast.Call, known: set[str]) -> str | None:
    written = ast.unparse(node)
    if node.keywords or any(isinstance(each, ast.Starred) for each in node.args):
        return f"{written}: arguments are given in order"
    if isinstance(node.func, ast.Attribute):
        return None
    if not isinstance(node.func, ast.Name) or node.func.id not in known | BUILT_IN:
        return f"{written} calls what is not translated"
    if node.func.id in ("min", "max") and len(node.args) < 2:
        return f"{written} has no meaning for an empty list"
    return None


def _subtracts(node: ast.BinOp) -> bool:
    return any(isinstance(part, ast.Sub | ast.USub) for side in (node.left, node.right) for part in ast.walk(side))


def _tests(function: ast.FunctionDef) -> Iterator[ast.expr]:
    """Expressions that are used as conditions."""
    for node in ast.walk(function):
        if isinstance(node, ast.If | ast.IfExp | ast.While):
            yield node.test
        elif isinstance(node, ast.BoolOp):
            yield from node.values
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield node.operand
        elif isinstance(node, ast.comprehension):
            yield from node.ifs


def _is_bool(test: ast.expr, function: ast.FunctionDef) -> bool:
    """Whether an expression is a boolean in both languages: a comparison, or combined or assigned from such."""
    if isinstance(test, ast.BoolOp):
        return all(_is_bool(value, function) for value in test.values)
    if isinstance(test, ast.UnaryOp):
        return isinstance(test.op, ast.Not) and _is_bool(test.operand, function)
    if isinstance(test, ast.Name):
        given = [
            node.value
            for node in ast.walk(function)
            if isinstance(node, ast.Assign) and any(isinstance(each, ast.Name) and each.id == test.id for each in node.targets)
        ]
        return bool(given) and all(_is_bool(value, function) for value in given)
    if isinstance(test, ast.Call) and isinstance(test.func, ast.Name):
        return test.func.id in ANSWERS
    return isinstance(test, ast.Compare) or (isinstance(test, ast.Constant) and isinstance(test.value, bool))


ANSWERS = {
    node.name
    for module in MODULES
    for node in ast.parse((FORMULAS / module).read_text(encoding="utf-8")).body
    if isinstance(node, ast.FunctionDef) and node.returns is not None and ast.unparse(node.returns) == "bool"
}
"""Functions that return a boolean."""


def _loops(function: ast.FunctionDef) -> Iterator[str]:
    """Loops with another number of steps in JavaScript, which evaluates the end in each step and keeps the last index."""
    loops = [node for node in ast.walk(function) if isinstance(node, ast.For)]
    for loop in loops:
        written = ast.unparse(loop.iter)
        if loop.orelse:
            yield f"line {loop.lineno}: a loop with else"
        if not (isinstance(loop.iter, ast.Call) and ast.unparse(loop.iter.func) == "range"):
            continue
        used = {node.id for node in ast.walk(loop.iter) if isinstance(node, ast.Name)}
        changed = {node.id for each in loop.body for node in ast.walk(each) if _changes(node)}
        changed |= {ast.unparse(node.value) for each in loop.body for node in ast.walk(each) if isinstance(node, ast.Attribute)}
        if used & changed or ast.unparse(loop.target) in changed:
            yield f"line {loop.lineno}: the body changes what {written} or its target says"
        inside = {id(node) for node in ast.walk(loop)}
        name = ast.unparse(loop.target)
        others = {id(node) for other in loops if ast.unparse(other.target) == name for node in ast.walk(other)}
        others |= {id(node) for each in ast.walk(function) if isinstance(each, ast.ListComp) for node in ast.walk(each)}
        late = [n for n in ast.walk(function) if isinstance(n, ast.Name) and n.id == name and id(n) not in inside | others]
        if late:
            yield f"line {late[0].lineno}: {name} is used behind its loop"


def _changes(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


if __name__ == "__main__":
    sys.exit(main())
