"""Low-rank sums: an update, the stream, and low-rank maps of one or several sources, weighted and added at once.

Letters: B batch, T position, D width, S sources, R rank of one map, M maps (1 for all sources, or S),
N = B T tokens.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from twoaxis.core.errors import ConfigError
from twoaxis.ops.precision import outside_autocast, statistics_dtype


@outside_autocast
def low_rank_sum(
    update: Float[Tensor, "B T D"],
    sources: Sequence[Float[Tensor, "B T D"]],
    scales: Float[Tensor, " two"],
    weights: Float[Tensor, " S"],
    down: Float[Tensor, "MR D"],
    up: Float[Tensor, "D MR"],
    n_maps: int = 1,
) -> Float[Tensor, "B T D"]:
    """Adds the update, the last source, and a low-rank map of each source.

    Equation: y = a u + b x_S + sum_j w_j U_j V_j x_j,  (a, b) the scales, with one pair U, V for all sources or one for each
    Source:   LAuReL, arXiv:2411.07501, eq. 3-6
    Shapes:   scales and weights in the precision of statistics; products with maps in the dtype of the sources; y in it, too
    Cost:     matrix product flops 2*R*D per source and token and 2*M*R*D per token, 4*D more per token; saves the sources,
              the parameters, R numbers per source and token, and the update when the scales are learned

    Raises:
        ConfigError: no source, or weights or maps for another number of sources.

    Example:
        >>> x, down = torch.tensor([[[1.0, 2.0]]]), torch.tensor([[1.0, 1.0]])
        >>> low_rank_sum(x, [x], torch.ones(2), torch.ones(1), down, torch.tensor([[10.0], [0.0]]))
        tensor([[[32.,  4.]]])
    """
    S = len(sources)
    if not sources or weights.shape[0] != S or n_maps not in (1, S):
        counts = f"{S} sources, {weights.shape[0]} weights and {n_maps} maps"
        raise ConfigError(f"low_rank_sum: got {counts}; give one weight per source, and one map per source or in all")
    dtype, maps = statistics_dtype(update), down.chunk(n_maps)
    scales, weights = scales.to(dtype), weights.to(dtype)
    hidden = [F.linear(x, maps[j % n_maps]) for j, x in enumerate(sources)]
    mapped = F.linear(_weighted(hidden, weights, n_maps).to(update.dtype), up)
    return (scales[:1] * update + scales[1:] * sources[-1] + mapped).to(update.dtype)


def _weighted(hidden: Sequence[Tensor], weights: Tensor, n_maps: int) -> Tensor:
    """The hidden features of all sources, concatenated for separate maps and added for a shared one."""
    parts = [h * weights[j : j + 1] for j, h in enumerate(hidden)]
    return sum(parts[1:], parts[0]) if n_maps == 1 else torch.cat(parts, dim=-1)
