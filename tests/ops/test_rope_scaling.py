import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from twoaxis.core.errors import ConfigError
from twoaxis.ops.rope import ROPE_SCALING, LinearScaling, Llama3Scaling, RopeScaling, RotationTable, YarnScaling, rotation

LLAMA3 = {"kind": "llama3", "factor": 2, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_seq_len": 8192}
EXAMPLES = [row.example(name) for row in ROPE_SCALING for name in row.examples]


def frequencies(width: int = 64, theta: float = 10_000.0) -> torch.Tensor:
    return theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)


@pytest.mark.parametrize("scaling", EXAMPLES, ids=repr)
@given(half=st.integers(1, 80), theta=st.floats(1.5, 1e6))
def test_every_frequency_lies_between_itself_and_its_quotient(scaling: RopeScaling, half: int, theta: float) -> None:
    plain = frequencies(2 * half, theta)
    scaled = scaling.scale(plain, theta)
    assert scaled.shape == plain.shape and scaled.dtype == plain.dtype
    assert (scaled <= plain * (1 + 1e-12)).all() and (scaled >= plain / scaling.factor * (1 - 1e-12)).all()
    assert (scaled.diff() <= 0).all()


@pytest.mark.parametrize("kind", [row.kind for row in ROPE_SCALING])
def test_a_factor_of_one_changes_nothing(kind: str) -> None:
    scaling = ROPE_SCALING[kind].example("default").replace(factor=1.0)
    torch.testing.assert_close(scaling.scale(frequencies(), 1e4), frequencies(), rtol=1e-15, atol=0)
    assert scaling.magnitude == 1.0


def test_linear_scaling_brings_positions_together() -> None:
    positions = torch.arange(12)[None]
    scaled = rotation(4 * positions, RotationTable(16, 100.0, LinearScaling(factor=4)), torch.float64)
    plain = rotation(positions, RotationTable(16, 100.0), torch.float64)
    for one, other in zip(scaled, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_llama3_by_wavelength() -> None:
    """The three cases of the code that was released with the models, for each frequency by itself."""
    scaling, W = Llama3Scaling(factor=8, low_freq_factor=1, high_freq_factor=4, original_max_seq_len=8192), 8192
    seen = set()
    for plain, scaled in zip(frequencies(128, 5e5).tolist(), scaling.scale(frequencies(128, 5e5), 5e5).tolist(), strict=True):
        wavelength = 2 * math.pi / plain
        if wavelength < W / 4:
            case, expected = "fast", plain
        elif wavelength > W / 1:
            case, expected = "slow", plain / 8
        else:
            smooth = (W / wavelength - 1) / (4 - 1)
            case, expected = "between", (1 - smooth) * plain / 8 + smooth * plain
        seen.add(case)
        assert scaled == pytest.approx(expected, rel=1e-12)
    assert seen == {"fast", "slow", "between"}


def test_yarn_by_pair() -> None:
    """The bounds are pairs that turn `beta_fast` and `beta_slow` times in the first training."""
    K, theta, W = 128, 1e4, 4096
    plain = frequencies(K, theta)
    exact = YarnScaling(factor=4, original_max_seq_len=W, bounds="exact").scale(plain, theta)
    turns = W * plain / (2 * math.pi)
    assert torch.equal(exact[turns >= 32], plain[turns >= 32])
    torch.testing.assert_close(exact[turns <= 1], plain[turns <= 1] / 4, rtol=1e-12, atol=0)
    assert ((exact < plain) & (exact > plain / 4)).equal((turns < 32) & (turns > 1))
    whole = YarnScaling(factor=4, original_max_seq_len=W).scale(plain, theta)
    # From the equation of the bounds: 20.94 and 45.03 in a ramp from 20 to 46.
    share = 1 - ((torch.arange(K // 2) - 20) / 26).clamp(0, 1)
    torch.testing.assert_close(whole, plain * (share + (1 - share) / 4), rtol=1e-7, atol=0)


def test_yarn_sharpens_queries_and_keys() -> None:
    cos, sin = rotation(
        torch.tensor([[0, 7]]), RotationTable(8, 1e4, YarnScaling(factor=4, original_max_seq_len=8)), torch.float64
    )
    length = (cos**2 + sin**2).sqrt()
    torch.testing.assert_close(length, torch.full_like(length, 0.1 * math.log(4) + 1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "ntk"}, "unknown rope scaling 'ntk'; choose one of linear, llama3, yarn"),
        ({"kind": "linear", "factor": 0.5}, "factor=0.5: must be >= 1"),
        ({**LLAMA3, "high_freq_factor": 1}, "high_freq_factor=1.0: must be > low_freq_factor=1"),
        ({"kind": "llama3", "factor": 2}, "low_freq_factor is missing in 'llama3'"),
        ({"kind": "yarn", "factor": 2, "original_max_seq_len": 8, "beta_slow": 32}, "beta_fast=32.0: must be > beta_slow=32"),
        ({"kind": "yarn", "factor": 2}, "original_max_seq_len is missing in 'yarn'"),
    ],
    ids=str,
)
def test_what_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ROPE_SCALING.parse(options)
