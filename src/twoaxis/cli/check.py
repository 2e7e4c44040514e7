"""`twoaxis check`: the conformance suite on the mixers of an axis, or on modules of other libraries."""

import importlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twoaxis.cli.list import AXES, complete_axis, complete_mixer
from twoaxis.cli.output import Json, counting, print_json
from twoaxis.core.errors import ConfigError, nearest, problem
from twoaxis.display.tables import print_table

if TYPE_CHECKING:
    from twoaxis.testing import Adapter, Check, CheckResult

WORDS = {True: "ok  ", False: "FAIL", None: "--  "}


def check(
    axis: Annotated[
        str,
        typer.Argument(
            help="depth, sequence, feed_forward or local; or FILE.py, FILE.py:CLASS or MODULE:CLASS with adapters.",
            autocompletion=complete_axis,
        ),
    ],
    kinds: Annotated[
        list[str] | None,
        typer.Argument(help="Only these mixers; all of the axis by default.", autocompletion=complete_mixer),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Leave out the slow checks, such as those that compile.")] = False,
    html: Annotated[Path | None, typer.Option(metavar="PAGE", help="Also write a page with the results.")] = None,
    as_json: Json = False,
) -> int:
    """Run the conformance suite on mixers, those of other packages included, and print a line per mixer and check.

    Exit status 1 when a check fails. Every check runs in float64 at toy size; `twoaxis.testing` has them for your tests.

    A module of another library is checked through an adapter, a small subclass of `ForeignDepth` or `ForeignSequence` of
    `twoaxis.testing`; FILE.py checks all adapters in it. A check that an adapter cannot support is marked --, with the reason.
    The file is run as a program. examples/conformance has adapters of three libraries.

    Example: twoaxis check depth deep_delta --quick
    """
    from twoaxis import testing

    if axis in AXES:
        rows = [AXES[axis][kind] for kind in kinds] if kinds else list(AXES[axis])
        checks: Sequence[Check] = getattr(testing, f"{axis}_checks")()
        slow = sum(one.slow for one in checks)
        # Slow checks take the first example alone.
        cases = sum(len(row.examples) * (len(checks) - slow) + (0 if quick else slow) for row in rows)
        results, meanings = testing.iterate_checks(rows, checks, slow=not quick), {row.kind: row.summary for row in rows}
    elif ":" in axis or axis.endswith(".py"):
        adapters = [one for word in (axis, *(kinds or ())) for one in _adapters(word)]
        checks = [one for adapter in adapters for one in testing.foreign_checks(adapter)]
        cases, meanings = len(checks), {one.__name__: (one.__doc__ or "").partition("\n")[0] for one in adapters}
        results = (result for adapter in adapters for result in testing.check_foreign(adapter, slow=not quick))
    else:
        raise ConfigError(f"unknown axis {axis!r}; {nearest(axis, AXES)}")
    found = _printed(results, cases, as_json)
    if html:
        _write(html, axis, found, meanings, {one.name: one.meaning for one in checks})
    return 1 if any(result.ok is False for result in found) else 0


def _printed(results: "Iterator[CheckResult]", cases: int, as_json: bool) -> "list[CheckResult]":
    found: list[CheckResult] = []
    for result in counting(results, cases, "checking"):
        found.append(result)
        if not as_json:
            line = f"{WORDS[result.ok]} {result.kind:<20} {result.example:<12} {result.name}"
            print(f"{line}: {result.message}" if result.message else line, flush=True)
    if as_json:
        print_json([{name: getattr(one, name) for name in ("kind", "example", "name", "ok", "message")} for one in found])
        return found
    ran = [result for result in found if result.ok is not None]
    left = f"; {len(found) - len(ran)} were not run" if len(ran) < len(found) else ""
    if left:
        names = dict.fromkeys(one.kind for one in found)
        rows = [(name, ", ".join(one.name for one in ran if one.kind == name and not one.ok) or "none") for name in names]
        print_table("", ("checked", "checks that fail"), rows, whole=("checked",))
    print(f"{sum(bool(result.ok) for result in ran)} of {len(ran)} checks hold{left}")
    return found


def _adapters(word: str) -> "list[Adapter]":
    """The adapters that FILE.py, FILE.py:CLASS or MODULE:CLASS names."""
    from twoaxis.testing import ForeignDepth, ForeignSequence

    where, _, name = word.rpartition(":") if not word.endswith(".py") else (word, "", "")
    module = _module(where)
    bases = (ForeignDepth, ForeignSequence)
    found: dict[str, Any] = {
        key: one
        for key, one in vars(module).items()
        if isinstance(one, type) and issubclass(one, bases) and one not in bases and not key.startswith("_")
    }
    if name and name not in found:
        raise ConfigError(f"{where} has no adapter {name!r}; {nearest(name, found) if found else 'define one'}")
    if not found:
        remedy = "define a subclass of twoaxis.testing.ForeignDepth or ForeignSequence"
        raise ConfigError(problem(f"adapters in {where}", 0, "at least one", remedy))
    # What a file imports from another one is not checked with it.
    return [found[name]] if name else [one for one in found.values() if one.__module__ == module.__name__]


def _module(where: str) -> Any:
    """Runs a file, or imports a module by its name."""
    try:
        if not where.endswith(".py"):
            return importlib.import_module(where)
        name = f"twoaxis_checked_{Path(where).stem}"
        spec = importlib.util.spec_from_file_location(name, where)
        assert spec is not None and spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    except OSError:
        raise
    except Exception as error:
        raise ConfigError(f"{where}: cannot be run ({type(error).__name__}: {error}); correct it, or install it") from error


def _write(path: Path, checked: str, found: "Sequence[CheckResult]", about: dict[str, str], meanings: dict[str, str]) -> None:
    from twoaxis.core.files import replacing
    from twoaxis.display.html import Number, Reason, render, table

    def count(results: "Sequence[CheckResult]", ok: bool | None) -> Number:
        number = sum(result.ok is ok for result in results)
        return Number(str(number), number)

    def listed(caption: str, columns: tuple[str, ...], rows: "Sequence[tuple[str, ...]]") -> str:
        return table(caption, columns, rows, text=("check",), long=columns[1:]) if rows else ""

    by = {
        (one.kind, one.example): [two for two in found if (two.kind, two.example) == (one.kind, one.example)] for one in found
    }
    names = {key: key[0] if key[1] == "default" else f"{key[0]}, {key[1]}" for key in by}
    columns = ("checked", "hold", "fail", "not run", "what it is")
    rows = [(names[key], *(count(results, ok) for ok in (True, False, None)), about[key[0]]) for key, results in by.items()]
    ran = [one for one in found if one.ok is not None]
    failed = [(names[one.kind, one.example], one.name, meanings[one.name], one.message) for one in found if one.ok is False]
    reasons = {(one.name, one.message.removeprefix("not run: ")): list[str]() for one in found if one.ok is None}
    for one in found:
        if one.ok is None:
            reasons[one.name, one.message.removeprefix("not run: ")].append(names[one.kind, one.example])
    left = [(name, reason, "all" if len(kinds) == len(by) else ", ".join(kinds)) for (name, reason), kinds in reasons.items()]
    cells = {True: "ok", False: "fails", None: None}
    each = {key: {one.name: cells[one.ok] for one in results} for key, results in by.items()}
    every = [(name, *(cells_of.get(name, Reason("not for it")) for cells_of in each.values())) for name in meanings]
    page = render(
        "twoaxis.cli/check.html",
        folder="twoaxis.study.page",
        title=f"Conformance of {checked}",
        answer=f"{len(failed)} of {len(ran)} checks fail; {len(found) - len(ran)} were not run.",
        summary=table(
            "For each module, the checks that hold, that fail, and that cannot be run", columns, rows, long=columns[-1:]
        ),
        failed=listed("Each check that fails, with what was measured", ("checked", "check", "meaning", "measured"), failed),
        every=table("Every check", ("check", *names.values()), every, text=tuple(names.values())),
        left=listed("Each check that was not run", ("check", "reason", "for"), left),
    )
    with replacing(path, "name another file with --html") as file:
        file.write(page.encode())
