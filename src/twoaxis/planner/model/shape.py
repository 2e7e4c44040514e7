"""A model in the planner: sizes, sublayers and the depth mixer; nothing is built."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, Self, get_args

from twoaxis.core.errors import ConfigError, problem
from twoaxis.core.position import LayerStack
from twoaxis.depth import DepthConfig, ResidualConfig
from twoaxis.feed_forward import FeedForwardConfig
from twoaxis.local import LocalConfig
from twoaxis.model import DecoderConfig
from twoaxis.planner.model.part import NativeSublayer, Part
from twoaxis.sequence import SequenceConfig

Norm = Literal["rms", "layer"]
Optimizer = Literal["adamw", "muon"]


@dataclass(frozen=True)
class ModelShape:
    """A decoder of any family.

    Attributes:
        name: of the model.
        vocab_size: rows of the embedding, padding included.
        d_model: width D.
        blocks: the sublayers of every block.
        depth: the depth mixer.
        tie_embeddings: whether the output head is the embedding.
        embedding_norm: `rms` for a norm between the embedding and the stack.
        update_scale: constant factor of every update.
        logit_scale: constant factor of the logits.
        optimizer: in training: `muon` keeps one number less for each parameter of a matrix.
        embedding_local: the local mixer behind it, or None.
        norm: `rms` (one gain per channel) or `layer` (a gain and a bias).
        norm_eps: its eps.
        branches: `sequential`, or `parallel` if the sublayers of a block read the same stream, as in GPT-NeoX.
        max_seq_len: the longest sequence of its training.
        not_counted: what the counts leave out, one line each.

    Raises:
        ConfigError: sublayers that do not fit the width, or a depth mixer that does not fit them.
    """

    name: str
    vocab_size: int
    d_model: int
    blocks: tuple[tuple[Part, ...], ...]
    depth: DepthConfig = field(default_factory=ResidualConfig)
    tie_embeddings: bool = True
    norm: Norm = "rms"
    norm_eps: float = 1e-6
    branches: Literal["sequential", "parallel"] = "sequential"
    max_seq_len: int = 2048
    embedding_norm: Literal["none", "rms"] = "none"
    update_scale: float = 1.0
    logit_scale: float = 1.0
    optimizer: Optimizer = "adamw"
    embedding_local: LocalConfig | None = None
    not_counted: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.branches == "parallel" and self.depth.kind != "residual":
            raise ConfigError(
                problem(
                    "depth", self.depth.kind, "'residual' in a model whose branches are parallel", "plan a sequential model"
                )
            )
        for part in self.parts:
            part.check(self.d_model)
        # Raises if the depth mixer does not accept the sublayers.
        self.stack  # noqa: B018

    @property
    def n_layers(self) -> int:
        """Number of blocks."""
        return len(self.blocks)

    @property
    def parts(self) -> tuple[Part, ...]:
        """The sublayers of all blocks in order."""
        return tuple(part for block in self.blocks for part in block)

    @property
    def stack(self) -> LayerStack:
        """The sublayers as positions along depth, prepared for the depth mixer."""
        return self._stack

    @cached_property
    def _stack(self) -> LayerStack:
        slots = tuple(part.slot(self.d_model) for part in self.parts)
        lengths = tuple(len(block) for block in self.blocks)
        stack = LayerStack(self.d_model, self.norm_eps, lengths, slots, self.vocab_size, self.update_scale)
        return self.depth.prepare(stack)

    def with_depth(self, depth: DepthConfig) -> Self:
        """The same model with another depth mixer."""
        return replace(self, depth=depth)

    def with_optimizer(self, kind: str) -> Self:
        """The same model trained by another optimizer.

        Raises:
            ConfigError: an unknown kind.
        """
        if kind not in get_args(Optimizer):
            raise ConfigError(problem("optimizer", kind, f"one of {', '.join(get_args(Optimizer))}", "correct it"))
        return replace(self, optimizer=kind)

    def with_sublayer(self, config: SequenceConfig | FeedForwardConfig) -> Self:
        """The same model with one more sublayer at the start of each block, such as ShortSWA."""
        return replace(self, blocks=tuple((NativeSublayer(config), *block) for block in self.blocks))

    def with_parts(self, change: Callable[[Part], Part]) -> Self:
        """The same model with every sublayer changed."""
        return replace(self, blocks=tuple(tuple(change(part) for part in block) for block in self.blocks))

    def in_generation(self) -> Self:
        """The model in the form of generation."""
        return self.with_parts(lambda part: part.in_generation())

    @classmethod
    def of_decoder(cls, config: DecoderConfig, name: str = "decoder") -> Self:
        """A decoder of this library."""
        return cls(
            name,
            config.vocab_size,
            config.d_model,
            tuple(tuple(NativeSublayer(sublayer) for sublayer in block) for block in config.layers),
            config.depth,
            config.tie_embeddings,
            norm_eps=config.norm_eps,
            max_seq_len=config.max_seq_len,
            embedding_norm=config.embedding_norm,
            update_scale=1 / config.depth_ratio,
            logit_scale=config.logit_scale,
            embedding_local=config.embedding_local,
        )
