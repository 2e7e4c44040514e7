"""One depth mixer with given weights around branches that both sides share: ours through its contract, and its equation.

Letters: B batch, T position, D width, H heads, G kv-heads, K key width. Each kv-head has two query heads.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from twoaxis.core.layout import TokenLayout
from twoaxis.core.measure import noise, perturb
from twoaxis.core.parameters import initialise
from twoaxis.core.position import HeadShape, LayerStack, SublayerInfo, SublayerPosition
from twoaxis.core.views import QKV, Heads
from twoaxis.depth import DepthConfig

B, T, D, H, G, K = 2, 5, 8, 4, 2, 3
EPS = 1e-3
"""Of every norm: large, so that an eps at the wrong place shows."""
LENGTHS = ((2, 2, 2), (1, 3, 2))
"""Sublayers of each block."""
VOCAB = 30
IDS = torch.tensor([[7, 4, 4, 9, 2], [8, 2, 5, 11, 6]])
"""Token ids, for mixers with tables."""

Mix = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]


def stack_of(config: DepthConfig, lengths: tuple[int, ...]) -> LayerStack:
    """A stack whose blocks open with an attention that takes separate views and lets its heads be mixed."""
    attention = SublayerInfo("attention", takes_views=True, heads=HeadShape(H, G, K))
    slots = tuple(attention if place == 0 else SublayerInfo("swiglu") for length in lengths for place in range(length))
    return config.prepare(LayerStack(D, EPS, lengths, slots, VOCAB))


def rms(x: Tensor, eps: float) -> Tensor:
    """Divides by the root mean square."""
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def layer(x: Tensor, eps: float) -> Tensor:
    """LayerNorm without gain and bias."""
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()


def weighted(weights: Any, sources: Any) -> Tensor:
    """The sum of the sources by their weights, which are numbers or tensors that broadcast."""
    terms = [weight * source for weight, source in zip(weights, sources, strict=True)]
    return torch.stack(torch.broadcast_tensors(*terms)).sum(0)


def context(x: Tensor, eps: float = EPS) -> Tensor:
    """What a sublayer makes of a view before anything else: a norm with a gain."""
    return rms(x, eps) * torch.linspace(0.5, 1.5, x.shape[-1], dtype=x.dtype)


def seen(site: SublayerPosition, view: Tensor) -> Tensor:
    """What a sublayer sees of a view: its context, unless the depth mixer asks for no norm."""
    return view if site.slot.norm == "none" else site.slot.norm_scale * context(view, site.norm_eps)


def branch(site: SublayerPosition, views: tuple[Tensor, ...]) -> Tensor:
    """The update of a sublayer without heads, and what its slot emits for the depth mixer."""
    width = D + site.slot.update_extra
    return torch.tanh(sum_of_maps([seen(site, view) for view in views], width, f"branch {site.index}"))


def heads_of(site: SublayerPosition, view: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [B T H K], keys and values [B T G K] of a sublayer with heads."""
    projected = sum_of_maps([seen(site, view)], (H + 2 * G) * K, f"heads {site.index}").unflatten(-1, (-1, K))
    q, k, v = projected.split((H, G, G), dim=2)
    return q, k, v


def unrotated_of(site: SublayerPosition, view: Tensor) -> tuple[Tensor, Tensor]:
    """Keys [B T G K] as they are before rotation, and the gain [B T K] of their norm."""
    keys = sum_of_maps([context(view, site.norm_eps)], G * K, f"unrotated {site.index}").unflatten(-1, (G, K))
    return keys, torch.linspace(0.5, 2.0, K, dtype=view.dtype).expand(*view.shape[:2], K)


def attended(site: SublayerPosition, *heads: Tensor) -> Tensor:
    """The update of a sublayer with heads, to which every number of them, and of what they attend to besides, matters."""
    return torch.tanh(sum_of_maps([x.flatten(2) for x in heads], D, f"attended {site.index}"))


def sum_of_maps(inputs: list[Tensor], width: int, name: str) -> Tensor:
    """A fixed map of each input, added up."""
    maps = (noise((x.shape[-1], width), f"{name}, input {i}") / x.shape[-1] ** 0.5 for i, x in enumerate(inputs))
    return torch.stack([x @ m for x, m in zip(inputs, maps, strict=True)]).sum(0)


@dataclass
class Setting:
    """What an equation is computed from; `f` runs a sublayer and notes what it has read."""

    config: Any
    stack: LayerStack
    weights: Mapping[str, Tensor]
    embeddings: Tensor
    views: list[tuple[Tensor, ...]] = field(default_factory=list)

    def mixer(self, index: int) -> dict[str, Tensor]:
        """The weights of the mixer of one sublayer."""
        return part_of(self.weights, f"mixers.{index}.")

    @property
    def ends(self) -> dict[str, Tensor]:
        """The weights of the ends."""
        return part_of(self.weights, "ends.")

    def f(self, index: int, *views: Tensor) -> Tensor:
        """The update of a sublayer that reads this."""
        self.views.append(views)
        return branch(self.stack.sites[index], views)

    def norm(self, index: int) -> float | None:
        """The factor on the norm before a sublayer; None without that norm."""
        slot = self.stack.sites[index].slot
        return None if slot.norm == "none" else slot.norm_scale

    def f_of_heads(self, index: int, view: Tensor, mix: Mix) -> Tensor:
        """The same of a sublayer whose heads are mixed before they attend, and may attend to more."""
        self.views.append((view,))
        site = self.stack.sites[index]
        return attended(site, *mix(*heads_of(site, view)))


def given_heads(site: SublayerPosition, view: Tensor) -> Any:
    """What a depth mixer gets of a sublayer, at the stage that it asks for."""
    if site.slot.heads is None:
        return ()
    q, k, v = heads_of(site, view)
    heads = Heads(q, k, v if site.slot.projects_values else k)
    return heads._replace(unrotated=unrotated_of(site, view)) if site.slot.heads_at == "rotated" else heads


def part_of(weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The weights below a prefix, by the rest of their names."""
    return {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}


class Ours(nn.Module):
    """The mixers and ends of a configuration away from their initial values."""

    def __init__(self, config: DepthConfig, stack: LayerStack) -> None:
        super().__init__()
        self.stack, (mixers, ends) = stack, config.build(stack)
        self.mixers, self.ends = nn.ModuleList(mixers), ends
        initialise(self, 0)
        perturb(self.double())

    def run(self, embeddings: Tensor) -> tuple[list[tuple[Tensor, ...]], Tensor]:
        """Returns what every sublayer reads, and what is left."""
        ends: Any = self.ends
        state, read, layout = ends.enter(embeddings)[0], [], TokenLayout.contiguous(T).of(IDS)
        for site, module in zip(self.stack.sites, self.mixers, strict=True):
            mixer: Any = module
            views: Any
            views, carry, _ = mixer.read(state, layout)
            split = tuple(views) if isinstance(views, QKV) else (views,)
            read.append(split)
            if mixer.mixes_heads:
                (view,) = split
                heads, state = mixer.mix_heads(given_heads(site, view), seen(site, view), state, layout)
            if site.slot.heads is not None and mixer.mixes_heads:
                score_and_value, weight = heads.beside[:2], heads.beside[2:]
                update = attended(site, *heads[:3], *score_and_value, *(x.expand(B, T, 1) for x in weight))
            else:
                update = branch(site, split)
            contexts = tuple(seen(site, view) for view in split)
            state = mixer.write(state, update, QKV(*contexts) if len(contexts) == 3 else contexts[0], carry)
        return read, ends.leave(state)[0]


def embeddings() -> Tensor:
    """What enters, the same for every case."""
    return noise((B, T, D), "embeddings").requires_grad_()


def same(got: Sequence[Tensor], expected: Sequence[Tensor], leaves: Mapping[str, Tensor]) -> None:
    """Compares results, and the gradients of a sum of all their numbers; what no result depends on has none in either."""
    weights = [noise(tuple(one.shape), f"result {index}") for index, one in enumerate(got)]
    found, wanted = (
        torch.autograd.grad(results, list(leaves.values()), weights, materialize_grads=True) for results in (got, expected)
    )
    names = [*(f"result {index}" for index in range(len(got))), *(f"gradient of {name}" for name in leaves)]
    for name, one, other in zip(names, (*got, *found), (*expected, *wanted), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")
