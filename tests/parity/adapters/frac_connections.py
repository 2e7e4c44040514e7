"""Fractions of one and of two streams in the layout of lucidrains' package; for the paper's form there is no authors' code."""

from collections.abc import Mapping

from torch import Tensor

from twoaxis.depth import FracConnectionsConfig

from ..golden import Golden
from . import Adapter, Mistake
from .hyper_connections import mixing_planted, run, transposed


def run_lucidrains(golden: Golden) -> Mapping[str, Tensor]:
    """The whole decoder."""
    config = golden.about["config"]
    return run(golden, FracConnectionsConfig(form="lucidrains", n_fractions=config["fracs"], n_streams=config["n"]))


_diagonal_write = mixing_planted(lambda residual, write: (residual, write.sum(0, keepdim=True)))


ADAPTER = Adapter(
    claims={r"(frac-dynamic|hc-dynamic-s\d+f\d+)-lucidrains(-.*)?": run_lucidrains},
    mistakes=(
        Mistake("a diagonal write, which is the paper's", "frac-dynamic-lucidrains-f64", _diagonal_write),
        Mistake("rows as destinations", "frac-dynamic-lucidrains-f64", transposed),
        Mistake("rows as destinations", "hc-dynamic-s2f2-lucidrains-f64", transposed),
    ),
)
