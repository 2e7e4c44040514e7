"""The configuration of a decoder: sizes, the depth mixer, and the sublayers of its blocks."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, SerializeAsAny, ValidationInfo, field_validator, model_validator

from twoaxis.core.config import Config
from twoaxis.core.errors import ConfigError, nearest, problem
from twoaxis.core.position import LayerStack, SublayerInfo
from twoaxis.depth import DEPTH, DepthConfig, ResidualConfig
from twoaxis.feed_forward import FEED_FORWARD, FeedForwardConfig, SwiGLUConfig
from twoaxis.local import Local
from twoaxis.local.places import PlacesConfig
from twoaxis.model.block_patterns import named_blocks
from twoaxis.sequence import SEQUENCE, AttentionConfig, SequenceConfig

SublayerConfig = SequenceConfig | FeedForwardConfig


def _sublayer(data: Any) -> SublayerConfig:
    if isinstance(data, SequenceConfig | FeedForwardConfig):
        return data
    kind = data if isinstance(data, str) else data.get("kind") if isinstance(data, dict) else None
    if isinstance(kind, str) and kind in FEED_FORWARD:
        return FEED_FORWARD.parse(data)
    if isinstance(kind, str) and kind not in SEQUENCE:
        known = [row.kind for row in (*SEQUENCE, *FEED_FORWARD)]
        raise ConfigError(f"unknown sublayer {kind!r}; {nearest(kind, known)}")
    return SEQUENCE.parse(data)


Depth = Annotated[SerializeAsAny[DepthConfig], BeforeValidator(DEPTH.parse)]
Sublayer = Annotated[SerializeAsAny[SequenceConfig] | SerializeAsAny[FeedForwardConfig], BeforeValidator(_sublayer)]
Block = tuple[Sublayer, ...]


class DecoderConfig(Config):
    """Configuration of a decoder-only Transformer: sizes, the depth mixer, and the sublayers of its blocks.

    Args:
        vocab_size: token ids are below this.
        d_model: width D of the model.
        n_layers: number of blocks.
        max_seq_len: largest number of tokens of one document, generated ones included.
        norm_eps: eps of every RMSNorm, unless the depth mixer sets one.
        tie_embeddings: whether the output head is the embedding matrix.
        embedding_std: standard deviation of the initial embedding; None means 1 / sqrt(d_model), with which a tied head starts
            with logits of variance 1.
        embedding_norm: `none`, or `rms`: an RMSNorm with a gain between the embedding and the stack, as in Peri-LN
            (arXiv:2502.02732), so that the stream starts at root mean square 1 whatever the embedding's scale.
        embedding_local: a local mixer between the embedding, behind its norm, and the stack, such as `smear`.
        depth: the depth mixer, by table or bare kind.
        blocks: the sublayers of each block, in order; block l is `blocks[l % len(blocks)]`. Or the name of a published order of
            layers, as in `blocks = "gpt_oss"`, or a table `{preset = "gpt_oss", n_heads = 8}`; see `twoaxis list blocks`.
        parametrization: `standard`; or `completep` (arXiv:2505.01618, table 1), with which a learning rate tuned on a model of
            the base size holds at another width and depth: updates are multiplied by base_n_layers / n_layers, logits by
            base_d_model / d_model, and initial values and the optimizer's groups follow (`twoaxis.train.optim`). At the base
            size it is the standard one.
        base_d_model: width of the base size.
        base_n_layers: blocks of the base size.

    Raises:
        ConfigError: anything that cannot be built, at once and in one line.

    Example:
        >>> config = DecoderConfig(
        ...     vocab_size=256, d_model=64, n_layers=2, depth="deep_delta", blocks=[["short_swa", "attention", "swiglu"]]
        ... )
        >>> config.stack.n_sublayers
        6
    """

    vocab_size: int = Field(ge=1)
    d_model: int = Field(ge=1)
    n_layers: int = Field(ge=1, le=100_000)
    max_seq_len: int = Field(default=2048, ge=1)
    norm_eps: float = Field(default=1e-6, gt=0)
    tie_embeddings: bool = True
    embedding_std: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    embedding_norm: Literal["none", "rms"] = "none"
    embedding_local: Local = None
    depth: Depth = ResidualConfig()
    blocks: tuple[Block, ...] = ((AttentionConfig(), SwiGLUConfig()),)
    parametrization: Literal["standard", "completep"] = "standard"
    base_d_model: int | None = Field(default=None, ge=1)
    base_n_layers: int | None = Field(default=None, ge=1)

    unrecorded: ClassVar[Mapping[str, Any]] = {"embedding_std": 0.02}
    called: ClassVar[str] = "model"

    @classmethod
    def remedy_for_key(cls, key: str) -> str:
        """Returns the remedy for an unknown key; it names the table of an option of a sublayer or of a depth mixer."""
        for row in (*SEQUENCE, *FEED_FORWARD):
            if key != "kind" and key in row.config.model_fields:
                example = f'blocks=[[{{kind="{row.kind}", {key}=...}}, ...]]'
                return f"it belongs to a sublayer such as {row.kind!r}: write it in blocks, as {example}"
        for row in DEPTH:
            if key in row.config.model_fields:
                return f"it belongs to a depth mixer such as {row.kind!r}: write depth.{key}"
        return super().remedy_for_key(key)

    @model_validator(mode="before")
    @classmethod
    def _named_blocks(cls, data: Any) -> Any:
        return named_blocks(data, cls.model_fields["max_seq_len"].default) if isinstance(data, Mapping) else data

    @field_validator("blocks")
    @classmethod
    def _recorded(cls, blocks: tuple[Block, ...], info: ValidationInfo) -> tuple[Block, ...]:
        if (size := info.data.get("vocab_size")) is None:
            return blocks
        return tuple(
            tuple(part.recorded_for(size) if isinstance(part, SequenceConfig) else part for part in block) for block in blocks
        )

    @model_validator(mode="after")
    def _buildable(self) -> Self:
        if not self.blocks or not all(self.blocks):
            example = "write for example [['attention', 'swiglu']]"
            raise ConfigError(
                f"blocks={self.to_data()['blocks']}: must be one or more blocks of at least one sublayer each; {example}"
            )
        for block in self.blocks:
            for sublayer in block:
                if isinstance(sublayer, SequenceConfig):
                    sublayer.check(self.d_model)
        stack = self._bare_stack
        for site, sublayer in zip(stack.sites, self.parts, strict=True):
            if isinstance(sublayer, SequenceConfig):
                sublayer.check_at(site)
            if isinstance(sublayer, PlacesConfig):
                sublayer.check_locals(site)
        if self.embedding_local is not None:
            self.embedding_local.check(self.d_model)
        self.depth.prepare(stack)
        if len(self.blocks) > self.n_layers:
            allowed = f"at most n_layers={self.n_layers} patterns"
            raise ConfigError(problem("blocks", len(self.blocks), allowed, "drop the patterns that no block would use"))
        self._check_base()
        return self

    def _check_base(self) -> None:
        for name in ("base_d_model", "base_n_layers"):
            if self.parametrization == "standard":
                self.refuse_options((name,), " with parametrization='standard'", "set parametrization=completep")
            elif getattr(self, name) is None:
                allowed = "the size of the model that rates are tuned on, with parametrization='completep'"
                raise ConfigError(problem(name, None, allowed, f"give {name.removeprefix('base_')} of that model"))
        if self.base_d_model is None:
            return
        for sublayer in (part for part in self.parts if isinstance(part, SequenceConfig)):
            here, there = (sublayer.head_shape(width) for width in (self.d_model, self.base_d_model))
            if here and there and here.head_dim != there.head_dim:
                got = (
                    f"head_dim of {sublayer.kind!r}: {here.head_dim}, and {there.head_dim} at base_d_model={self.base_d_model}"
                )
                raise ConfigError(
                    f"{got}: must be equal with parametrization='completep'; give head_dim, and heads by the width"
                )

    @property
    def initial_embedding_std(self) -> float:
        """Standard deviation of the initial embedding."""
        return 1 / math.sqrt(self.base_d_model or self.d_model) if self.embedding_std is None else self.embedding_std

    @property
    def width_ratio(self) -> float:
        """Width over that of the base size."""
        return self.d_model / (self.base_d_model or self.d_model)

    @property
    def depth_ratio(self) -> float:
        """Blocks over those of the base size."""
        return self.n_layers / (self.base_n_layers or self.n_layers)

    @property
    def logit_scale(self) -> float:
        """Constant factor of the logits."""
        return 1 / self.width_ratio

    @property
    def layers(self) -> tuple[Block, ...]:
        """The sublayers of every block."""
        return tuple(self.blocks[layer % len(self.blocks)] for layer in range(self.n_layers))

    @property
    def parts(self) -> tuple[SublayerConfig, ...]:
        """The sublayers of all blocks in order."""
        return tuple(sublayer for block in self.layers for sublayer in block)

    @property
    def norm(self) -> Literal["rms"]:
        """The norm before each sublayer that the depth mixer leaves one, and behind the last."""
        return "rms"

    @property
    def stack(self) -> LayerStack:
        """The sublayers by position, prepared by the depth mixer."""
        return self.depth.prepare(self._bare_stack)

    @property
    def _bare_stack(self) -> LayerStack:
        slots = tuple(self._slot(sublayer) for block in self.layers for sublayer in block)
        lengths, scale = tuple(len(block) for block in self.layers), 1 / self.depth_ratio
        return LayerStack(self.d_model, self.norm_eps, lengths, slots, self.vocab_size, scale, self.base_n_layers)

    def _slot(self, sublayer: SublayerConfig) -> SublayerInfo:
        if not isinstance(sublayer, SequenceConfig):
            return SublayerInfo(sublayer.kind)
        heads = sublayer.head_shape(self.d_model)
        window, hashed = sublayer.pair_window, sublayer.hashed
        return SublayerInfo(sublayer.kind, sublayer.accepts_qkv, heads, window=window, hashed=hashed)
