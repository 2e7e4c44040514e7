"""N-gram embeddings: rows of hashed tables, found by the last tokens, enter the stream.

Letters: B batch, T position, D width, E emitted numbers, N longest n-gram, J tables for each length, C = J * (N - 1) tables, W
width of a row, R rows of all tables, k taps.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from jaxtyping import Float
from pydantic import Field, model_validator
from torch import Tensor

from twoaxis.core.cost import Cost, Shape
from twoaxis.core.design import InitEquivalence, MixingDesign
from twoaxis.core.errors import ConfigError, problem
from twoaxis.core.layout import TokenLayout
from twoaxis.core.mixer import ALONE
from twoaxis.core.parameters import Constant, extra_output
from twoaxis.core.position import SublayerPosition
from twoaxis.core.views import Views
from twoaxis.local.base import TokenHistory
from twoaxis.ops.causal_conv import causal_conv
from twoaxis.ops.ngram_gate import AtZero, ngram_gate
from twoaxis.ops.ngram_hash import sign_rows, sign_table
from twoaxis.ops.norm import rms_norm
from twoaxis.ops.precision import Impl
from twoaxis.sequence.base import SequenceConfig, SequenceMixer
from twoaxis.sequence.ngram_table import Found, HashedTable, IdHistory, TableOptions, documents_of

Preset = Literal["engram_tiny", "engram", "deepseek_v41", "qwen4exp", "longcat", "modded", "bigram_tiny"]

_ADDED: Mapping[str, Any] = {"gate": "none", "conv": "none"}
_BIGRAM: Mapping[str, Any] = {**_ADDED, "hash": "int32", "order": 2, "heads": 1, "row_width": None, "maps": "none"}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "engram_tiny": {},
    "engram": {"heads": 8, "rows": [646_400], "row_width": 64, "fill_id": 2, "maps": "biased", "conv_eps": 1e-5},
    "deepseek_v41": {
        **{"order": 4, "heads": 8, "rows": [16_000_000], "row_width": 256, "fill_id": 2},
        **{"gate": "copysign", "key_eps": 1e-20, "conv": "none"},
    },
    "qwen4exp": {
        **{"hash": "splitmix64", "seed": 1234, "heads": 8, "rows": [20_000_000], "row_width": 160, "row_multiple": 128},
    },
    "longcat": {
        **{**_ADDED, "hash": "polynomial", "order": 4, "heads": 4, "rows": [10_223_616], "row_width": 256},
        **{"end_ids": [2], "blank_ids": [0], "untrained_row": 3},
    },
    "modded": {**_BIGRAM, "rows": [377_280], "sign_rows": 8192},
    "bigram_tiny": {**_BIGRAM, "rows": [618]},
}
"""Options that are left out, by preset."""


class NgramEmbeddingConfig(TableOptions, SequenceConfig):
    """Looks up the last tokens, joined to n-grams, in hashed tables, and adds what is found, gated by the stream.

    Equation: e_t = [E_(n,j)[row_(n,j)(x_t .. x_(t-n+1))]], n = 2..N, j = 1..J, rows as in `ops.ngram_hash.RowHash`
              u_t = sigmoid(root(a_t)) W_V e_t,  a_t = <c_t, RMSNorm(W_K e_t)> / sqrt(D)
              y_t = u_t + SiLU(sum_(s<k) w_(k-1-s) RMSNorm(u_(t-Ns))),  root(a) = sign(a) sqrt(max(|a|, 1e-6))
              without a gate: y_t = W_V e_t, e_t, or e_t times signs of the pair x_t, x_(t-1)
    Source:   Engram, arXiv:2601.07372, eq. 1-6, and deepseek-ai/Engram, engram_demo_v1.py @ fb7f84a; DeepSeek-V4.1-Flash and
              Qwen3.8-Flash-Next (qwen4_exp) in transformers; LongCat-Flash-Lite, modeling_longcat_ngram.py; modded-nanogpt
              @ f411b3d, get_bigram_hash
    Deviates: the norm before the sublayer is that of the query, RMSNorm(h) of the paper. With M parallel streams, as in mHC,
              the authors have a key map, both norms and a convolution for each stream, and one table and value map; here the
              depth mixer reads one input from all streams and writes one update to them. The paper's gate has no root, its
              code has.
              Documents, padding and blank ids end look-back and convolution; the authors' code crosses documents
              (document_reset). longcat: the published model divides the sum of token embedding and rows by 1 + J(N-1), here the
              stream keeps its scale. modded: a table for each sublayer, and no learned scalar, which the table can hold; its
              code takes a wrong token before the second one of a batch
    Shapes:   context [B T D], token ids of the layout [B T] -> update [B T D]; table [R W]; ids in int64, gate, norms and
              convolution in float32 (float64 for float64)
    Init:     EXACT: table, biases and taps 0, maps ~ N(0, 0.25/fan-in), gains 1. At the first step only the table has a
              gradient. The demo draws table and taps, the paper has taps of zero, modded-nanogpt a table of zeros
    Cost:     params R*W + 2*D*C*W + 2*D + D*k, of which a token reads C rows; flops per token 4*D*C*W in maps and about 27*D
              beside them; cache N-1 ids and (k-1)*N tokens of D numbers. A table trains with 5 times the learning rate and
              without weight decay, as in the paper
    Args:
        preset: gives the options that are left out: `engram_tiny` for small models; `engram`, `deepseek_v41`, `qwen4exp` and
            `longcat` at their published sizes; `modded`, a bigram table; `bigram_tiny`, as large as `engram_tiny` at width 96.
        hash: `pcg64`, `splitmix64`, `polynomial` or `int32`.
        order: longest n-gram N.
        heads: tables J for each length.
        rows: smallest number of rows of a table, for each length or for all. pcg64 and splitmix64 take the next prime that no
            table of an earlier sublayer has; polynomial takes rows + 1, rows + 3, ...; int32 takes it as it is.
        row_multiple: rows of all tables together are rounded up to a multiple of it.
        row_width: W; None means D, without maps.
        seed: of the multipliers; `pcg64` adds the index of the block, counted from 0, `splitmix64` that among such sublayers.
        hash_vocab: ids are below this in the hash; None means those of `compression`, or else of the model.
        compression: new id of every token, so that spellings of a word share rows; made by `twoaxis.data.compressed_ids`.
        fill_id: the token that stands before the first one, such as padding or the end of a text.
        end_ids: tokens that end a segment; no look-back reaches beyond one.
        blank_ids: tokens that are no text, such as images: they read nothing, and no look-back reaches beyond one.
        untrained_row: a row of every table that has no gradient; None for none.
        document_reset: what ends at the start of a document: `both`, the look-back alone (`hash_only`), or nothing (`none`).
        gate: `sign`; `copysign`, whose gate at a = 0 is 0.50025, not 0.5; or `none`.
        maps: `linear` maps of keys and values, `biased` ones, or `none`: rows enter the stream as they are.
        sign_rows: rows of a fixed table of signs that multiply rows of the bigram table; 0 for none.
        conv: `dilated` by N, or `none`.
        kernel: its taps k.
        key_eps: of the norm of keys; None means the model's.
        conv_eps: of the norm before the convolution; None means the model's.
        impl: `fused` or `reference`.

    Raises:
        ConfigError: options that exclude each other, sums that int64 cannot hold, or a vocabulary that is unknown, larger than
            `compression`, or another than `hash_vocab`.

    Example:
        >>> NgramEmbeddingConfig().receptive_field, NgramEmbeddingConfig(preset="bigram_tiny").hash
        (12, 'int32')
    """

    kind: Literal["ngram_embedding"] = "ngram_embedding"
    preset: Preset = "engram_tiny"
    gate: AtZero | Literal["none"] = "sign"
    maps: Literal["linear", "biased", "none"] = "linear"
    sign_rows: int = Field(default=0, ge=0, le=2**20)
    conv: Literal["dilated", "none"] = "dilated"
    kernel: int = Field(default=4, ge=2, le=8)
    key_eps: float | None = Field(default=None, gt=0)
    conv_eps: float | None = Field(default=None, gt=0)
    impl: Impl = "fused"

    @model_validator(mode="before")
    @classmethod
    def _options_of_preset(cls, data: Any) -> Any:
        preset = data.get("preset") if isinstance(data, Mapping) else None
        return {**PRESETS[preset], **data} if isinstance(preset, str) and preset in PRESETS else data

    @model_validator(mode="after")
    def _options_fit(self) -> Self:
        if (self.maps == "none") != (self.row_width is None) or (self.maps == "none" and self.heads * (self.order - 1) > 1):
            allowed = "None, for one table of order 2, with maps='none', and a number with other maps"
            raise ConfigError(problem("row_width", self.row_width, allowed, "correct one of them"))
        if self.maps == "none" and self.gate != "none":
            raise ConfigError(problem("gate", self.gate, "'none' with maps='none', since it needs a key", "use maps='linear'"))
        if self.conv != "none" and self.gate == "none":
            raise ConfigError(problem("conv", self.conv, "'none' without a gate", "set conv='none', or use a gate"))
        if self.sign_rows and (self.hash, self.maps) != ("int32", "none"):
            raise ConfigError(problem("sign_rows", self.sign_rows, "0 but with hash='int32' and maps='none'", "leave it out"))
        return self

    @property
    def design(self) -> MixingDesign:
        """One value for the last tokens, gated by the context."""
        gated = self.gate != "none"
        return MixingDesign(
            query="c_t" if gated else "none",
            key="RMSNorm(W_K e_t)" if gated else "none",
            value="e_t" if self.maps == "none" else "W_V e_t",
            normaliser="sigmoid" if gated else "none",
            window="last N tokens",
            sharing="sublayer",
            injection="added to the stream",
            weights="input and reader" if gated else "static",
            position=True,
        )

    @property
    def reads_context(self) -> bool:
        """Whether there is a gate."""
        return self.gate != "none"

    @property
    def reach(self) -> int:
        """Tokens before one that the convolution reads."""
        return (self.kernel - 1) * self.order if self.conv == "dilated" else 0

    @property
    def histories(self) -> tuple[int, ...]:
        """Ids, and what the convolution reads."""
        return self.order - 1, self.reach

    @property
    def receptive_field(self) -> int:
        """The n-gram, and those before it that the convolution reads."""
        return self.order + self.reach

    @property
    def init_equivalence(self) -> InitEquivalence:
        """Exact."""
        return InitEquivalence("exact", "rows of zeros have the value zero, whatever the gate")

    def check(self, d_model: int) -> None:
        """Accepts any width."""

    def check_at(self, site: SublayerPosition) -> None:
        """Raises ConfigError for a vocabulary that does not fit."""
        self.check_vocabulary(site.stack.vocab_size)
        self.row_hash(site)

    def cost(self, site: SublayerPosition, shape: Shape) -> Cost:
        """The maps, the gate and the convolution; looking up rows computes nothing."""
        D, extra, N = site.d_model, site.slot.update_extra, shape.total_tokens
        gated, conv = self.gate != "none", self.conv == "dilated"
        rows, width = self.table_shape(site)
        mapped = 0 if self.maps == "none" else (1 + gated) * D
        products = mapped * len(self.row_hash(site).sizes) * width + D * extra
        bias = mapped if self.maps == "biased" else 0
        each = (10 * D if gated else 0) + (D * (2 * self.kernel + 9) if conv else 0) + (D if self.sign_rows else 0)
        params = rows * width + products + bias + (D if gated else 0) + (D * (1 + self.kernel) if conv else 0)
        table = rows * width
        return Cost(params=params, matmul_flops=2 * N * products, elementwise_flops=N * (each + bias), table_params=table)

    def build(self, site: SublayerPosition) -> "NgramEmbedding":
        """Builds the mixer at this site."""
        return NgramEmbedding(self, site)


@dataclass(frozen=True, eq=False)
class NgramCache:
    """The last ids, and what the convolution reads."""

    ids: IdHistory
    conv: TokenHistory


class NgramEmbedding(SequenceMixer, config=NgramEmbeddingConfig):
    """See `NgramEmbeddingConfig`."""

    around: ClassVar[Mapping[str, Any]] = {**ALONE, "vocab_size": None}

    def __init__(self, config: NgramEmbeddingConfig, site: SublayerPosition) -> None:
        super().__init__()
        self.config, D, gated = config, site.d_model, config.gate != "none"
        self.key_eps, self.conv_eps = config.key_eps or site.norm_eps, config.conv_eps or site.norm_eps
        self.table = HashedTable(config, site)
        if config.maps != "none":
            # Keys stand before values.
            self.maps = self.linear("maps", self.table.width, (1 + gated) * D, rows=(D,) * (1 + gated), grows="outputs")
        if config.maps == "biased":
            self.bias = self.parameter("bias", ((1 + gated) * D,), Constant(0.0), "bias")
        if gated:
            self.key_gain = self.parameter("key_gain", (D,), Constant(1.0), "norm")
        if config.conv == "dilated":
            self.conv_gain = self.parameter("conv_gain", (D,), Constant(1.0), "norm")
            self.taps = self.parameter("taps", (D, config.kernel), Constant(0.0), "mixing")
        self.extra = extra_output(self, D, site.slot.update_extra)
        self.signs = sign_table(config.sign_rows, D) if config.sign_rows else None

    def new_cache(self) -> NgramCache:
        """Empty histories."""
        return NgramCache(IdHistory(), TokenHistory())

    def forward(
        self, context: Views, layout: TokenLayout, cache: NgramCache | None = None
    ) -> tuple[Float[Tensor, "B T E"], NgramCache | None]:
        """Returns the gated values, convolved, and the last ids and normalised values."""
        assert isinstance(context, Tensor)
        before = cache or self.new_cache()
        found = self.table(layout.ids(self.config.kind), layout, before.ids)
        update, history = self._values(found, context), before.conv
        if self.config.conv == "dilated":
            normal = rms_norm(update, self.conv_gain, self.conv_eps, self.config.impl)
            update = update + F.silu(self._convolved(normal, layout, history))
            history = history if cache is None else history.following(normal, self.config.reach + 1)
        if self.extra is not None:
            update = torch.cat((update, self.extra(context)), dim=-1)
        return update, None if cache is None else NgramCache(found.history, history)

    def _values(self, found: Found, context: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        config = self.config
        if self.signs is not None:
            signs = self.signs.to(context.device)[sign_rows(found.ids[0], found.ids[1], config.sign_rows)]
            return found.rows.squeeze(2) * signs
        if config.maps == "none":
            return found.rows.squeeze(2)
        mapped = self.maps(found.rows.flatten(2))
        mapped = mapped + self.bias if config.maps == "biased" else mapped
        if config.gate == "none":
            return mapped
        key, value = mapped.chunk(2, dim=-1)
        return ngram_gate(context, key, self.key_gain, value, self.key_eps, config.gate, config.impl)

    def _convolved(self, normal: Float[Tensor, "B T D"], layout: TokenLayout, history: TokenHistory) -> Float[Tensor, "B T D"]:
        config = self.config
        documents = documents_of(layout, history.length + normal.shape[1], config.document_reset == "both")
        past, dilation = history.tokens, config.order
        return causal_conv(normal, self.taps, history=past, documents=documents, dilation=dilation, impl=config.impl)
