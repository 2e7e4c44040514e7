import pytest
from hypothesis import given
from hypothesis import strategies as st

from twoaxis.core.cost import Shape
from twoaxis.core.position import LayerStack
from twoaxis.feed_forward import FeedForwardConfig, GELUConfig, ReLU2Config, SwiGLUConfig
from twoaxis.feed_forward.base import rising_width

CONFIGS: list[type[FeedForwardConfig]] = [SwiGLUConfig, GELUConfig, ReLU2Config]


def widths(mean: int, n_blocks: int) -> list[int]:
    return [rising_width(mean, block, n_blocks) for block in range(n_blocks)]


def test_the_published_model_of_2_8_billion() -> None:
    found = widths(6912, 32)
    assert found[:3] == [3456, 3712, 3840] and found[-1] == 10368
    assert sum(found) == 32 * 6912


def test_halves_go_to_even() -> None:
    # 320 * 0.5 = 160 = 1.25 * 128, 320 = 2.5 * 128 and 480 = 3.75 * 128.
    assert widths(320, 3) == [128, 256, 512]
    assert widths(448, 3) == [256, 512, 640]


def test_a_single_block_keeps_the_mean() -> None:
    assert widths(300, 1) == [300]


@given(mean=st.integers(1, 4000), n_blocks=st.integers(2, 40))
def test_never_empty_and_never_falling(mean: int, n_blocks: int) -> None:
    found = widths(mean, n_blocks)
    assert found == sorted(found) and min(found) >= 128
    exact = [round(mean * (i / (n_blocks - 1) + 0.5) / 128) * 128 for i in range(n_blocks)]
    assert all(a == b or b == 0 for a, b in zip(found, exact, strict=True))


@pytest.mark.parametrize("config", CONFIGS)
def test_parameters_and_cost_follow_the_block(config: type[FeedForwardConfig]) -> None:
    feed_forward = config.from_data({"d_ff": 256, "d_ff_by_depth": "rising"})
    sites = LayerStack(8, 1e-6, (2,) * 4).sites[1::2]
    params = [feed_forward.cost(site, Shape(1, 1)).params for site in sites]
    assert [p // params[0] for p in params] == [1, 2, 2, 3]
    for site, declared in zip(sites, params, strict=True):
        assert sum(p.numel() for p in feed_forward.build(site).parameters()) == declared


def test_equal_widths_are_the_default() -> None:
    sites = LayerStack(8, 1e-6, (2,) * 3).sites
    assert {SwiGLUConfig(d_ff=96).width_at(site) for site in sites} == {96}
