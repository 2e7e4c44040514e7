"""Kernels and bytes of a depth operation when PyTorch runs it one operation at a time, counted on tensors without memory.

The declared `Flow` is what the best engine has to move. This is what ours moves without a compiler: every operation is a
kernel that reads its inputs and writes its result. It depends on nothing but shapes, so it is run on the meta device.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from twoaxis.core.cost import Shape
from twoaxis.core.errors import ConfigError
from twoaxis.core.measure import NOTHING_MOVED, tensors
from twoaxis.core.site import Site, Stack
from twoaxis.core.views import Heads
from twoaxis.depth import DepthConfig, DepthMixer


@dataclass(frozen=True)
class Kernels:
    """Operations of a computation on N tokens.

    Attributes:
        count: operations that move something.
        bytes_per_token: bytes that they read and write, by token.
        fixed_bytes: bytes that do not depend on the tokens, such as parameters.
    """

    count: int = 0
    bytes_per_token: int = 0
    fixed_bytes: int = 0

    def bytes(self, tokens: int) -> int:
        """Bytes for so many tokens."""
        return self.fixed_bytes + tokens * self.bytes_per_token

    def __add__(self, other: "Kernels") -> "Kernels":
        return Kernels(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


class EagerDepth(NamedTuple):
    """The depth operation of one sublayer, or of both ends."""

    forward: Kernels
    backward: Kernels


MOST_KERNELS = 20_000
"""Operations of one sublayer beyond which a depth mixer is no longer run without a compiler by anyone."""

TOKENS = 1009
"""Tokens of the pass that is counted: a prime, so that what grows with tokens is what it divides."""


def eager_depth(depth: DepthConfig, stack: Stack, dtype: torch.dtype = torch.bfloat16) -> tuple[EagerDepth, ...]:
    """The operations at every site in order, and at the two ends after them.

    Sites that see as many numbers, in a sublayer of the same kind at the same place, are counted once.

    Raises:
        ConfigError: more than `MOST_KERNELS` operations in one pass of one sublayer.

    Example:
        >>> from twoaxis.depth import ResidualConfig
        >>> add, ends = eager_depth(ResidualConfig(), Stack(8, 1e-6, (1,)))
        >>> add.forward.count, add.forward.bytes(tokens=1)  # reads 8 + 8 numbers, writes 8
        (1, 48)
    """
    # A frozen configuration is hashable, which its type does not say.
    hashable: Any = depth
    return _counted(hashable, stack, dtype)


@lru_cache(maxsize=256)
def _counted(depth: DepthConfig, stack: Stack, dtype: torch.dtype) -> tuple[EagerDepth, ...]:
    sites = stack.sites
    with torch.device("meta"):
        mixers, ends = depth.build(stack)
    for module in (*mixers, ends):
        module.to(dtype)
    embeddings = torch.empty(1, TOKENS, stack.d_model, dtype=dtype, device="meta")
    state, enter = _both_ways(lambda e: (ends.enter(e)[0], ()), (embeddings,))
    found: dict[Any, EagerDepth] = {}
    counted = []
    for mixer, site in zip(mixers, sites, strict=True):
        key = _likeness(depth, stack, site)
        if key in found:
            with torch.no_grad():
                state, _ = _operate(mixer, site, state, dtype)
        else:
            try:
                state, found[key] = _both_ways(partial(_operate, mixer, site, dtype=dtype), (state,))
            except TooManyKernels:
                allowed = f"at most {MOST_KERNELS} operations in sublayer {site.index} of {stack.n_sublayers}"
                raise ConfigError(
                    f"engine 'eager': {depth.kind!r} must take {allowed}; got more, so plan it with engine='fused'"
                ) from None
        counted.append(found[key])
    _, leave = _both_ways(lambda s: (ends.leave(s)[0], ()), (state,))
    return (*counted, EagerDepth(enter.forward + leave.forward, enter.backward + leave.backward))


def _likeness(depth: DepthConfig, stack: Stack, site: Site) -> Any:
    """What two sites share that run the same operations on tensors of the same shapes."""
    states = [tuple((leaf.numbers, leaf.kept) for leaf in depth.state(stack, index)) for index in (site.index, site.index + 1)]
    cost = depth.cost(site, Shape(1, 1, 2))
    return (*states, depth.flow(site), cost, site.slot, site.place, site.opens_block, site.closes_block)


def _operate(mixer: DepthMixer, site: Site, state: Any, dtype: torch.dtype) -> tuple[Any, Any]:
    """The next state, and what else is made, from an update and a context of the right shape."""
    views, carry, _ = mixer.read(state)

    def empty(*shape: int) -> Tensor:
        return torch.empty(1, TOKENS, *shape, dtype=dtype, device="meta", requires_grad=True)

    context = tree_map(lambda view: torch.empty_like(view, requires_grad=True), views)
    if mixer.mixes_heads and site.slot.heads:
        h = site.slot.heads
        heads = Heads(*(empty(n, h.head_dim) for n in (h.n_heads, h.n_kv_heads, h.n_kv_heads)))
        heads, state = mixer.mix_heads(heads, context, state)
    else:
        heads = ()
    following = mixer.write(state, empty(site.d_model + site.slot.update_extra), context, carry)
    return following, (views, heads)


def _both_ways(run: Callable[..., tuple[Any, Any]], given: tuple[Any, ...]) -> tuple[Any, EagerDepth]:
    """The first of the two things that a computation returns, and its operations forward and backward."""
    given = tree_map(_leaf, given)
    with KernelCounter(TOKENS) as forward:
        first, others = run(*given)
    outputs = [t for t in tensors((first, others)) if t.requires_grad and t.grad_fn is not None]
    with KernelCounter(TOKENS) as backward:
        if outputs:
            torch.autograd.backward(outputs, [torch.empty_like(t) for t in outputs])
    return first, EagerDepth(forward.kernels, backward.kernels)


def _leaf(value: Any) -> Any:
    return value.detach().requires_grad_(value.is_floating_point()) if isinstance(value, Tensor) else value


class TooManyKernels(Exception):
    """A computation takes more operations than are counted."""


class KernelCounter(TorchDispatchMode):
    """Counts operations that move something, and the bytes of what they read and write.

    Args:
        tokens: of the pass, a number that divides the size of a tensor only if it has an entry for each of them.
    """

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens, self.kernels = tokens, Kernels()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operation and counts it unless it is a view."""
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__.strip("_")
        if not name.startswith(NOTHING_MOVED):
            # An operation in place names its result among its arguments; it is read and written.
            moved = [(t.numel(), t.element_size()) for t in (*tensors((args, kwargs or {})), *tensors(result))]
            each = sum(n // self.tokens * width for n, width in moved if n % self.tokens == 0)
            fixed = sum(n * width for n, width in moved if n % self.tokens)
            self.kernels += Kernels(1, each, fixed)
            if self.kernels.count > MOST_KERNELS:
                raise TooManyKernels
        return result
