"""Fractions of one and of two streams in the layout of lucidrains' package; for the paper's form there is no authors' code."""

from collections.abc import Mapping
from typing import Any

import pytest
from torch import Tensor

from twoaxis.depth import FracConnectionsConfig
from twoaxis.depth import streams as depth_streams

from ..golden import Golden
from . import Adapter, Mistake
from .hyper_connections import run


def run_lucidrains(golden: Golden) -> Mapping[str, Tensor]:
    """The whole decoder."""
    config = golden.about["config"]
    return run(golden, FracConnectionsConfig(form="lucidrains", n_fractions=config["fracs"], n_streams=config["n"]))


def _diagonal_write(patch: pytest.MonkeyPatch) -> None:
    right = depth_streams.mix_pieces

    def wrong(state: Any, update: Tensor, residual: Tensor, write: Tensor, m: int, impl: Any) -> Any:
        return right(state, update, residual, write.sum(0, keepdim=True), m, impl)

    patch.setattr(depth_streams, "mix_pieces", wrong)


def _transposed(patch: pytest.MonkeyPatch) -> None:
    right = depth_streams.mix_pieces

    def wrong(state: Any, update: Tensor, residual: Tensor, write: Tensor, m: int, impl: Any) -> Any:
        return right(state, update, residual.transpose(0, 1), write, m, impl)

    patch.setattr(depth_streams, "mix_pieces", wrong)


ADAPTER = Adapter(
    claims={r"(frac-dynamic|hc-dynamic-s\d+f\d+)-lucidrains(-.*)?": run_lucidrains},
    mistakes=(
        Mistake("a diagonal write, which is the paper's", "frac-dynamic-lucidrains-f64", _diagonal_write),
        Mistake("rows as destinations", "frac-dynamic-lucidrains-f64", _transposed),
        Mistake("rows as destinations", "hc-dynamic-s2f2-lucidrains-f64", _transposed),
    ),
)
