"""`twoaxis check AXIS`: the conformance suite on every mixer of an axis, or on one."""

from typing import Annotated, Any

import typer

from twoaxis.cli.list import AXES
from twoaxis.cli.output import Json, print_json
from twoaxis.core.errors import ConfigError, nearest


def check(
    axis: Annotated[str, typer.Argument(help="depth, sequence, feed_forward or local.")],
    kinds: Annotated[list[str] | None, typer.Argument(help="Only these mixers; all of the axis by default.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Leave out the slow checks, such as those that compile.")] = False,
    as_json: Json = False,
) -> int:
    """Run the conformance suite on mixers, those of other packages included, and print a line per mixer and check.

    Exit status 1 when a check fails. Every check runs in float64 at toy size; `twoaxis.testing` has them for your tests.

    Example: twoaxis check depth deep_delta --quick
    """
    from twoaxis import testing

    if axis not in AXES:
        raise ConfigError(f"unknown axis {axis!r}; {nearest(axis, AXES)}")
    rows = [AXES[axis][kind] for kind in kinds] if kinds else list(AXES[axis])
    checks = getattr(testing, f"{axis}_checks")()
    found: list[dict[str, Any]] = []
    for result in testing.iterate_checks(rows, checks, slow=not quick):
        found.append({name: getattr(result, name) for name in ("kind", "example", "name", "ok", "message")})
        if not as_json:
            line = f"{'ok  ' if result.ok else 'FAIL'} {result.kind:<20} {result.example:<12} {result.name}"
            print(line if result.ok else f"{line}: {result.message}", flush=True)
    failed = sum(not one["ok"] for one in found)
    if as_json:
        print_json(found)
    else:
        print(f"{len(found) - failed} of {len(found)} checks hold")
    return 1 if failed else 0
