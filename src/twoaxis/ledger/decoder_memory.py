"""What training keeps of a whole decoder between its forward and its backward pass, and what generation carries."""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from twoaxis.core.cost import Shape
from twoaxis.core.measure import saved_bytes
from twoaxis.core.position import LayerStack, SublayerPosition
from twoaxis.ledger.meter import Mode, measured_dtype, measured_once, without_memory
from twoaxis.ledger.stack import StackTrace, trace_stack
from twoaxis.ledger.sublayer import cached_once, saved_once
from twoaxis.model.config import SublayerConfig
from twoaxis.model.cost import CostedModel, CostedSublayer
from twoaxis.ops.cross_entropy import cross_entropy_of_valid
from twoaxis.ops.rope import RotationTable

FEW = 512
"""Tokens of a pass up to which reads and writes are counted too; per token they are the same for all."""


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


def decoder_trace(model: SavingModel, shape: Shape, mode: Mode = "eager", traffic: bool = True) -> StackTrace:
    """The depth operations of a model, measured in one pass; the same model and shape are measured once.

    Without `traffic`, which takes the longest, reads and writes are not counted; with many tokens they never are.

    Example:
        >>> from twoaxis.model import DecoderConfig
        >>> config = DecoderConfig(vocab_size=256, d_model=64, n_layers=2, depth="denseformer")
        >>> found = decoder_trace(config, Shape(batch=1, tokens=4))
        >>> [found.state_elements(index) for index in range(5)]
        [64, 128, 192, 192, 64]
    """
    parts = tuple(native_config(part) for part in model.parts)
    few = traffic and shape.total_tokens <= FEW
    normed = model.embedding_norm == "rms"
    return _trace(model.depth, model.stack, shape, parts, model.norm, normed, model.embedding_local, mode, few)


@measured_once(64)
def _trace(
    depth: Any, stack: LayerStack, shape: Shape, parts: Any, norm: Any, normed: bool, local: Any, mode: Mode, traffic: bool
) -> StackTrace:
    options: Any = {"parts": parts, "norm": norm, "embedding_norm": normed, "embedding_local": local}
    return trace_stack(depth, stack, shape, **options, mode=mode, traffic=traffic)


def native_config(part: Any) -> SublayerConfig | None:
    """The configuration of a sublayer that this library can build; None where it is of another library."""
    found = getattr(part, "config", part)
    return found if isinstance(found, SublayerConfig) else None


def part_saved_bytes(part: Any, site: SublayerPosition, shape: Shape, mode: Mode = "eager") -> int:
    """What a sublayer saves for its backward pass: measured where it can be built, else what the part says."""
    config = native_config(part)
    return part.cost(site, shape).saved_bytes if config is None else saved_once(config, site, shape, mode)


def part_cache_bytes(part: Any, site: SublayerPosition, shape: Shape, mode: Mode = "eager") -> int:
    """What a sublayer carries in generation, in the same way."""
    config = native_config(part)
    return part.cost(site, shape).cache_bytes if config is None else cached_once(config, site, shape, mode)


def decoder_saved_bytes(model: SavingModel, shape: Shape, mode: Mode = "eager") -> int:
    """Bytes that autograd saves of one pass from tokens to the loss, beyond parameters and token ids.

    Equation: distinct storages that reads, writes and norms save, the tensors of depth states and views among them, the context
              of every sublayer, what sublayers save inside, rotation tables, and the gradients that the loss makes at once

    Example:
        >>> from twoaxis.model import DecoderConfig
        >>> config = DecoderConfig(vocab_size=256, d_model=64, n_layers=2)
        >>> one, two = (decoder_saved_bytes(config, Shape(batch=1, tokens=tokens)) for tokens in (1, 2))
        >>> two - one
        10036
    """
    found = decoder_trace(model, shape, mode)
    return _distinct(found.saves) + sum(_inside(model, found, shape, mode)) + _outside_blocks(model, shape, mode)


def recomputing_saved_bytes(model: SavingModel, shape: Shape, mode: Mode = "eager") -> int:
    """Bytes kept of a pass with `recompute=True`: the state before every block, and what the ends and the loss keep.

    PyTorch's checkpoint adds the state of its random generator for each block, and positions as integers.
    """
    found, stack = decoder_trace(model, shape, mode), model.stack
    before = [(site.index, *each) for site in stack.sites if site.opens_block for each in found.state_storages[site.index]]
    at_ends = [save for save in found.saves if not 0 <= save[0] < stack.n_sublayers]
    return _distinct([*before, *at_ends]) + _outside_blocks(model, shape, mode)


def recomputing_peak_bytes(model: SavingModel, shape: Shape, mode: Mode = "eager") -> int:
    """The same, with the most that one block keeps while it is recomputed."""
    return recomputing_saved_bytes(model, shape, mode) + max(blocks_saved_bytes(model, shape, mode))


def blocks_saved_bytes(model: SavingModel, shape: Shape, mode: Mode = "eager") -> list[int]:
    """Bytes that autograd saves inside each block, beyond the state that enters it, parameters and rotation tables."""
    found, stack = decoder_trace(model, shape, mode), model.stack
    inside, start, result = _inside(model, found, shape, mode), 0, list[int]()
    for length in stack.block_lengths:
        entered = {storage for storage, _ in found.state_storages[start]}
        saves = [save for save in found.saves if start <= save[0] < start + length and save[1] not in entered]
        result.append(_distinct(saves) + sum(inside[start : start + length]))
        start += length
    return result


def decoder_cache_bytes(model: SavingModel, shape: Shape, mode: Mode = "eager") -> int:
    """Bytes that generation carries behind the tokens of a shape."""
    found = decoder_trace(model, shape, mode)
    depth = found.ends.cache + sum(operation.cache for operation in found.sublayers)
    each = zip(model.parts, model.stack.sites, strict=True)
    return depth + sum(part_cache_bytes(part, site, shape, mode) for part, site in each)


def rotation_bytes(model: SavingModel, shape: Shape) -> int:
    """Bytes of the rotation tables, which sublayers share."""
    tables = {table for part in model.parts for table in part.rotations(model.d_model)}
    tables |= set() if model.embedding_local is None else model.embedding_local.rotations
    return sum(table.saved_bytes(shape) for table in tables)


@measured_once(256)
def loss_saved_bytes(d_model: int, vocab_size: int, shape: Shape, mode: Mode = "eager") -> int:
    """Bytes that the loss saves: no logits, but the gradients of the hidden numbers and of the head."""
    dtype = measured_dtype(mode, shape.element_bytes)
    with without_memory(mode, shape.element_bytes):
        hidden = torch.empty(shape.total_tokens, d_model, dtype=dtype, requires_grad=True)
        weight = nn.Parameter(torch.empty(vocab_size, d_model, dtype=dtype))
        targets = torch.zeros(shape.total_tokens, dtype=torch.int64)
        known = (hidden, weight, targets)
        return saved_bytes(lambda: cross_entropy_of_valid(*known, "fused"), lambda loss: [*known, loss])


def _inside(model: SavingModel, found: StackTrace, shape: Shape, mode: Mode) -> list[int]:
    """Bytes that each sublayer saves between its input and its output; where its heads are mixed the trace has them."""
    each = zip(model.parts, model.stack.sites, found.sublayers, strict=True)
    return [0 if operation.heads_saved else part_saved_bytes(part, site, shape, mode) for part, site, operation in each]


def _outside_blocks(model: SavingModel, shape: Shape, mode: Mode) -> int:
    return rotation_bytes(model, shape) + loss_saved_bytes(model.d_model, model.vocab_size, shape, mode)


def _distinct(saves: Iterable[tuple[int, int, int]]) -> int:
    return sum({storage: size for _, storage, size in saves}.values())
