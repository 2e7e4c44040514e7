"""Floor 6: the claims of the paper this library follows (arXiv:2603.16039), each recomputed on request."""

from collections.abc import Iterable

from twoaxis.claims import (
    chunks,
    complexity,
    delta_algebra,
    delta_dual,
    duality,
    duality_in_model,
    empirical,
    full_memory,
    hardware,
    recommended_block,
    residual_read,
    routing,
    systems,
)
from twoaxis.claims.claim import Claim, Evidence, EvidenceTable, Finding, Verdict
from twoaxis.core.errors import ConfigError, problem

CLAIMS: tuple[Claim, ...] = (
    duality.CLAIM,
    full_memory.CLAIM,
    residual_read.CLAIM,
    routing.CLAIM,
    complexity.CLAIM,
    systems.CLAIM,
    chunks.CLAIM,
    delta_algebra.CLAIM,
    recommended_block.CLAIM,
    duality_in_model.CLAIM,
    delta_dual.CLAIM,
    hardware.CLAIM,
    *empirical.CLAIMS,
)


def select(numbers: Iterable[int] = ()) -> tuple[Claim, ...]:
    """The claims of these numbers, in the order of the list; all of them when none is given.

    Raises:
        ConfigError: a number that no claim has.

    Example:
        >>> [claim.title for claim in select([8])]
        ['The algebra of Deep Delta Learning']
    """
    wanted, known = set(numbers), [claim.number for claim in CLAIMS]
    for number in sorted(wanted - set(known)):
        raise ConfigError(problem("claim", number, f"in {known[0]}..{known[-1]}", "leave it out to see all of them"))
    return tuple(claim for claim in CLAIMS if not wanted or claim.number in wanted)


__all__ = ["CLAIMS", "Claim", "Evidence", "EvidenceTable", "Finding", "Verdict", "select"]
