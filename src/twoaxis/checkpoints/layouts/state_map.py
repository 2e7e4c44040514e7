"""State maps between our parameters and the tensors of a published layout, in both directions."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from torch import Tensor, nn

from twoaxis.core.errors import CheckpointError, ConfigError, problem
from twoaxis.core.position import LayerStack
from twoaxis.depth import DepthConfig
from twoaxis.model import DecoderConfig
from twoaxis.model.block import sublayer_names

FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Types of tensors that are the numbers of a parameter; others are codes, which need scales that no layout has."""


class Part(NamedTuple):
    """A tensor of the published layout."""

    name: str
    shape: tuple[int, ...]


class Entry(NamedTuple):
    """A parameter of ours: their tensors concatenated along the first axis, in our shape."""

    ours: str
    parts: tuple[Part, ...]


def entry(ours: str, theirs: str, *shape: int) -> Entry:
    """A parameter of ours that is one tensor of the layout."""
    return Entry(ours, (Part(theirs, shape),))


class Constant(NamedTuple):
    """A tensor of the layout without effect; saved with this value everywhere."""

    part: Part
    value: float


class Stack(NamedTuple):
    """A tensor of the layout that holds several parameters of ours, along one dimension."""

    part: Part
    ours: tuple[str, ...]
    dim: int


@dataclass(frozen=True)
class StateMap:
    """The tensors of one model in one layout.

    Attributes:
        layout: its name in errors.
        entries: every parameter of the layout but those in `stacks`.
        stacks: parameters that one tensor of the layout has together.
        constants: tensors without a parameter of ours.
        ignored: patterns of names of tensors that are no parameters, such as rotation tables.
        family: patterns of the names of the layout; other tensors are ignored.
        tied: names of tensors that may repeat another tensor, and the name of that.

    Example:
        >>> layer = nn.Linear(2, 3)
        >>> weight = Entry("weight", (Part("a", (1, 2)), Part("b", (2, 2))))
        >>> table = StateMap("pairs", (weight, Entry("bias", (Part("c", (3,)),))))
        >>> {name: tuple(tensor.shape) for name, tensor in table.save(layer).items()}
        {'a': (1, 2), 'b': (2, 2), 'c': (3,)}
        >>> table.load(layer, {"a": torch.zeros(1, 2), "b": torch.zeros(2, 1)})
        Traceback (most recent call last):
        ...
        twoaxis.core.errors.CheckpointError: layout 'pairs': 1 missing (c), 1 of another shape (b is [2, 1], must be [2, 2]):
        all tensors must fit the model; load another checkpoint, or change the configuration
    """

    layout: str
    entries: tuple[Entry, ...]
    constants: tuple[Constant, ...] = ()
    ignored: tuple[str, ...] = ()
    family: tuple[str, ...] = ("*",)
    tied: Mapping[str, str] = field(default_factory=dict)
    stacks: tuple[Stack, ...] = ()

    @property
    def parts(self) -> dict[str, Part]:
        """The tensors of the layout by name."""
        kept = [part for entry in self.entries for part in entry.parts]
        return {part.name: part for part in (*kept, *(one.part for one in (*self.stacks, *self.constants)))}

    def names(self) -> dict[str, tuple[str, ...]]:
        """The names of the layout by ours."""
        stacked = {ours: (stack.part.name,) for stack in self.stacks for ours in stack.ours}
        return {entry.ours: tuple(part.name for part in entry.parts) for entry in self.entries} | stacked

    @torch.no_grad()
    def load(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        """Copies tensors of the layout into the parameters; nothing changes unless all of them fit.

        Raises:
            CheckpointError: as in `check`.
        """
        self.check(tensors)
        for ours, value in self.values(tensors).items():
            parameter = model.get_parameter(ours)
            parameter.copy_(value.reshape(parameter.shape))

    def values(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Our parameters by name, from tensors that fit."""
        found = {entry.ours: _joined([tensors[part.name] for part in entry.parts]) for entry in self.entries}
        for part, ours, dim in self.stacks:
            # Copies, for columns of a tensor do not follow each other in memory.
            found |= {name: one.contiguous() for name, one in zip(ours, tensors[part.name].chunk(len(ours), dim), strict=True)}
        return found

    @torch.no_grad()
    def save(self, model: nn.Module) -> dict[str, Tensor]:
        """The parameters as tensors of the layout."""
        return self.split({ours: model.get_parameter(ours).detach() for ours in self.names()})

    def split(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors of the layout, from our parameters by name."""
        found: dict[str, Tensor] = {}
        for entry in self.entries:
            value = values[entry.ours]
            rows = value.flatten().split([torch.Size(part.shape).numel() for part in entry.parts])
            found.update({part.name: row.reshape(part.shape) for part, row in zip(entry.parts, rows, strict=True)})
        for part, ours, dim in self.stacks:
            found[part.name] = torch.cat([values[name] for name in ours], dim).reshape(part.shape)
        like = next(iter(values.values()))
        return found | {part.name: like.new_full(part.shape, value) for part, value in self.constants}

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Compares names, shapes and types.

        Raises:
            CheckpointError: all tensors that are missing, unexpected, of another shape or of a type such as int8, or a tied one
                that differs.
        """
        parts = self.parts
        missing = [name for name in parts if name not in tensors]
        unexpected = [name for name in tensors if name not in parts and not self._is_foreign(name)]
        shaped = [
            f"{name} is {list(tensors[name].shape)}, must be {list(part.shape)}"
            for name, part in parts.items()
            if name in tensors and tuple(tensors[name].shape) != part.shape
        ]
        types = {name: tensors[name].dtype for name in parts if name in tensors}
        typed = [f"{name} is {dtype}" for name, dtype in types.items() if dtype not in FLOATING]
        kinds = (("missing", missing), ("unexpected", unexpected), ("of another shape", shaped), ("of another type", typed))
        wrong = [f"{len(names)} {kind} ({_listed(names)})" for kind, names in kinds if names]
        if wrong:
            raise CheckpointError(
                f"layout {self.layout!r}: {', '.join(wrong)}: all tensors must fit the model; load another checkpoint, or "
                "change the configuration"
            )
        for again, name in self.tied.items():
            if again in tensors and not torch.equal(tensors[again], tensors[name]):
                raise CheckpointError(
                    f"layout {self.layout!r}: {again} differs from {name}, but both are tied: must be equal; untie them in the "
                    "configuration"
                )

    def _is_foreign(self, name: str) -> bool:
        return name in self.tied or _matches(name, self.ignored) or not _matches(name, self.family)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _listed(names: list[str]) -> str:
    """All names, with equal names of several layers as one.

    Example:
        >>> _listed(["layers.0.a", "layers.0.b", "layers.1.a", "c"])
        'layers.*.a (2), layers.0.b, c'
    """
    patterns = {name: re.sub(r"\.\d+\.", ".*.", name) for name in names}
    times = Counter(patterns.values())
    shown = dict.fromkeys(patterns[name] if times[patterns[name]] > 1 else name for name in names)
    return ", ".join(f"{name} ({times[name]})" if times[name] > 1 else name for name in shown)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class DepthPaths(NamedTuple):
    """The depth mixers of a model: their configuration, the sublayers, and the prefixes of parameter names."""

    depth: DepthConfig
    stack: LayerStack
    mixers: Sequence[str]
    ends: str = "ends"

    @property
    def d_model(self) -> int:
        """The width D."""
        return self.stack.d_model

    @property
    def n_blocks(self) -> int:
        """The number of blocks."""
        return self.stack.n_blocks

    def check_pairs(self) -> None:
        """Raises ConfigError unless each block has two sublayers, as the layers of most layouts."""
        if set(self.stack.block_lengths) != {2}:
            raise ConfigError(problem("blocks", self.stack.block_lengths, "of two sublayers each", "use another layout"))

    def prefix(self, index: int) -> str:
        """The prefix for the mixer of this sublayer; after the last one, for the ends."""
        return self.mixers[index] if index < len(self.mixers) else self.ends


def depth_paths(config: DecoderConfig) -> DepthPaths:
    """The depth mixers of a decoder.

    Example:
        >>> depth_paths(DecoderConfig(vocab_size=8, d_model=8, n_layers=1)).mixers
        ('blocks.0.attention.depth', 'blocks.0.swiglu.depth')
    """
    return DepthPaths(config.depth, config.stack, tuple(f"{name}.depth" for name in sublayer_paths(config)))


def sublayer_paths(config: DecoderConfig) -> tuple[str, ...]:
    """The prefixes of the parameter names of every sublayer of a decoder, in order."""
    return tuple(f"blocks.{index}.{name}" for index, block in enumerate(config.layers) for name in sublayer_names(block))
