"""What training keeps of a decoder between its forward and its backward pass, summed from what its parts declare."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from twoaxis.core.cost import Shape
from twoaxis.core.site import Site, Stack
from twoaxis.core.state import Leaf, Numbers
from twoaxis.depth import DepthConfig
from twoaxis.model.cost import CostedModel, CostedSublayer, decoder_cost, norm_cost
from twoaxis.ops.rope import RotationTable


class SavingSublayer(CostedSublayer, Protocol):
    """What stands in a block, with the tables that it shares."""

    def rotations(self, d_model: int) -> frozenset[RotationTable]:
        """Its rotation tables, which all layers that need the same have once."""
        ...


class SavingModel(CostedModel, Protocol):
    """A model whose sublayers say what they share, such as a `DecoderConfig`."""

    @property
    def parts(self) -> Sequence[SavingSublayer]:
        """The sublayers in order."""
        ...


def decoder_saved_bytes(model: SavingModel, shape: Shape) -> int:
    """Bytes that autograd keeps of one pass from tokens to the loss, beyond parameters and token ids.

    Equation: what every part declares as its own, and once each what passes between them: the tensors of depth states that are
              kept, views that are in no state, the context of every sublayer, updates that a write keeps, rotation tables

    Example:
        >>> from twoaxis.model import DecoderConfig
        >>> config = DecoderConfig(vocab_size=256, d_model=64, n_layers=2)
        >>> one, two = (decoder_saved_bytes(config, Shape(batch=1, tokens=tokens)) for tokens in (1, 2))
        >>> two - one
        10036
    """
    depth, stack = model.depth, model.stack
    kept = [leaf for index in range(stack.n_sublayers + 1) for leaf in depth.state(stack, index) if leaf.kept]
    between = sum(_handed_over(depth, site, shape) for site in stack.sites)
    return decoder_cost(model, shape).saved_bytes + between + _leaf_bytes(kept, shape) + _outside_blocks(model, stack, shape)


def recomputing_saved_bytes(model: SavingModel, shape: Shape) -> int:
    """Bytes kept of a pass with `recompute=True`: the state before every block, and what the ends and the loss keep.

    PyTorch's checkpoint adds the state of its random generator for each block, and positions as integers.
    """
    depth, stack = model.depth, model.stack
    before = [leaf for site in stack.sites if site.opens_block for leaf in depth.state(stack, site.index)]
    ends = decoder_cost(model, shape).saved_bytes - sum(_own_bytes(model, stack, shape))
    return ends + _leaf_bytes([*before, *depth.kept_by_ends(stack)], shape) + _outside_blocks(model, stack, shape)


def recomputing_peak_bytes(model: SavingModel, shape: Shape) -> int:
    """The same, with the most that one block keeps while it is recomputed."""
    return recomputing_saved_bytes(model, shape) + max(blocks_saved_bytes(model, shape))


def blocks_saved_bytes(model: SavingModel, shape: Shape) -> list[int]:
    """Bytes that autograd keeps inside each block, beyond the state that enters it, parameters and rotation tables.

    Of the tensors of states that a block makes, it keeps those whose first keeper is one of its own sublayers.
    """
    depth, stack = model.depth, model.stack
    kept = [0] * stack.n_blocks
    for site, own in zip(stack.sites, _own_bytes(model, stack, shape), strict=True):
        kept[site.block] += own + _handed_over(depth, site, shape)
    return [rest + _leaf_bytes(_kept_inside(depth, stack, block), shape) for block, rest in enumerate(kept)]


def _kept_inside(depth: DepthConfig, stack: Stack, block: int) -> list[Leaf]:
    """The tensors of states that a block makes and keeps."""
    first = sum(stack.block_lengths[:block])
    last = first + stack.block_lengths[block] - 1
    known, kept = {leaf.name for leaf in depth.state(stack, first)}, list[Leaf]()
    for index in range(first + 1, last + 2):
        for leaf in depth.state(stack, index):
            keeper = index if leaf.keeper is None else leaf.keeper
            if leaf.kept and leaf.name not in known and keeper <= last:
                kept.append(leaf)
            known.add(leaf.name)
    return kept


def _own_bytes(model: SavingModel, stack: Stack, shape: Shape) -> list[int]:
    """Bytes that each sublayer keeps with its norms, its read and its write."""
    depth, norm = model.depth, norm_cost(model.norm, model.d_model, shape).saved_bytes
    costs = (depth.cost(site, shape) + part.cost(site, shape) for site, part in zip(stack.sites, model.parts, strict=True))
    norms = (3 if depth.splits_views(site) else 1 for site in stack.sites)
    return [cost.saved_bytes + n * norm for cost, n in zip(costs, norms, strict=True)]


def _handed_over(depth: DepthConfig, site: Site, shape: Shape) -> int:
    """Bytes of views and update, where no state holds them, and of the context."""
    flow, D = depth.flow(site), site.d_model
    contexts = Numbers(D * (3 if depth.splits_views(site) else 1))
    update = Numbers((D + site.slot.update_extra) * flow.keeps_update)
    handed_over = shape.total_tokens * (flow.views + contexts + update).bytes(shape.element_bytes)
    return handed_over + depth.padding_bytes(site, shape)


def _leaf_bytes(leaves: Iterable[Leaf], shape: Shape) -> int:
    """Bytes of tensors of states, those of one name once."""
    once = {leaf.name: leaf.numbers for leaf in leaves}
    return shape.total_tokens * sum(numbers.bytes(shape.element_bytes) for numbers in once.values())


def _outside_blocks(model: SavingModel, stack: Stack, shape: Shape) -> int:
    """Bytes of rotation tables, and of what enters and leaves the stack where no state holds it."""
    flow = model.depth.ends_flow(stack)
    ends = flow.views + Numbers(stack.d_model * flow.keeps_update)
    tables = {table for part in model.parts for table in part.rotations(stack.d_model)}
    shared = sum(table.saved_bytes(shape) for table in tables) + model.depth.ends_padding_bytes(stack, shape)
    return shared + shape.total_tokens * ends.bytes(shape.element_bytes)
