"""`twoaxis claims`: what the paper claims, computed."""

from typing import TYPE_CHECKING, Annotated

import typer

from twoaxis.cli.output import Json, print_json, print_table

if TYPE_CHECKING:
    from twoaxis.claims import Claim, Finding


def claims(
    numbers: Annotated[list[int] | None, typer.Argument(help="Only these claims; all of them by default.")] = None,
    as_json: Json = False,
) -> int:
    """Compute every claim of the paper (arXiv:2603.16039) and print its verdict with the evidence.

    All but the last are settled by computation in float64, from the same seeds every time, in less than a minute. The last
    reads the reports of studies under studies/results. Exit status 1 when a claim does not hold.

    Example: twoaxis claims 1 8
    """
    from twoaxis.claims import select

    found: list[tuple[Claim, Finding]] = []
    for claim in select(numbers or ()):
        found.append((claim, claim.find()))
        if not as_json:
            _print(*found[-1])
    if as_json:
        print_json([claim.to_data(finding) for claim, finding in found])
    elif len(found) > 1:
        rows = [(str(claim.number), claim.title, finding.sentence) for claim, finding in found]
        print_table("Verdicts", ("claim", "title", "verdict"), rows, ("claim",))
    return 1 if any(finding.verdict == "does not hold" for _, finding in found) else 0


def _print(claim: "Claim", finding: "Finding") -> None:
    print(f"{claim.number}. {claim.title}: {finding.sentence}")
    print(f"   Claim:    {claim.statement}")
    print(f"   Source:   {claim.source}")
    print(f"   Tested:   {claim.tested}")
    for line in finding.evidence:
        print(f"   Evidence: {line}")
    if finding.measured:
        what, largest = max(finding.measured.items(), key=lambda item: item[1])
        print(f"   Here:     largest difference {largest:.1e} ({what})")
    if finding.table is not None:
        print_table("", finding.table.columns, finding.table.rows)
    print(flush=True)
