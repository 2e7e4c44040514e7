"""Running sums of the weights of depth sources.

Letters: B batch, T position, S sources, P parts of the width, K token classes, N = B T tokens.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from twoaxis.audit.result import ClassRouting, Routing
from twoaxis.core.views import Role, WeightedSum


class RoutingTotals:
    """The weights of one sum, accumulated over batches.

    Args:
        sublayer: its index.
        like: the sum in the first batch.
        part: of its width, or None for the mean over all parts.
        n_classes: token classes.
    """

    def __init__(self, sublayer: int, like: WeightedSum, part: int | None, n_classes: int) -> None:
        S = len(like.names)
        self.sublayer, self.part = sublayer, part
        self.result, self.names = like.result, like.names
        self.role: Role = like.role
        self.part_name = "" if part is None else like.parts[part]
        self.tokens = torch.zeros(n_classes, dtype=torch.float64)
        self.weights, self.sizes = (torch.zeros(n_classes, S, dtype=torch.float64) for _ in range(2))
        self.entropies = torch.zeros(n_classes, dtype=torch.float64)
        self.shares, self.squares = (torch.zeros(S, dtype=torch.float64) for _ in range(2))

    def add(self, weights: Float[Tensor, "S B T P"], classes: Bool[Tensor, "K B T"]) -> None:
        """Adds one batch."""
        if self.part is not None:
            weights = weights[..., self.part : self.part + 1]
        size = weights.abs()
        # A token whose weights are all zero has no favourite and the entropy 0.
        share = size / size.sum(0).clamp(min=torch.finfo(size.dtype).tiny)
        entropy = torch.special.entr(share).sum(0).mean(-1).flatten().double()
        mean, size, share = (x.mean(-1).flatten(1).double() for x in (weights, size, share))
        members = classes.flatten(1).double()
        self.tokens += members.sum(1)
        self.weights += members @ mean.T
        self.sizes += members @ size.T
        self.entropies += members @ entropy
        self.shares += share.sum(1)
        self.squares += mean.square().sum(1)

    def result_of(self, names: tuple[str, ...]) -> Routing:
        """The means, by the names of the token classes."""
        # Sums that only mix streams, and those of fractions, are many and vary little by class.
        names = names if self.role == "read" and not self.part_name else names[:1]
        tokens = self.tokens.clamp(min=1)
        weights, entropies = self.weights / tokens[:, None], self.entropies / tokens
        classes = {
            name: ClassRouting(
                weight=rounded(weights[k]),
                entropy=rounded(entropies[k : k + 1])[0],
                favourite=self.names[int(self.sizes[k].argmax())],
            )
            for k, name in enumerate(names)
        }
        variance = (self.squares / tokens[0] - weights[0].square()).clamp(min=0)
        # A variance within the rounding error of the two means is 0.
        variance[variance < 1e-13 * weights[0].square()] = 0
        return Routing(
            sublayer=self.sublayer,
            result=self.result,
            part=self.part_name,
            role=self.role,
            sources=self.names,
            share=rounded(self.shares / tokens[0]),
            deviation=rounded(variance.sqrt()),
            classes=classes,
        )


class RoutingTable:
    """The totals of every weighted sum of a model."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self._totals: dict[tuple[int, str, int | None], RoutingTotals] = {}

    def add(self, sublayer: int, sums: tuple[WeightedSum, ...], classes: Bool[Tensor, "K B T"]) -> None:
        """Adds the sums of one sublayer in one batch."""
        for one in sums:
            for part in range(len(one.parts)) if one.parts else (None,):
                key = sublayer, one.result, part
                if key not in self._totals:
                    self._totals[key] = RoutingTotals(sublayer, one, part, len(self.names))
                self._totals[key].add(one.weights, classes)

    def result(self) -> tuple[Routing, ...]:
        """All sums in the order of depth."""
        return tuple(totals.result_of(self.names) for _, totals in sorted(self._totals.items(), key=lambda item: item[0][0]))


def rounded(values: Tensor, digits: int = 6) -> tuple[float, ...]:
    """Rounds to a number of significant digits, so that files stay small.

    Example:
        >>> rounded(torch.tensor([1 / 3, 2e-9], dtype=torch.float64))
        (0.333333, 2e-09)
    """
    return tuple(float(f"{value:.{digits}g}") for value in values.tolist())
