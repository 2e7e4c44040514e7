"""A claim of the paper, what a computation finds about it, and how the finding is collected."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from twoaxis.core.probe import distance

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
]
"""The first two and `does not hold` are for what is computed. A claim about training holds, does not hold at this scale, or
is undecided by the studies that count; there is `no study yet` where none counts."""

ROUNDING = 1e-12
"""In float64: about 1e-15 per operation, over a few hundred of them."""


@dataclass(frozen=True)
class EvidenceTable:
    """Rows of evidence under named columns."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Finding:
    """What a computation says about a claim.

    Attributes:
        verdict: one of seven.
        bound: what it holds within, or where it holds, or empty.
        evidence: sentences that read the same on every machine.
        table: rows of evidence, if there are many.
        links: files of the repository that belong to it.
        measured: the largest differences found on this machine.
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
        """Whether the claim came out against.

        Example:
            >>> Finding("does not hold at this scale").negative, Finding("no study yet").negative
            (True, False)
        """
        return self.verdict.startswith("does not hold")


@dataclass(frozen=True)
class Claim:
    """One claim, stated in our own words.

    Attributes:
        number: its place in the list.
        title: a few words.
        statement: what is claimed, with the quantifier of its source.
        source: where the claim is made.
        tested: how it is tested.
        compute: does so.
        rule: when each verdict is given, where judgement is needed, and since when that is fixed.
    """

    number: int
    title: str
    statement: str
    source: str
    tested: str
    compute: Callable[[], Finding]
    rule: str = ""

    def find(self) -> Finding:
        """Computes the finding; a computation that cannot be carried out refutes the claim as it is stated here."""
        try:
            return self.compute()
        except Exception as error:
            message = " ".join(str(error).split())
            return Finding("does not hold", evidence=(f"The computation failed: {type(error).__name__}: {message}",))

    def to_data(self, finding: Finding) -> dict[str, Any]:
        """The claim and a finding as JSON-ready data."""
        about = {name: getattr(self, name) for name in ("number", "title", "statement", "source", "tested", "rule")}
        measured = [{"what": what, "difference": largest} for what, largest in finding.measured.items()]
        return about | {"sentence": finding.sentence} | asdict(finding) | {"measured": measured}


class Evidence:
    """Collects comparisons: a failure is reported with its number, a success in the sentences given for it.

    Example:
        >>> found = Evidence()
        >>> found.exactly("sums", 1 + 1, 3)
        >>> found.finding("All sums are right.").evidence
        ('sums: 2, not 3',)
    """

    def __init__(self) -> None:
        self.failures: list[str] = []
        self.measured: dict[str, float] = {}
        self.loosest = 0.0

    def close(self, what: str, got: Tensor, expected: Tensor, bound: float = ROUNDING) -> None:
        """Notes the largest difference of two tensors; a bound of 0 asks for the same bits."""
        if got.shape != expected.shape:
            self.failures.append(f"{what}: shape {tuple(got.shape)}, not {tuple(expected.shape)}")
            return
        error = distance(got, expected)
        self.measured[what] = max(error, self.measured.get(what, 0.0))
        self.loosest = max(bound, self.loosest)
        if not error <= bound:
            self.failures.append(f"{what}: differs by {error:.1e}, more than {bound:.0e}")

    def all_close(self, what: str, got: Sequence[Tensor], expected: Sequence[Tensor], bound: float = ROUNDING) -> None:
        """As `close`, pair by pair."""
        for one, other in zip(got, expected, strict=True):
            self.close(what, one, other, bound)

    def apart(self, what: str, got: Tensor, other: Tensor, at_least: float) -> None:
        """Notes that two tensors differ by at least this much, so that equality elsewhere means something."""
        change = distance(got, other)
        if not change >= at_least:
            self.failures.append(f"{what}: differs by {change:.1e}, less than {at_least:.0e}")

    def exactly(self, what: str, got: object, expected: object) -> None:
        """Notes that two values are equal."""
        if got != expected:
            self.failures.append(f"{what}: {got}, not {expected}")

    def true(self, what: str, holds: bool) -> None:
        """Notes that something holds."""
        if not holds:
            self.failures.append(f"not so: {what}")

    def finding(self, *evidence: str, table: EvidenceTable | None = None, bound: str = "") -> Finding:
        """The finding: exact when every bound was 0, and refuted by any failure, of which the first few are listed."""
        if self.failures:
            listed = (*self.failures[:8], *(["..."] if len(self.failures) > 8 else []))
            return Finding("does not hold", evidence=listed, table=table, measured=self.measured)
        bound = bound or (f"{self.loosest:.0e}" if self.loosest else "")
        verdict: Verdict = "holds within" if bound else "holds exactly"
        return Finding(verdict, bound, evidence, table, measured=self.measured)


def gradients_of(outputs: Sequence[Tensor], cotangents: Sequence[Tensor], inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The gradients of several outputs together with respect to several inputs."""
    total = sum(((y * c).sum() for y, c in zip(outputs, cotangents, strict=True)), torch.zeros((), dtype=torch.float64))
    return torch.autograd.grad(total, inputs)
