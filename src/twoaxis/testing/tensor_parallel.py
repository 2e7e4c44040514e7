"""Two ranks that divide heads and hidden numbers compute what one process does."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from twoaxis.core.errors import ConfigError
from twoaxis.core.measure import distance
from twoaxis.model import DecoderConfig
from twoaxis.testing.conformance import CheckFailed, bound, slow_check
from twoaxis.testing.sharded import RANKS, ask_ranks, mean_loss
from twoaxis.testing.toy import AxisConfig, decoder_config, toy_decoder, toy_tokens

SEQUENCES = ("none", "tensor")


@slow_check
def tensor_parallel_equals_whole(config: AxisConfig) -> None:
    """Loss and all gradients of two tensor ranks are those of one process, with whole and with sharded streams."""
    from twoaxis.train.parallel.tensor_split import TensorSplit

    try:
        split = TensorSplit(decoder_config(config), RANKS)
    except ConfigError:
        return
    model, tokens = toy_decoder(config), toy_tokens()
    loss = mean_loss(model, tokens)
    loss.backward()
    whole = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in model.named_parameters()
    }
    for sequence in SEQUENCES:
        for rank, (found, gradients) in enumerate(ask_ranks(_measure, config, sequence)):
            where, limit = f"rank {rank} of {RANKS}, sequence {sequence}", bound("same_gradients")
            away = abs(found - loss.item()) / abs(loss.item())
            if away > bound("same_values"):
                raise CheckFailed(f"{where}: loss {found!r}, must be {loss.item()!r} within {bound('sharded_loss'):.0e}")
            for name, one in split.splits(rank).items():
                size = max(1.0, float(whole[name].abs().max()))
                part = one.of(whole[name])
                away = distance(torch.from_numpy(gradients[name]) if name in gradients else torch.zeros_like(part), part) / size
                if away > limit:
                    raise CheckFailed(f"{where}: gradient of {name} differs by {away:.1e} of its size, bound {limit:.0e}")


def _measure(mesh: Any, rank: int, config: AxisConfig, sequence: Any) -> tuple[float, dict[str, Any]]:
    whole = toy_decoder(config)
    return measure(whole.config, dict(whole.named_parameters()), toy_tokens(), rank, sequence)


def measure(
    config: DecoderConfig, values: dict[str, Any], tokens: Tensor, rank: int, sequence: Any
) -> tuple[float, dict[str, Any]]:
    """The loss of all ranks, and the parts of all gradients on this one."""
    from twoaxis.train.parallel.tensor import TensorDecoder, sum_gradients
    from twoaxis.train.parallel.tensor_ranks import TensorRanks

    ranks = TensorRanks(None, rank, dist.get_world_size(), sequence)
    model = TensorDecoder(config, ranks, tokens.shape[1] - 1).to(next(iter(values.values())).dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(model.splits[name].of(values[name]))
    loss = mean_loss(model, tokens)
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    sum_gradients(gradients, model.splits, ranks)
    total = loss.detach() if sequence == "none" else ranks.sum(loss.detach())
    return total.item(), {name: gradient.numpy() for name, gradient in gradients.items()}
