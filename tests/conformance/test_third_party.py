"""A depth mixer from outside: it reads separate queries, keys and values, and passes the suite as it is."""

from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from twoaxis.core.cost import Cost, Shape
from twoaxis.core.design import InitEquivalence, MixingDesign
from twoaxis.core.errors import ConfigError
from twoaxis.core.parameters import Constant
from twoaxis.core.position import LayerStack, SublayerPosition
from twoaxis.core.registry import Row
from twoaxis.core.views import QKV
from twoaxis.depth.base import DepthConfig, DepthMixer, Layout, StreamEnds
from twoaxis.depth.residual import Residual
from twoaxis.model import DecoderConfig
from twoaxis.testing import Check, depth_checks, run_checks
from twoaxis.testing.toy import ATTENTION, FEED_FORWARD


class SplitReadConfig(DepthConfig):
    kind: Literal["split_read"] = "split_read"

    @property
    def design(self) -> MixingDesign:
        return MixingDesign("none", "none", "x_g", "none", "own state", "block", "replaces the stream, q k v apart")

    @property
    def init_equivalence(self) -> InitEquivalence:
        return InitEquivalence("exact", "the three scales start at 1")

    def cost(self, site: SublayerPosition, shape: Shape) -> Cost:
        return Cost(params=3 * site.d_model if site.opens_block else 0)

    def splits_views(self, site: SublayerPosition) -> bool:
        return site.opens_block

    def build(self, stack: LayerStack) -> tuple[list[DepthMixer], StreamEnds]:
        return [SplitRead(site.d_model) if site.opens_block else Residual() for site in stack.sites], StreamEnds()


class SplitRead(DepthMixer):
    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.scales = self.parameter("scales", (3, d_model), Constant(1.0), "mixing")

    def read(self, state: Tensor, layout: Layout = None, cache: Any = None) -> tuple[QKV, None, Any]:
        return QKV(*(state * scale for scale in self.scales)), None, cache

    def write(self, state: Tensor, update: Tensor, context: Any, carry: None) -> Tensor:
        return state + update


ROW = Row(SplitReadConfig, "scales what queries, keys and values see", {"default": {}}, status="contrib")


@pytest.mark.parametrize("check", [check for check in depth_checks() if not check.slow], ids=lambda check: check.name)
def test_conformance(check: Check) -> None:
    check.run(ROW.example("default"))


def test_views_before_a_mixer_that_takes_one_input_fail_at_config_time() -> None:
    with pytest.raises(ConfigError, match="reads separate q, k and v before 'swiglu'") as caught:
        DecoderConfig(vocab_size=11, d_model=8, n_layers=1, depth=SplitReadConfig(), blocks=((FEED_FORWARD, ATTENTION),))
    assert "\n" not in str(caught.value)


def test_run_checks_reports_a_failure_in_one_line_and_goes_on() -> None:
    class Wrong(SplitReadConfig):
        def cost(self, site: SublayerPosition, shape: Shape) -> Cost:
            return Cost(params=1)

    named = [check for check in depth_checks() if check.name in ("depth_params_are_exact", "pipeline_cut")]
    wrong, right = sorted(run_checks([Row(Wrong, "wrong", {"default": {}})], named), key=lambda result: result.name)
    assert (wrong.name, wrong.ok, right.ok) == ("depth_params_are_exact", False, True)
    assert wrong.message == "parameters of sublayer 0: measured 24, must be 1"


def test_an_error_in_a_mixer_is_a_failed_check() -> None:
    class Broken(SplitReadConfig):
        def build(self, stack: LayerStack) -> Any:
            raise RuntimeError("cannot\nbuild")

    results = run_checks([Row(Broken, "broken", {"default": {}})], depth_checks()[:2])
    assert [result.message for result in results] == ["", "RuntimeError: cannot build"]


def test_checks_are_named_once_and_say_what_they_mean() -> None:
    names = [check.name for check in depth_checks()]
    assert len(set(names)) == len(names)
    assert all(check.meaning.endswith(".") for check in depth_checks())
    assert torch.get_default_dtype() == torch.float32
