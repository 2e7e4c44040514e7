"""Two lanes around the branches of the bare decoder: the loop of modded-nanogpt, pull request 230."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from twoaxis.depth import TwoLanesConfig, two_lanes

from ..backbones.bare import BareLM
from ..golden import Golden
from . import Adapter, Mistake


def run(golden: Golden) -> Mapping[str, Tensor]:
    """The whole decoder. Before the second lane, its weights are stored but not read."""
    config = golden.about["config"]
    first, backout, usual = config["parallel_start"], config["backout_layer"], 2 * config["blocks"] // 3
    options = {"embedding": "normalised_start", "init": "released"} | ({} if first == usual else {"first_block": first})
    depth = TwoLanesConfig.from_data(options | ({} if backout == first else {"backout_block": backout}))
    model = BareLM(golden, depth, torch.finfo(torch.float64).eps)
    theirs = {name: golden.take(f"param/lanes.{name}") for name in ("resid_lambda", "w_post", "x0_lambda", "backout_lambda")}
    found = {name: torch.zeros_like(value) for name, value in theirs.items()}
    places = [(model.get_parameter("ends.backout_weight"), "backout_lambda", (...,))]
    mixers: Any = model.mixers
    for index, mixer in enumerate(mixers):
        places += [(mixer.lane_weight, "resid_lambda", (index,)), (mixer.write_weights, "w_post", (index,))]
        if mixer.embedding_weight is not None:
            places.append((mixer.embedding_weight, "x0_lambda", (index,)))
    for parameter, name, place in places:
        parameter.data.copy_(theirs[name][place].flatten()[: len(parameter)])
    computed = model.computed()
    for parameter, name, place in places:
        assert parameter.grad is not None
        found[name][place].view(-1)[: len(parameter)] = parameter.grad
    states = computed.pop("states")[2::2]
    return {
        **computed,
        **{f"output/lane{lane}_{block}": state[lane] for block, state in enumerate(states) for lane in (0, 1)},
        **{f"grad/lanes.{name}": value for name, value in found.items()},
    }


def _one_lane(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(two_lanes.TwoLanes, "read", lambda self, state, *_: (state.first, None, None))


def _injected_unweighted(patch: pytest.MonkeyPatch) -> None:
    """The embedding added behind the write weights instead of before them."""
    right = two_lanes.TwoLanes._weights  # pyright: ignore[reportPrivateUsage]

    def wrong(self: Any, lane: int) -> Tensor:
        weights = right(self, lane)
        return torch.cat((weights[:2], *([] if len(weights) < 3 else [self.embedding_weight])))

    patch.setattr(two_lanes.TwoLanes, "_weights", wrong)


def _kept_early(patch: pytest.MonkeyPatch) -> None:
    right = two_lanes.TwoLanesConfig.blocks
    patch.setattr(two_lanes.TwoLanesConfig, "blocks", lambda self, stack: (right(self, stack)[0], right(self, stack)[1] - 1))


ADAPTER = Adapter(
    claims={r"lanes2-moddednanogpt(-.*)?": run},
    mistakes=(
        Mistake("a feed-forward that reads the lane of attention", "lanes2-moddednanogpt-f64", _one_lane),
        Mistake("the embedding added behind the weights of the write", "lanes2-moddednanogpt-f64", _injected_unweighted),
        Mistake("a lane kept a block too early", "lanes2-moddednanogpt-f64", _kept_early),
    ),
)
