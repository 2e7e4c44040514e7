"""Published orders of local and global layers along depth, by name: windows, ratios, sinks, rotations and kv-heads.

A window counts the current token: 129 and 513 stand where a model counts the tokens before it. Feed-forwards and sizes are the
reader's. Models with latent, compressed or indexed attention, relative positions or other mixers than ours are not here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from pydantic import Field

from twoaxis.core.config import Config
from twoaxis.core.errors import ConfigError, nearest

LETTERS = {"L": "a window", "G": "all tokens", "D": "gated_delta_net", "C": "gated_short_conv of 7 taps"}
"""What a letter of an order stands for."""

EVIDENCE = {
    "A": "config.json of the model",
    "T": "defaults of the class of the model in transformers 5.24.0",
    "C": "public code of the model",
}
"""Where a row is from, by letter."""

Options = Mapping[str, Any]
GPT_OSS_SINK: Options = {"sink": "learned", "sink_init": "normal"}
NO_ROTATION: Options = {"rope_dim": 0}


@dataclass(frozen=True)
class BlockPattern:
    """The order of layers of one family of models.

    Attributes:
        models: that have it, with their numbers of layers.
        order: one letter of `LETTERS` for each layer, repeated along depth.
        window: tokens that L sees, its own included; 0 is a quarter of the longest sequence, rounded up to 128.
        evidence: letters of `EVIDENCE`.
        everywhere: options of L and G.
        local: options of L alone.
        others: options of G alone.
        group: query heads per kv-head, of L and of G.
        rotated: share of the channels of a head that G rotates, and L too with `rotated_everywhere`.
        first: the letter of the first layer, where the order has another.
        last: the same of the last layer.
        from_end: whether the order ends with the last layer, instead of beginning with the first.
        lacks: what the models have besides.
    """

    models: str
    order: str
    window: int
    evidence: str
    everywhere: Options = field(default_factory=dict)
    local: Options = field(default_factory=dict)
    others: Options = field(default_factory=dict)
    group: tuple[int, int] = (1, 1)
    rotated: float = 1.0
    rotated_everywhere: bool = False
    first: str = ""
    last: str = ""
    from_end: bool = False
    lacks: str = ""

    def layers(self, n_layers: int) -> str:
        """A letter for each of so many layers.

        Example:
            >>> PATTERNS["mimo_v2_flash"].layers(12)
            'GLLLLGLLLLLG'
        """
        skipped = -n_layers % len(self.order) if self.from_end else 0
        whole = (self.order * (n_layers // len(self.order) + 2))[skipped : skipped + n_layers]
        whole = self.first + whole[len(self.first) :]
        return whole[: n_layers - len(self.last)] + self.last if n_layers > 1 else whole


PATTERNS: Mapping[str, BlockPattern] = {
    "gpt_oss": BlockPattern(
        "gpt-oss 20b (24 layers), 120b (36)",
        "LG",
        128,
        "A T",
        everywhere={"rope_theta": 150_000.0, "bias": "all", **GPT_OSS_SINK},
        group=(8, 8),
        lacks="YaRN, experts",
    ),
    "mimo_v2_flash": BlockPattern(
        "MiMo-V2-Flash (48)",
        "LLLLLG",
        129,
        "A T",
        local={"rope_theta": 10_000.0, **GPT_OSS_SINK},
        others={"rope_theta": 5_000_000.0},
        group=(8, 16),
        rotated=0.334,
        rotated_everywhere=True,
        first="G",
        lacks="narrower values, experts",
    ),
    "granite_swa": BlockPattern(
        "granite-swash-2b (24)", "GLLL", 128, "T", everywhere={"rope_theta": 10_000.0, "sink": "learned"}, group=(5, 5)
    ),
    "flint": BlockPattern(
        "Flint (49)",
        "LGLL",
        513,
        "T",
        everywhere={"rope_theta": 10_000.0, **GPT_OSS_SINK},
        group=(8, 8),
        first="G",
        last="G",
        lacks="experts",
    ),
    "lfm3": BlockPattern(
        "LFM3-1.7B (24)",
        "LCGC",
        256,
        "T",
        local={"rope_theta": 10_000.0},
        others={"rope_theta": 1_000_000.0},
        group=(4, 4),
        rotated=0.5,
        first="C",
        lacks="gates of attention, sandwich norm",
    ),
    "step_flash": BlockPattern("Step-3.7-Flash (45)", "GLLL", 512, "A", group=(8, 8), lacks="published rotation, experts"),
    "kolibri": BlockPattern(
        "Kolibri-1 (50)", "LLLLG", 513, "T", everywhere={"rope_theta": 10_000.0}, group=(12, 12), lacks="experts"
    ),
    "gemma3n": BlockPattern(
        "Gemma 3n (35)",
        "LLLLG",
        512,
        "T",
        local={"rope_theta": 10_000.0},
        others={"rope_theta": 1_000_000.0},
        group=(4, 4),
        lacks="per-layer embeddings, LAuReL, shared keys and values",
    ),
    "gemma4": BlockPattern(
        "Gemma 4 26B-A4B (30), 31B (60)",
        "LLLLLG",
        1024,
        "A T",
        local={"rope_theta": 10_000.0},
        others={"rope_theta": 1_000_000.0},
        group=(2, 2),
        rotated=0.25,
        lacks="per-layer embeddings, experts",
    ),
    "muse_glimmer": BlockPattern(
        "Muse-Glimmer (52)", "LLLG", 2048, "T", local={"rope_theta": 10_000.0}, others=NO_ROTATION, group=(16, 16)
    ),
    "muse_spark": BlockPattern(
        "Muse-Spark (62)",
        "LLLG",
        2048,
        "T",
        local={"rope_theta": 500_000.0},
        others=NO_ROTATION,
        group=(8, 8),
        from_end=True,
        lacks="experts",
    ),
    "olmo3": BlockPattern("OLMo 3 (32)", "LLLG", 4096, "T", everywhere={"rope_theta": 500_000.0}),
    "exaone4": BlockPattern("EXAONE 4 (32)", "LLLG", 4096, "T", local={"rope_theta": 10_000.0}, others=NO_ROTATION),
    "cohere2": BlockPattern("Command A (40)", "LLLG", 4096, "T", local={"rope_theta": 10_000.0}, others=NO_ROTATION),
    "nanochat": BlockPattern("nanochat (any)", "LLLG", 0, "C", last="G", lacks="smear, value embeddings"),
    "lara_mini": BlockPattern(
        "Lara-4-Mini (34)", "DLDGL", 512, "T", everywhere={"rope_theta": 10_000.0}, group=(4, 4), lacks="experts"
    ),
    "qwen3_next": BlockPattern(
        "Qwen3-Next (48), Qwen3.5 (32)", "DDDG", 1, "A T", group=(8, 8), rotated=0.25, lacks="output gate of attention, experts"
    ),
    "olmo_hybrid": BlockPattern("OLMo-Hybrid (32)", "DDDG", 1, "T"),
}
"""Every published order by name."""


class BlocksConfig(Config):
    """A published order of layers, with the sizes and the parts that it leaves open.

    Args:
        preset: a name that `twoaxis list blocks` prints.
        n_heads: query heads; the published number of them per kv-head is kept as far as it divides.
        head_dim: width of a head; None means d_model / n_heads.
        window: tokens that local layers see, their own included; None means the published number.
        sink: of every attention; None means the published one.
        feed_forward: the second sublayer of each block, by table or bare kind.

    Example:
        >>> blocks = BlocksConfig(preset="granite_swa", n_heads=8, window=16, sink="none").resolve(64, 8, 2048)
        >>> [(attention["window"], attention["n_kv_heads"], attention["sink"]) for attention, _ in blocks[:2]], len(blocks)
        ([(None, 1, 'none'), (16, 1, 'none')], 4)
    """

    called: ClassVar[str] = "blocks"

    preset: str
    n_heads: int = Field(default=4, ge=1)
    head_dim: int | None = Field(default=None, ge=2)
    window: int | None = Field(default=None, ge=1)
    sink: Literal["none", "learned", "per_token"] | None = None
    feed_forward: Any = "swiglu"

    @classmethod
    def parse(cls, data: Any) -> "BlocksConfig":
        """Reads a bare name or a table; an option set on a bare name on the command line makes it a table with `kind`."""
        table = {"preset": data} if isinstance(data, str) else dict(data)
        if "kind" in table and "preset" not in table:
            table["preset"] = table.pop("kind")
        return cls.from_data(table)

    def resolve(self, d_model: int, n_layers: int, max_seq_len: int) -> list[list[Any]]:
        """The blocks, as many as the order needs before it repeats.

        Raises:
            ConfigError: an unknown name.
        """
        if self.preset not in PATTERNS:
            raise ConfigError(f"unknown order of blocks {self.preset!r}; {nearest(self.preset, PATTERNS)}")
        pattern = PATTERNS[self.preset]
        letters = pattern.layers(n_layers)
        period = next(n for n in range(1, n_layers + 1) if all(letters[i] == letters[i % n] for i in range(n_layers)))
        return [[self._mixer(pattern, letter, d_model, max_seq_len), self.feed_forward] for letter in letters[:period]]

    def _mixer(self, pattern: BlockPattern, letter: str, d_model: int, max_seq_len: int) -> dict[str, Any]:
        if letter == "D":
            return {"kind": "gated_delta_net", "n_heads": self.n_heads}
        if letter == "C":
            return {"kind": "gated_short_conv", "kernel": 7}
        is_local = letter == "L"
        options: dict[str, Any] = {**pattern.everywhere, **(pattern.local if is_local else pattern.others)}
        if is_local:
            options["window"] = self.window or pattern.window or -(-max_seq_len // 512) * 128
        else:
            options["window"] = None
        if pattern.rotated < 1 and (pattern.rotated_everywhere or not is_local):
            width = self.head_dim or d_model // self.n_heads
            options["rope_dim"] = max(2, 2 * int(width * pattern.rotated / 2))
        if self.sink is not None:
            options |= {"sink": self.sink, "sink_init": options.get("sink_init", "zero") if self.sink != "none" else "zero"}
        group = pattern.group[0 if is_local else 1]
        kv_heads = next(n for n in range(max(1, self.n_heads // group), 0, -1) if self.n_heads % n == 0)
        sizes = {"n_heads": self.n_heads, "n_kv_heads": kv_heads, "head_dim": self.head_dim}
        return {"kind": "attention", **sizes, **options}


def named_blocks(data: Mapping[str, Any], longest: int) -> dict[str, Any]:
    """The data of a decoder with the blocks that a name stands for, so that records hold them and no name.

    Sizes that are missing or no numbers are left to the decoder's own checks.

    Args:
        data: of the decoder.
        longest: its `max_seq_len` by default.
    """
    blocks = data.get("blocks")
    if not isinstance(blocks, str | Mapping):
        return dict(data)
    sizes = [data.get("d_model"), data.get("n_layers"), data.get("max_seq_len", longest)]
    if not all(isinstance(size, int | float) and not isinstance(size, bool) and size >= 1 for size in sizes):
        return {name: value for name, value in data.items() if name != "blocks"}
    return {**data, "blocks": BlocksConfig.parse(blocks).resolve(*(int(size) for size in sizes if size is not None))}
