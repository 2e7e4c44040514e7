"""Two ranks compute what one process does: with shards of every parameter and rows of the batch, or as tensor ranks.

They are compared in float64, where rounding is far from any fault: in float32, the same mixers differ by up to 1e-5.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from twoaxis.core.errors import ConfigError
from twoaxis.core.measure import distance
from twoaxis.model import Decoder
from twoaxis.testing.conformance import CheckFailed, bound, slow_check
from twoaxis.testing.toy import AxisConfig, decoder_config, toy_decoder, toy_tokens
from twoaxis.testing.two_ranks import LOSS, RANKS, ask_ranks

SEQUENCES = ("none", "tensor")


@slow_check
def sharded_equals_whole(config: AxisConfig) -> None:
    """Loss and all gradients of two ranks with half of each parameter are those of one process."""
    model = toy_decoder(config)
    tokens = toy_tokens(2 * RANKS)
    loss = mean_loss(model, tokens)
    loss.backward()
    gradients = ask_ranks(_measure_shards, config)[0]
    found = gradients.pop(LOSS).item()
    if abs(found - loss.item()) > bound("same_values"):
        raise CheckFailed(f"loss of {RANKS} ranks: {found!r}, must be {loss.item()!r} within {bound('same_values'):.0e}")
    limit = bound("same_gradients")
    for name, parameter in model.named_parameters():
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        size = max(1.0, float(expected.abs().max()))
        if (away := distance(gradients.get(name, torch.zeros_like(expected)), expected) / size) > limit:
            raise CheckFailed(
                f"gradient of {name} on {RANKS} ranks: differs by {away:.1e} of its size, must be within {limit:.0e}"
            )


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
        for rank, found in enumerate(ask_ranks(_measure_tensor, config, sequence)):
            where = f"rank {rank} of {RANKS}, sequence {sequence}"
            if distance(found[LOSS], loss) > bound("same_values"):
                raise CheckFailed(f"{where}: loss {found[LOSS].item()!r}, must be {loss.item()!r}")
            for name, one in split.splits(rank).items():
                part, size = one.of(whole[name]), max(1.0, float(whole[name].abs().max()))
                if (away := distance(found.get(name, torch.zeros_like(part)), part) / size) > limit:
                    raise CheckFailed(f"{where}: gradient of {name} differs by {away:.1e} of its size, bound {limit:.0e}")


ON_TWO_RANKS = (sharded_equals_whole, tensor_parallel_equals_whole)
"""The checks that start processes."""


def mean_loss(model: Decoder, tokens: Tensor, rows: int | None = None) -> Tensor:
    """The summed loss of rows whose last token is a target only, over the targets of all `rows` rows."""
    total, _ = model.loss(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    return total / ((rows or len(tokens)) * (tokens.shape[1] - 1))


def _measure_shards(mesh: Any, rank: int, config: AxisConfig) -> dict[str, Tensor]:
    from torch.distributed.tensor import DTensor

    from twoaxis.train.parallel.sharding import local_part, shard

    whole = dict(toy_decoder(config).named_parameters())
    model, _ = shard(decoder_config(config), mesh, 0, torch.float64)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            parameter.to_local().copy_(local_part(whole[name], parameter))
    loss = mean_loss(model, toy_tokens(2 * RANKS).chunk(RANKS)[rank], rows=2 * RANKS)
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    gradients = {
        name: parameter.grad.full_tensor()
        for name, parameter in model.named_parameters()
        if isinstance(parameter.grad, DTensor)
    }
    return {LOSS: total, **gradients}


def _measure_tensor(mesh: Any, rank: int, config: AxisConfig, sequence: Any) -> dict[str, Tensor]:
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
