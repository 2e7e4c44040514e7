"""Tests whether the weights of a depth read are attention: a softmax over products of a query with keys made from states.

Letters: B batch, T position, S sources of a read, P parts of the width, R rows of a test of rank.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from twoaxis.core.measure import distance, noise
from twoaxis.core.views import WeightedSum
from twoaxis.depth import DepthMixer
from twoaxis.depth.base import Read

RELATIVE = 1e-8
"""Threshold between rounding, near 1e-13, and the measured changes, which are far larger."""

ROWS = 64
"""Larger than the width of any key here, so that a product of queries and keys has a deficient rank."""

ATTENTION, LEARNED_QUERY, NO_ATTENTION = "softmax of query-key products", "softmax over keys, learned query", "no"


class Roles(NamedTuple):
    """The tensors of a depth state by their effect on the odds between sources.

    Attributes:
        keys: by source, the tensor that changes the odds of this source alone.
        queries: tensors that change odds between several sources.
    """

    keys: dict[int, int]
    queries: list[int]


@torch.no_grad()
def attention_form(mixer: DepthMixer, state: Any) -> str:
    """The form of the weights with which a mixer reads a generic state."""
    found = read_sum(mixer, state)
    if found is None or len(found.sources) < 3 or shares(found) is None:
        return NO_ATTENTION
    roles = find_roles(mixer, state)
    # The newest source may be key and query at once; a learned source has no tensor.
    states = {index for index, source in enumerate(found.sources[:-1]) if (source != source[:1, :1]).any()}
    if not states <= set(roles.keys):
        return NO_ATTENTION
    if not roles.queries:
        return LEARNED_QUERY
    return ATTENTION if is_product(mixer, state, roles) else NO_ATTENTION


def read_sum(mixer: DepthMixer, state: Any) -> WeightedSum | None:
    """The weighted sum that a mixer reads; None without one, or if it differs from the declared one."""
    views, carry, _ = mixer.read(state)
    found = next((one for one in mixer.explain(Read(state, views, carry)).sums if one.role == "read"), None)
    if found is None or distance(found.finished(found.total()), found.made) > RELATIVE:
        return None
    return found


def shares(found: WeightedSum | None) -> Float[Tensor, "S B T P"] | None:
    """Weights normalised to sum to one; None unless they are positive with the same sum for all tokens."""
    if found is None or not found.weights.min() > 0:
        return None
    total = found.weights.sum(0)
    return found.weights / total if distance(total, total[:1, :1].expand_as(total)) <= RELATIVE else None


def find_roles(mixer: DepthMixer, state: Any) -> Roles:
    """Replaces each tensor of the state in turn and finds the sources whose odds change."""
    before, keys, queries = shares(read_sum(mixer, state)), {}, []
    for index, leaf in enumerate(tree_flatten(state)[0]):
        if leaf.ndim < 3 or leaf.shape[-1] == 1:
            # One number per token is a statistic of a source, such as its norm.
            continue
        after = shares(read_sum(mixer, replaced(state, index)))
        if before is None or after is None or len(after) != len(before):
            return Roles({}, [])
        odds = _moved_odds(before, after)
        if not odds.any():
            continue
        alone = [i for i in range(len(before)) if not _without(odds, i).any()]
        if alone:
            keys[alone[0]] = index
        else:
            queries.append(index)
    return Roles(keys, queries)


def _moved_odds(before: Tensor, after: Tensor) -> Tensor:
    """[S, S]: whether the log odds of two sources have changed anywhere."""
    change = (after.log() - before.log()).flatten(1)
    return (change[:, None] - change[None]).abs().amax(-1) > RELATIVE


def _without(odds: Tensor, source: int) -> Tensor:
    rest = [i for i in range(len(odds)) if i != source]
    return odds[rest][:, rest]


def is_product(mixer: DepthMixer, state: Any, roles: Roles) -> bool:
    """Whether log odds, as a matrix of queries by keys, have a deficient rank, as products of narrow vectors do."""
    source, key = next(iter(roles.keys.items()))
    other = next(i for i in roles.keys if i != source)
    rows = _rows_of_one_token(state)
    table = []
    queried = replaced(rows, roles.queries[0], "query")
    for column in range(ROWS):
        found = shares(read_sum(mixer, replaced(queried, key, f"key {column}", same=True)))
        if found is None:
            return False
        table.append((found[source].log() - found[other].log())[:, 0])
    # Subtracts the part that depends on the query alone.
    odds = torch.stack(table, dim=1)
    singular = torch.linalg.svdvals((odds - odds.mean(1, keepdim=True)).movedim(-1, 0))
    rank = (singular > RELATIVE * singular[:, :1]).sum(-1)
    return bool((rank < ROWS - 1).all())


def _rows_of_one_token(state: Any) -> Any:
    leaves, tree = tree_flatten(state)
    return tree_unflatten([leaf[:1, :1].expand(ROWS, *leaf[:1, :1].shape[1:]).contiguous() for leaf in leaves], tree)


def replaced(state: Any, index: int, name: str = "other", same: bool = False) -> Any:
    """The state with one tensor replaced by noise of the same norm, equal in every row if `same`."""
    leaves, tree = tree_flatten(state)
    shape = tuple(leaves[index].shape)
    fresh = noise((1, *shape[1:]) if same else shape, f"claims/form {name} {index}").expand(shape)
    length = leaves[index].norm(dim=-1, keepdim=True)[:1] if same else leaves[index].norm(dim=-1, keepdim=True)
    leaves[index] = fresh * (length / fresh.norm(dim=-1, keepdim=True))
    return tree_unflatten(leaves, tree)
