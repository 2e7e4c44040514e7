"""A depth mixer from outside: it reads separate queries, keys and values, and passes the suite as it is."""

from typing import Literal

import pytest
import torch
from torch import Tensor

from twoaxis.core.cost import Cost, Shape
from twoaxis.core.equivalence import InitEquivalence
from twoaxis.core.errors import ConfigError
from twoaxis.core.mixing_design import MixingDesign
from twoaxis.core.parameters import Constant
from twoaxis.core.site import Site, Stack
from twoaxis.core.state import Flow, Leaf, Numbers, stream
from twoaxis.core.table import Row
from twoaxis.core.views import QKV
from twoaxis.depth.base import DepthConfig, DepthMixer
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

    def state(self, stack: Stack, index: int) -> tuple[Leaf, ...]:
        return (stream(stack.d_model, index),)

    def flow(self, site: Site) -> Flow:
        D = Numbers(site.d_model)
        add = Flow(read=D * 2, written=D)
        return add + Flow(read=D, written=D * 3, views=D * 3) if site.opens_block else add

    def cost(self, site: Site, shape: Shape) -> Cost:
        return Cost(params=3 * site.d_model if site.opens_block else 0)

    def splits_views(self, site: Site) -> bool:
        return site.opens_block

    def build(self, site: Site) -> DepthMixer:
        return SplitRead(site.d_model) if site.opens_block else PlainAdd()


class PlainAdd(DepthMixer):
    def read(self, state: Tensor) -> tuple[Tensor, None]:
        return state, None

    def write(self, state: Tensor, update: Tensor, context: Tensor, carry: None) -> Tensor:
        return state + update


class SplitRead(DepthMixer):
    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.scales = self.parameter("scales", (3, d_model), Constant(1.0), "mixing")

    def read(self, state: Tensor) -> tuple[QKV, None]:
        return QKV(*(state * scale for scale in self.scales)), None

    def write(self, state: Tensor, update: Tensor, context: QKV, carry: None) -> Tensor:
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
        def state(self, stack: Stack, index: int) -> tuple[Leaf, ...]:
            return (stream(2 * stack.d_model, index),)

    named = [check for check in depth_checks() if check.name in ("state_floats_are_exact", "pipeline_cut")]
    wrong, right = run_checks([Row(Wrong, "wrong", {"default": {}})], named)
    assert (wrong.name, wrong.ok, right.ok) == ("state_floats_are_exact", False, True)
    assert wrong.message == "numbers per token in state 0: measured 8.0, must be 16"


def test_an_error_in_a_mixer_is_a_failed_check() -> None:
    class Broken(SplitReadConfig):
        def build(self, site: Site) -> DepthMixer:
            raise RuntimeError("cannot\nbuild")

    results = run_checks([Row(Broken, "broken", {"default": {}})], depth_checks()[:2])
    assert [result.message for result in results] == ["", "RuntimeError: cannot build"]


def test_checks_are_named_once_and_say_what_they_mean() -> None:
    names = [check.name for check in depth_checks()]
    assert len(set(names)) == len(names)
    assert all(check.meaning.endswith(".") for check in depth_checks())
    assert torch.get_default_dtype() == torch.float32
