"""Floor 2, below the axes: local mixers inside a sublayer. One row per mixer.

A sublayer has three places for one: its input, the projection of it, and its update (`input_local`, `projected_local` and
`update_local`). A decoder has one more, behind the embedding (`embedding_local`).
"""

from typing import Annotated, Any

from pydantic import BeforeValidator, SerializeAsAny

from twoaxis.core.registry import Row, Table
from twoaxis.local.base import LocalConfig, LocalMixer
from twoaxis.local.branch_swa import BranchSWA, BranchSWAConfig
from twoaxis.local.canon import Canon, CanonConfig
from twoaxis.local.dynamic_conv import DynamicConv, DynamicConvConfig
from twoaxis.local.local_swa import LocalSWA, LocalSWAConfig
from twoaxis.local.smear import Smear, SmearConfig
from twoaxis.local.token_shift import TokenShift, TokenShiftConfig

LOCAL: Table[LocalConfig] = Table(
    "local mixer",
    LocalConfig,
    "twoaxis.local",
    [
        Row(
            CanonConfig,
            "adds a short causal convolution of each channel",
            {
                "default": {},
                "zero": {"taps_init": "zero"},
                "short_conv": {"form": "plain", "activation": "silu"},
                "identity": {"form": "plain", "taps_init": "identity", "kernel": 3, "bias": "channel"},
                "inkling2": {"scale": "unit_variance", "taps_init": "identity", "kernel": 3},
            },
            certified={
                "default": "canon-ac",
                "zero": "canon-ac",
                "short_conv": "canon-b-act-nores",
                "inkling2": "shortconv-inkling",
            },
            retrofit={"taps_init": "zero"},
        ),
        Row(
            LocalSWAConfig,
            "adds softmax attention over the last few tokens, in the place of a convolution",
            {
                "window4": {"window": 4, "n_heads": 2, "head_dim": 4},
                "zero": {"window": 3, "n_heads": 2, "head_dim": 4, "output_init": "zero"},
                "plain": {"window": 2, "n_heads": 2, "n_kv_heads": 2, "head_dim": 4, "form": "plain"},
                "silu": {"window": 3, "n_heads": 2, "head_dim": 4, "activation": "silu"},
            },
            retrofit={"output_init": "zero"},
        ),
        Row(
            BranchSWAConfig,
            "mixes the last few tokens of channels with scores of their own, without parameters",
            {
                "blend": {"window": 3},
                "plain": {"window": 4, "form": "plain", "activation": "none"},
                "residual": {"window": 2, "form": "residual"},
            },
            retrofit={"activation": "none"},
        ),
        Row(
            DynamicConvConfig,
            "adds a short causal convolution whose taps depend on the token",
            {
                "default": {"rank": 3},
                "plain": {"kernel": 3, "rank": 2, "form": "plain", "static_init": "identity"},
                "inkling2": {"taps": "per_head", "head_dim": 2, "scale": "unit_variance", "static_init": "zero"},
                "identity": {"taps": "per_head", "head_dim": 4, "scale": "unit_variance", "static_init": "identity"},
            },
            certified={
                "default": "dynamic-conv-op",
                "plain": "dynamic-conv-op",
                "inkling2": "shortconv-inkling",
                "identity": "shortconv-inkling",
            },
            retrofit={"static_init": "identity"},
        ),
        Row(
            TokenShiftConfig,
            "blends every channel with the token before, by a learned share",
            {"default": {}, "zero": {"mu_init": "zero"}},
            certified={"default": "token-shift", "zero": "token-shift"},
            retrofit={"mu_init": "zero"},
        ),
        Row(
            SmearConfig,
            "adds the token before through one gate",
            {"default": {"gate_channels": 5}, "channel": {"form": "channel"}},
            certified={"default": "smear"},
        ),
    ],
)


def _parse(data: Any) -> LocalConfig | None:
    return None if data is None else LOCAL.parse(data)


Local = Annotated[SerializeAsAny[LocalConfig] | None, BeforeValidator(_parse)]
"""The type of a configuration's field that holds a local mixer or none."""

__all__ = [
    "LOCAL",
    "BranchSWA",
    "BranchSWAConfig",
    "Canon",
    "CanonConfig",
    "DynamicConv",
    "DynamicConvConfig",
    "Local",
    "LocalConfig",
    "LocalMixer",
    "LocalSWA",
    "LocalSWAConfig",
    "Smear",
    "SmearConfig",
    "TokenShift",
    "TokenShiftConfig",
]
