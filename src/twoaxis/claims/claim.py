"""A claim of the paper, the finding of its computation, and a collector of evidence."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from twoaxis.core.measure import distance

PAPER = "arXiv:2603.16039v2 (2026-05-14)"
"""Residual Stream Duality in Modern Transformer Architectures; sections are numbered as in its authors' PDF."""

Verdict = Literal[
    "holds exactly",
    "holds within",
    "holds",
    "does not hold",
    "does not hold at this scale",
    "undecided",
    "no study yet",
    "not computed",
]
"""The first two and `does not hold` are for computed claims, the others for claims about training; `no study yet` where no
study counts, `not computed` after an error."""

ROUNDING = 1e-12
"""Bound in float64: about 1e-15 per operation, over a few hundred operations."""


@dataclass(frozen=True)
class EvidenceTable:
    """Rows of evidence under named columns."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Finding:
    """The result of the computation of a claim.

    Attributes:
        verdict: one of seven.
        bound: of the verdict, such as a tolerance or a list of studies, or empty.
        evidence: sentences that are the same on every machine.
        table: rows of evidence, if there are many.
        links: related files of the repository.
        measured: the largest differences on this machine.
    """

    verdict: Verdict
    bound: str = ""
    evidence: tuple[str, ...] = ()
    table: EvidenceTable | None = None
    links: tuple[str, ...] = ()
    measured: dict[str, float] = field(default_factory=dict)

    @property
    def sentence(self) -> str:
        """The verdict with its bound.

        Example:
            >>> Finding("holds within", "1e-12").sentence
            'holds within 1e-12'
        """
        return f"{self.verdict} {self.bound}" if self.bound else self.verdict

    @property
    def negative(self) -> bool:
        """Whether the claim is refuted, or could not be computed.

        Example:
            >>> Finding("does not hold at this scale").negative, Finding("no study yet").negative
            (True, False)
        """
        return self.verdict.startswith(("does not hold", "not computed"))


@dataclass(frozen=True)
class Claim:
    """One claim, stated in our own words.

    Attributes:
        number: in the list.
        title: a few words.
        statement: of the claim, with the quantifier of its source.
        source: of the claim.
        tested: describes the test.
        compute: runs the test.
        rule: for the verdict, where judgement is needed, with the date it was fixed.
    """

    number: int
    title: str
    statement: str
    source: str
    tested: str
    compute: Callable[[], Finding]
    rule: str = ""

    def find(self) -> Finding:
        """Computes the finding, or says which error came in its way."""
        try:
            return self.compute()
        except Exception as error:
            message = " ".join(str(error).split())
            return Finding("not computed", evidence=(f"The computation failed: {type(error).__name__}: {message}",))

    def to_data(self, finding: Finding) -> dict[str, Any]:
        """The claim and a finding as JSON-ready data."""
        about = {name: getattr(self, name) for name in ("number", "title", "statement", "source", "tested", "rule")}
        measured = [{"what": what, "difference": largest} for what, largest in finding.measured.items()]
        return about | {"sentence": finding.sentence} | asdict(finding) | {"measured": measured}


class Evidence:
    """Collects comparisons, and reports failures with their numbers or success in given sentences.

    Example:
        >>> found = Evidence()
        >>> found.exactly("sums", 1 + 1, 3)
        >>> found.finding("All sums are right.").evidence
        ('sums: 2, not 3',)
    """

    def __init__(self) -> None:
        self.failures: list[str] = []
        self.compared = 0
        self.measured: dict[str, float] = {}
        self.loosest = 0.0

    def close(self, what: str, got: Tensor, expected: Tensor, bound: float = ROUNDING) -> None:
        """Compares two tensors and records the largest difference; a bound of 0 requires equal bits."""
        self.compared += 1
        if got.shape != expected.shape:
            self.failures.append(f"{what}: shape {tuple(got.shape)}, not {tuple(expected.shape)}")
            return
        error = distance(got, expected)
        self.measured[what] = max(error, self.measured.get(what, 0.0))
        self.loosest = max(bound, self.loosest)
        if not error <= bound:
            self.failures.append(f"{what}: differs by {error:.1e}, more than {bound:.0e}")

    def all_close(self, what: str, got: Sequence[Tensor], expected: Sequence[Tensor], bound: float = ROUNDING) -> None:
        """Applies `close` to pairs of tensors."""
        for one, other in zip(got, expected, strict=True):
            self.close(what, one, other, bound)

    def apart(self, what: str, got: Tensor, other: Tensor, at_least: float) -> None:
        """Requires two tensors to differ by at least this much, to show that a test of equality is sensitive."""
        self.compared += 1
        change = distance(got, other)
        if not change >= at_least:
            self.failures.append(f"{what}: differs by {change:.1e}, less than {at_least:.0e}")

    def exactly(self, what: str, got: object, expected: object) -> None:
        """Requires two values to be equal."""
        self.compared += 1
        if got != expected:
            self.failures.append(f"{what}: {got}, not {expected}")

    def true(self, what: str, holds: bool) -> None:
        """Requires a condition."""
        self.compared += 1
        if not holds:
            self.failures.append(f"not so: {what}")

    def finding(self, *evidence: str, table: EvidenceTable | None = None, bound: str = "") -> Finding:
        """Makes the finding: exact when every bound was 0; refuted by any failure, of which the first few are listed.

        Raises:
            ValueError: nothing was compared.
        """
        if not self.compared:
            raise ValueError("nothing was compared")
        if self.failures:
            listed = (*self.failures[:8], *(["..."] if len(self.failures) > 8 else []))
            return Finding("does not hold", evidence=listed, table=table, measured=self.measured)
        bound = bound or (f"{self.loosest:.0e}" if self.loosest else "")
        verdict: Verdict = "holds within" if bound else "holds exactly"
        return Finding(verdict, bound, evidence, table, measured=self.measured)


def gradients_of(outputs: Sequence[Tensor], cotangents: Sequence[Tensor], inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The gradients of several outputs with respect to several inputs."""
    total = sum(((y * c).sum() for y, c in zip(outputs, cotangents, strict=True)), torch.zeros((), dtype=torch.float64))
    return torch.autograd.grad(total, inputs)
