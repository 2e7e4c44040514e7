"""Claim 8: the algebra of a delta write.

Letters: D width, N rows.
"""

import torch
from torch import Tensor

from twoaxis.claims.claim import PAPER, Claim, Evidence, Finding
from twoaxis.core.measure import noise, perturb
from twoaxis.core.parameters import initialise
from twoaxis.depth import DeepDelta, DeepDeltaConfig
from twoaxis.ops.delta import UpdateRule, delta_write

BETAS = (0.0, 0.3, 1.0, 1.7, 2.0)
WIDTHS = (1, 2, 7, 16)
ROWS = 5


def write(x: Tensor, u: Tensor, target: Tensor | float, beta: float, rule: UpdateRule = "delta") -> Tensor:
    """Writes each row along the direction u, without eps."""
    direction = u.expand_as(x)
    column = torch.ones(*x.shape[:-1], 1, dtype=x.dtype)
    return delta_write(x, direction, target * column, beta * column, 0.0, rule)


def compute() -> Finding:
    """Tests the spectrum, the overwrite, the contraction, the write-only control, and the range of the gate."""
    found = Evidence()
    for D in WIDTHS:
        x, u, target = (noise(shape, f"claims/delta {D}") for shape in ((ROWS, D), (D,), (ROWS, 1)))
        k = u / u.norm()
        for beta in BETAS:
            # Writing zero to the identity gives the matrix of the shortcut.
            shortcut = write(torch.eye(D, dtype=torch.float64), u, 0.0, beta)
            spectrum = torch.linalg.eigvalsh(shortcut)
            expected = torch.tensor([1.0] * (D - 1) + [1.0 - beta], dtype=torch.float64).sort().values
            found.close("spectrum of the shortcut", spectrum, expected)
            found.close("the eigenvector of 1 - beta", shortcut @ k, (1 - beta) * k)
            before = target.squeeze(-1) - x @ k
            written = write(x, u, target, beta)
            found.close("the error after a write", target.squeeze(-1) - written @ k, (1 - beta) * before)
            across = torch.eye(D, dtype=torch.float64) - torch.outer(k, k)
            found.close("what is across the direction", written @ across, x @ across)
        found.close("the component after beta = 1", write(x, u, target, 1.0) @ k, target.squeeze(-1))
        found.close("two reflections", write(write(x, u, 0.0, 2.0), u, 0.0, 2.0), x)
        added = write(x, u, target, 1.0, "write_only")
        found.close("the component after writing only", added @ k, x @ k + target.squeeze(-1))
    check_gate(found)
    return found.finding(
        "In widths 1, 2, 7 and 16 and for beta = 0, 0.3, 1, 1.7 and 2: the shortcut has the eigenvalue 1 - beta along the "
        "direction and 1 across it.",
        "beta = 1 leaves exactly the target along the direction, beta = 2 reflects it, and any beta scales the error by 1 - "
        "beta and touches nothing else: it shrinks for every beta strictly between 0 and 2.",
        "The gate of the depth mixer deep_delta stays strictly between 0 and 2. Its control, writing only, keeps what was "
        "there.",
    )


def check_gate(found: Evidence) -> None:
    """Tests that the mixer's gate stays in the interval in which the error shrinks."""
    mixer = DeepDelta(DeepDeltaConfig(), d_model=8)
    initialise(mixer, 0)
    beta = perturb(mixer.double()).gate(3 * noise((4, 64, 8), "claims/gate")).detach()
    found.true("every gate is above 0 and below 2", bool(((beta > 0) & (beta < 2)).all()))
    found.true("gates fall on either side of 1", bool(beta.min() < 1 < beta.max()))


CLAIM = Claim(
    number=8,
    title="The algebra of Deep Delta Learning",
    statement="A delta write replaces the shortcut by I - beta k k^T: eigenvalue 1 everywhere but along k, where it is 1 - "
    "beta. beta = 1 overwrites the selected component exactly, and the selected error contracts by 1 - beta.",
    source=f"arXiv:2601.00417v3 (2026-05-12), eq. 2.2, as recommended in {PAPER}, abstract",
    tested="The operator on the rows of the identity, eigenvalues by torch.linalg.eigvalsh; components and errors before and "
    "after writes of random states.",
    compute=compute,
)
