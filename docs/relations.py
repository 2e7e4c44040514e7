"""Which methods are special cases of others: each pair is computed side by side, and its largest difference written down."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from twoaxis.depth import DEPTH
from twoaxis.local import LOCAL
from twoaxis.sequence import SEQUENCE
from twoaxis.testing.toy import AxisConfig, toy_decoder, toy_tokens

Parameters = Mapping[str, nn.Parameter]
Value = float | Callable[[Tensor, str, Parameters], Tensor]
"""A number for all entries, or a function of a parameter, its name, and the parameters of the special case."""

EPS_AGAIN = 1e-4
"""Where a stream is normalised twice or at another scale, the eps of the toy models, 1e-6, enters anew."""


@dataclass(frozen=True)
class Relation:
    """One method as a special case of another.

    Attributes:
        special: options of the special case.
        general: options of the method that contains it.
        when: the options or parameters of the general method, in words.
        values: of parameters of the general model, by a pattern of their names; others that both models have are equal.
        of_special: the same for parameters of the special case.
        up_to: largest difference that counts as rounding.
    """

    special: Mapping[str, Any]
    general: Mapping[str, Any]
    when: str
    values: Mapping[str, Value] = field(default_factory=dict)
    of_special: Mapping[str, Value] = field(default_factory=dict)
    up_to: float = 1e-12

    def difference(self, set_values: bool = True) -> float:
        """The largest difference of logits over their largest magnitude, in float64 and away from initial values.

        Without `values`, the general method has parameters of its own.
        """
        special, general = (toy_decoder(_config(options)) for options in (self.special, self.general))
        _set(special, self.of_special, {})
        kinds = [f".{options['kind']}." for options in (self.special, self.general)]
        here = dict(general.named_parameters())
        there = {name.replace(*kinds): parameter for name, parameter in special.named_parameters()}
        with torch.no_grad():
            for name in here.keys() & there.keys():
                if here[name].shape == there[name].shape:
                    here[name].copy_(there[name])
            if set_values:
                _set(general, self.values, there)
            one, other = (model(toy_tokens()) for model in (special, general))
        return float((one - other).abs().max() / one.abs().max())


def _newest(own: Tensor, name: str, special: Parameters) -> Tensor:
    """1 for the newest source, 0 for the others."""
    return torch.eye(own.shape[-1], dtype=own.dtype)[-1]


def _identity(own: Tensor, name: str, special: Parameters) -> Tensor:
    return torch.eye(own.shape[-1], dtype=own.dtype)


def _row_before(own: Tensor, name: str, special: Parameters) -> Tensor:
    """The row of DenseFormer behind the block before the one that begins here, or behind the last block."""
    block = re.search(r"blocks\.(\d+)", name)
    rows = [row for row in special if row.endswith("depth.weights")]
    return special[rows[int(block[1]) - 1] if block else rows[-1]]


def _weights_of_mhc(first: int, scale: float) -> Callable[[Tensor, str, Parameters], Tensor]:
    """Read or write weights of mHC, whose n logits begin at row `first` * n of its base."""

    def weights(own: Tensor, name: str, special: Parameters) -> Tensor:
        base = special[name.rpartition(".")[0] + ".base"]
        return scale * torch.sigmoid(base.view(-1, len(own))[first])

    return weights


def _without_reads(own: Tensor, name: str, special: Parameters) -> Tensor:
    """A map of mHC whose first four rows, which score the reads, are zero."""
    return torch.cat((torch.zeros_like(own[:4]), own[4:]))


def _equal_reads(own: Tensor, name: str, special: Parameters) -> Tensor:
    """A base of mHC that reads a quarter of each of four streams."""
    return torch.cat((torch.full_like(own[:4], -math.log(3)), own[4:]))


def _read_lane(own: Tensor, name: str, special: Parameters) -> Tensor:
    return torch.eye(2, dtype=own.dtype)[0 if ".attention." in name else 1]


def _lane_weight(own: Tensor, name: str, special: Parameters) -> Tensor:
    return special[name.replace("residual_weights", "lane_weight")] * torch.eye(2, dtype=own.dtype)


def _gain_by_block(own: Tensor, name: str, special: Parameters) -> Tensor:
    block = re.search(r"blocks\.(\d+)", name)
    assert block is not None
    return special[name] * (int(block[1]) + 1) ** 0.5


def _placed(placement: str, **options: Any) -> dict[str, Any]:
    return {"kind": "norm_placement", "placement": placement, **options}


RESIDUAL: Mapping[str, Any] = {"kind": "residual"}
STATIC_HC: Mapping[str, Any] = {"kind": "hyper_connections", "weights": "static"}

RELATIONS = (
    Relation(
        RESIDUAL,
        {"kind": "residual_scalars"},
        "1 on the stream, 0 on the embedding",
        {r".*\.stream_weight": 1.0, r".*\.embedding_weight": 0.0},
    ),
    Relation(RESIDUAL, {"kind": "denseformer"}, "rows with 1 at the newest output", {r".*\.depth\.weights": _newest}),
    Relation(
        {"kind": "denseformer"},
        {"kind": "muddformer", "ways": "single", "weights": "static"},
        "one way, static weights",
        {r".*sum\.static": _row_before},
    ),
    Relation(
        {"kind": "muddformer", "ways": "single", "weights": "static"},
        {"kind": "muddformer", "ways": "single"},
        "the second matrix of the weights 0",
        {r".*sum\.to_weights": 0.0},
    ),
    Relation(
        RESIDUAL,
        {"kind": "attention_residuals", "mixture": "sum"},
        "the sum in place of the mean, queries 0",
        {r".*pseudo_query": 0.0},
    ),
    Relation(
        {"kind": "attention_residuals"},
        {"kind": "attention_residuals", "block_size": 1},
        "blocks of one sublayer",
    ),
    Relation(RESIDUAL, {"kind": "delta_attention_residuals", "gate": "alpha"}, "gates alpha 0", {r".*\.alpha": 0.0}),
    Relation(
        RESIDUAL,
        STATIC_HC,
        "no mixing of streams, every write 1, any read that sums to 1",
        {r".*residual_weights": _identity, r".*write_weights": 1.0, r".*read_weights": 0.25},
        up_to=EPS_AGAIN,
    ),
    Relation(
        STATIC_HC,
        {"kind": "hyper_connections"},
        "scales of the dynamic part 0",
        {r".*mixing_scale": 0.0, r".*write_scale": 0.0},
    ),
    Relation(
        {"kind": "mhc", "residual": "identity", "read_out": "sum"},
        STATIC_HC,
        "no mixing of streams; constant weights of the other",
        {
            r".*residual_weights": _identity,
            r".*read_weights": _weights_of_mhc(0, 1.0),
            r".*write_weights": _weights_of_mhc(1, 2.0),
        },
        of_special={r".*\.fn": 0.0},
    ),
    Relation(
        {"kind": "mhc", "read_out": "mean"},
        {"kind": "mhc", "read": "delayed", "read_out": "last_site"},
        "equal reads of all streams",
        of_special={r".*\.fn": _without_reads, r".*\.base": _equal_reads},
    ),
    Relation(
        {"kind": "two_lanes", "first_block": 0},
        {**STATIC_HC, "n_streams": 2, "read_out": "mean"},
        "reads of one stream, by sublayer, and a multiple of the identity; embedding and earlier stream of the other 0",
        {r".*read_weights": _read_lane, r".*residual_weights": _lane_weight},
        of_special={r".*embedding_weight": 0.0, r".*backout_weight": 0.0},
    ),
    Relation(RESIDUAL, _placed("mix", post_blocks=0), "no post-norm block"),
    Relation(_placed("post"), _placed("mix", post_blocks=3), "post-norm in every block"),
    Relation(
        RESIDUAL,
        _placed("layer_scaling"),
        "gains of the norms in block b times sqrt(b + 1)",
        {r"blocks\.\d+\.\w+\.norm\.gain": _gain_by_block},
    ),
    Relation(
        RESIDUAL,
        {"kind": "siamese_norm"},
        "gains of the normalised stream x 0, of y 1",
        {r".*\.x_gain": 0.0, r".*\.y_gain": 1.0},
        up_to=EPS_AGAIN,
    ),
    Relation(RESIDUAL, {"kind": "mixture_of_depths_attention", "blend": "annealed"}, "blend 0", {r".*\.blend": 0.0}),
    Relation(RESIDUAL, {"kind": "depth_value_mixing", "blend": "annealed"}, "blend 0", {r".*\.blend": 0.0}),
    Relation(
        {"kind": "attention", "n_heads": 2},
        {"kind": "short_swa", "window": 64, "n_heads": 2, "n_kv_heads": 2},
        "a window of all tokens",
    ),
    Relation(
        {"kind": "attention", "n_heads": 2},
        {"kind": "attention", "n_heads": 2, "sink": "learned"},
        "sinks far below every score",
        {r".*\.sink": -1e4},
    ),
)


def relation_words(relation: Relation) -> str:
    """Both methods in a few words."""
    return f"{method_words(relation.special)} in {method_words(relation.general)}"


def method_words(options: Mapping[str, Any]) -> str:
    """A kind with its options, as in `mhc residual=identity`."""
    chosen = (f"{name}={value}" for name, value in options.items() if name not in ("kind", "n_heads"))
    return " ".join((options["kind"], *chosen))


def relation_rows() -> list[tuple[str, str, str, str]]:
    """A row for each relation: both methods, the choice in words, and the difference, rounded up to a power of ten."""
    rows = []
    for relation in RELATIONS:
        found = relation.difference()
        # Last digits differ between machines.
        shown = "0" if found < 1e-12 else f"below 1e{math.ceil(math.log10(found))}"
        rows.append((method_words(relation.special), method_words(relation.general), relation.when, shown))
    return rows


def _config(options: Mapping[str, Any]) -> AxisConfig:
    table = next(table for table in (DEPTH, SEQUENCE, LOCAL) if options["kind"] in table)
    return table.parse(dict(options))


@torch.no_grad()
def _set(model: nn.Module, values: Mapping[str, Value], special: Parameters) -> None:
    for pattern, value in values.items():
        found = [(name, parameter) for name, parameter in model.named_parameters() if re.fullmatch(pattern, name)]
        assert found, f"no parameter is called {pattern!r}"
        for name, parameter in found:
            parameter.copy_(value(parameter, name, special).reshape_as(parameter) if callable(value) else torch.tensor(value))
