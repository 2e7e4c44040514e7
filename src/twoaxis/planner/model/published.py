"""Published models that transformers builds, with sublayers of this library if equal, else with their counts."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, cast

from twoaxis.core.cost import Cost, Shape, visible_pairs
from twoaxis.core.errors import ConfigError, problem
from twoaxis.core.position import LayerStack, SublayerInfo, SublayerPosition
from twoaxis.feed_forward import GELUConfig, SwiGLUConfig
from twoaxis.ledger.decoder_memory import part_cache_bytes
from twoaxis.ledger.published import PublishedModel, PublishedSublayer, count_published
from twoaxis.model.cost import NORMS
from twoaxis.planner.model.latent_attention import LatentAttention
from twoaxis.planner.model.part import Biased, Experts, NativeSublayer, Part, Routed
from twoaxis.planner.model.shape import ModelShape, Norm
from twoaxis.sequence import AttentionConfig


@dataclass(frozen=True)
class TracedPart(Part):
    """A sublayer with the counts of a run of transformers on the meta device.

    Cost: parameters exact; matmul flops those of products with parameters; pair flops of softmax attention per visible pair,
          and of other products, such as the recurrence of linear attention, per token; elementwise one for each number that a
          pointwise operation makes; saved as eager PyTorch saves, with one kernel for attention; cache as transformers keeps it

    Attributes:
        counts: of the sublayer.
        others: parameters that belong to no other sublayer, such as further norms; negative if the planner counts a norm that
            the model does not have.
        tables: further parameters of which a token reads few or none.
    """

    counts: PublishedSublayer
    others: int = 0
    tables: int = 0

    @property
    def kind(self) -> str:
        """The name of its class."""
        return self.counts.kind

    @property
    def routed(self) -> Routed | None:
        """Its experts, from their matrices."""
        return Routed(*self.counts.experts) if self.counts.experts else None

    @property
    def windows(self) -> tuple[int, ...]:
        """Those of its attention and its cache; one token for products that grow per token."""
        edges = {window for _, window in self.counts.pairs} | {bound for _, bound in self.counts.cache}
        return tuple(sorted((edges | {1 if self.counts.products else 0}) - {0}))

    def slot(self, d_model: int) -> SublayerInfo:
        """One input, and no heads that a depth mixer could mix."""
        return SublayerInfo(self.kind)

    def cost(self, site: SublayerPosition, shape: Shape) -> Cost:
        """The counts at this shape."""
        counts, N, T = self.counts, shape.total_tokens, shape.tokens
        # A key for the depth mixer is assumed to come from a projection of the width of the model.
        extra = site.d_model * site.slot.update_extra
        pairs = sum(flops * visible_pairs(T, window or None) for flops, window in counts.pairs) + counts.products * T
        cached = sum(each.bytes(shape.element_bytes) * (min(T, bound) if bound else T) for each, bound in counts.cache)
        return Cost(
            params=counts.params + self.others + self.tables + extra,
            matmul_flops=N * (counts.matmul + 2 * extra),
            pair_flops=shape.batch * pairs,
            elementwise_flops=N * counts.elementwise,
            saved_bytes=N * counts.saved.bytes(shape.element_bytes),
            cache_bytes=shape.batch * (cached + counts.state.bytes(shape.element_bytes)),
            table_params=self.tables,
        )


def read_published(data: Mapping[str, Any], name: str) -> ModelShape:
    """Reads any causal language model that the installed transformers can build.

    Args:
        data: the contents of its `config.json`.
        name: of the model.

    Raises:
        ConfigError: in one line: transformers is missing, does not know the model, or cannot build it.
    """
    found = count_published(data)
    vectors = NORMS[found.norm][0] * found.d_model
    parts = [[_part(sub, found) for sub in block] for block in found.blocks]
    left = found.params - found.vocab_size * found.d_model * (1 if found.tied else 2) - vectors
    left -= sum(sub.params + sub.beside for block in found.blocks for sub in block) + found.tables
    tables = found.tables
    for subs, block in zip(found.blocks, parts, strict=True):
        # The planner counts one norm per sublayer; parameters outside the layers, such as positions, go to the first block.
        others = subs[0].beside - vectors * len(subs) + left
        if others or tables:
            at = next((at for at, part in enumerate(block) if isinstance(part, NativeSublayer | TracedPart)), 0)
            block[at] = _with_others(block[at], subs[at], others, tables)
        left = tables = 0
    return ModelShape(
        name=name,
        vocab_size=found.vocab_size,
        d_model=found.d_model,
        blocks=tuple(map(tuple, parts)),
        tie_embeddings=found.tied,
        norm=cast("Norm", found.norm),
        branches="parallel" if found.parallel else "sequential",
        max_seq_len=found.max_seq_len,
        not_counted=found.not_counted,
    )


def _with_others(part: Part, sub: PublishedSublayer, others: int, tables: int) -> Part:
    if isinstance(part, NativeSublayer):
        return Biased(part.config, (part.biases if isinstance(part, Biased) else 0) + others, tables)
    return TracedPart(sub, others, tables)


def _part(sub: PublishedSublayer, model: PublishedModel) -> Part:
    """The sublayer of this library with the same parameters, products and cache; else what was counted."""
    site, traced = LayerStack(model.d_model, 1e-6, (1,)).sites[0], TracedPart(sub)
    for part in _alike(sub, model):
        try:
            part.check(model.d_model)
            same = all(
                _compared(part, site, shape) == _compared(traced, site, shape) for shape in (Shape(1, 1, 2), Shape(1, 5, 2))
            )
            others = sub.params - part.cost(site, Shape(1, 1)).params
        except ConfigError:
            continue
        if same and not others:
            return part
        if same and isinstance(part, NativeSublayer) and 0 < others < sub.params // 8:
            return Biased(part.config, others)
    return traced


def _compared(part: Part, site: SublayerPosition, shape: Shape) -> tuple[int, int, int]:
    cost = part.cost(site, shape)
    return cost.matmul_flops, cost.pair_flops, part_cache_bytes(part, site, shape)


def _alike(sub: PublishedSublayer, model: PublishedModel) -> Iterator[Part]:
    """Candidates for the sublayer, the best first."""
    if sub.attention is not None and not sub.experts:
        yield from _attentions(sub, model)
    elif not sub.mixes_positions and not sub.experts:
        matrices, widths = sum(map(prod, sub.shapes)), {side for shape in sub.shapes for side in shape} | {model.d_model}
        for width in sorted(widths):
            for config, count in ((SwiGLUConfig(d_ff=width), 3), (GELUConfig(d_ff=width), 2)):
                if count * width * model.d_model == matrices:
                    yield NativeSublayer(config)
    elif sub.experts:
        yield from _experts(sub, model.d_model)


def _attentions(sub: PublishedSublayer, model: PublishedModel) -> Iterator[Part]:
    found, config = sub.attention, model.config
    if found is None:
        return
    if found.n_heads % found.n_kv_heads:
        allowed = f"a divisor of num_attention_heads={found.n_heads}"
        raise ConfigError(problem("num_key_value_heads", found.n_kv_heads, allowed, "correct one of them"))
    if found.key_dim == found.value_dim and found.key_dim % 2 == 0:
        plain = AttentionConfig(n_heads=found.n_heads, n_kv_heads=found.n_kv_heads, head_dim=found.key_dim, window=found.window)
        yield from (
            NativeSublayer(plain.replace(bias=b, qk_norm=norm)) for b in ("none", "qkv") for norm in ("none", "before_rope")
        )
    if config.get("kv_lora_rank") and config.get("qk_nope_head_dim") and config.get("qk_rope_head_dim"):
        yield LatentAttention(
            n_heads=found.n_heads,
            kv_rank=config["kv_lora_rank"],
            q_rank=config.get("q_lora_rank"),
            nope_dim=config["qk_nope_head_dim"],
            rope_dim=config["qk_rope_head_dim"],
            value_dim=found.value_dim,
            biases="outer" if config.get("attention_bias") else "none",
        )


def _experts(sub: PublishedSublayer, width: int) -> Iterator[Part]:
    n_experts, used, params = cast("tuple[int, int, int]", sub.experts)
    if used > n_experts:
        raise ConfigError(problem("experts per token", used, f"at most the {n_experts} experts", "correct one of them"))
    rest = sum(map(prod, sub.shapes)) - n_experts * width
    shared, gate = divmod(rest, 3 * width)
    if params != sub.expert_matrices or params % (3 * width) or gate not in (0, width):
        return
    for router in ("scores", "corrected"):
        yield Experts(width, n_experts, used, params // (3 * width), shared, router, shared_gate="token" if gate else "none")
