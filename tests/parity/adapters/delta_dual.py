"""Deep Delta Learning over depth: states of the authors' decoder, by our delta rule along positions and by its closed forms."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from twoaxis.claims import delta_dual
from twoaxis.claims.delta_dual import Writes, corrected_targets, linear_read, over_depth, path_logits

from ..golden import Golden
from . import Adapter, Mistake


def run(golden: Golden) -> Mapping[str, Tensor]:
    """Every state by the sequence operator, with the sublayer as time, and what follows from its closed forms."""
    rows = golden.take("input/input_ids").shape
    first = golden.take("input/X0").flatten(0, 1)
    keys, gates, targets = (golden.take(f"input/{name}").flatten(1, 2).transpose(0, 1) for name in ("k", "beta", "v"))
    writes, query = Writes((first,), keys, gates, targets), golden.take("input/read_query").flatten(0, 1)
    states = [over_depth(writes, upto, "fused") for upto in range(1, writes.times + 1)]
    return {
        "output/states": torch.stack(states).unflatten(1, rows),
        "output/U": corrected_targets(writes).unflatten(0, rows),
        "output/path_logits": path_logits(writes, query).unflatten(0, rows),
        "output/read": linear_read(writes, query).unflatten(0, rows),
    }


def _half_gate(patch: pytest.MonkeyPatch) -> None:
    right = delta_dual.gated_delta

    def halved(q: Tensor, k: Tensor, v: Tensor, decay_log: Tensor, beta: Tensor, **options: Any) -> Any:
        return right(q, k, v, decay_log, beta / 2, **options)

    patch.setattr(delta_dual, "gated_delta", halved)


ADAPTER = Adapter(
    claims={r"ddl-depth-delta-dual(-.*)?": run},
    mistakes=(Mistake("a gate in (0, 1)", "ddl-depth-delta-dual", _half_gate),),
)
