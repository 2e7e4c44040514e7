"""Two ranks that divide heads and hidden numbers compute what one process does.

In float64, where rounding is far from any fault: in float32, two streams of Hyper-Connections lose five digits.
"""

from typing import Any

import torch
from torch import Tensor

from twoaxis.core.errors import ConfigError
from twoaxis.core.measure import distance
from twoaxis.testing.conformance import CheckFailed, bound, slow_check
from twoaxis.testing.sharded import mean_loss
from twoaxis.testing.toy import AxisConfig, decoder_config, toy_decoder, toy_tokens
from twoaxis.testing.two_ranks import LOSS, RANKS, ask_ranks

SEQUENCES = ("none", "tensor")


@slow_check
def tensor_parallel_equals_whole(config: AxisConfig) -> None:
    """Loss and gradients of two tensor ranks are those of one process, with whole and sharded streams, unless refused."""
    from twoaxis.train.parallel.tensor_split import TensorSplit

    try:
        split = TensorSplit(decoder_config(config), RANKS)
    except ConfigError:
        return
    model = toy_decoder(config)
    loss = mean_loss(model, toy_tokens())
    loss.backward()
    whole = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in model.named_parameters()
    }
    limit = bound("same_gradients")
    for sequence in SEQUENCES:
        for rank, found in enumerate(ask_ranks(_measure, config, sequence)):
            where = f"rank {rank} of {RANKS}, sequence {sequence}"
            if distance(found[LOSS], loss) > bound("same_values"):
                raise CheckFailed(f"{where}: loss {found[LOSS].item()!r}, must be {loss.item()!r}")
            for name, one in split.splits(rank).items():
                part, size = one.of(whole[name]), max(1.0, float(whole[name].abs().max()))
                if (away := distance(found.get(name, torch.zeros_like(part)), part) / size) > limit:
                    raise CheckFailed(f"{where}: gradient of {name} differs by {away:.1e} of its size, bound {limit:.0e}")


def _measure(mesh: Any, rank: int, config: AxisConfig, sequence: Any) -> dict[str, Tensor]:
    from twoaxis.train.parallel.tensor import TensorDecoder, sum_gradients, summed_chunks
    from twoaxis.train.parallel.tensor_ranks import TensorRanks

    whole, tokens = toy_decoder(config), toy_tokens()
    ranks = TensorRanks(mesh.get_group(), rank, RANKS, sequence)
    model = TensorDecoder(whole.config, ranks, tokens.shape[1] - 1).double()
    values = dict(whole.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(model.splits[name].of(values[name]))
    loss = mean_loss(model, tokens)
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    sum_gradients(gradients, summed_chunks(model.splits, sequence), ranks)
    return {LOSS: loss.detach() if sequence == "none" else ranks.sum(loss.detach()), **gradients}
