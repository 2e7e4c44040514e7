"""`twoaxis claims`: what the paper claims, computed."""

import textwrap
from typing import TYPE_CHECKING, Annotated

import typer

from twoaxis.cli.output import Json, counting, print_json
from twoaxis.display.tables import line_width, print_item, print_table

if TYPE_CHECKING:
    from twoaxis.claims import Claim, Finding


def claims(
    numbers: Annotated[list[int] | None, typer.Argument(help="Only these claims; all of them by default.")] = None,
    as_json: Json = False,
) -> int:
    """Compute every claim of the paper (arXiv:2603.16039v2) and print its verdict with the evidence.

    Claims 1 to 11 are settled by computation in float64, from the same seeds every time, in about a minute. Claim 12 weighs
    bytes counted here and kept benchmarks; claims 13 to 18 need training and are decided by kept studies. Benchmarks and
    studies ship with the package, so that the result does not depend on the current folder. Exit status 1 when a claim does not
    hold, not at the scale that was studied, or could not be computed; 0 when all others hold, are undecided, or wait for a
    study.

    Example: twoaxis claims 1 8
    """
    from twoaxis.claims import select

    found: list[tuple[Claim, Finding]] = []
    wanted = select(numbers or ())
    for claim, finding in counting(((one, one.find()) for one in wanted), len(wanted), "claims"):
        found.append((claim, finding))
        if not as_json:
            _print(*found[-1])
    if as_json:
        print_json([claim.to_data(finding) for claim, finding in found])
    elif len(found) > 1:
        rows = [(str(claim.number), claim.title, finding.sentence) for claim, finding in found]
        print_table("Verdicts", ("claim", "title", "verdict"), rows, ("claim",), _width(), ("claim",))
    return 1 if any(finding.negative for _, finding in found) else 0


def _print(claim: "Claim", finding: "Finding") -> None:
    heading = f"{claim.number}. {claim.title}: {finding.sentence}"
    print(textwrap.fill(heading, _width(), subsequent_indent="    ", break_long_words=False, break_on_hyphens=False))
    _say("Claim", claim.statement)
    _say("Source", claim.source)
    _say("Tested", claim.tested)
    if claim.rule:
        _say("Rule", claim.rule)
    for line in finding.evidence:
        _say("Evidence", line)
    if finding.measured:
        what, largest = max(finding.measured.items(), key=lambda item: item[1])
        _say("Here", f"largest difference {largest:.1e} ({what})")
    if finding.table is not None:
        print()
        columns = finding.table.columns
        print_table("", columns, finding.table.rows, width=_width(), whole=columns[:1])
    if finding.links:
        _say("Files", ", ".join(finding.links))
    print(flush=True)


def _say(what: str, text: str) -> None:
    print_item(text, f"   {what + ':':10}", _width())


def _width() -> int:
    """The width of lines, at most 110 characters."""
    return min(line_width(), 110)
