"""Every mixer of every table is a module that keywords build."""

import copy
import inspect
from typing import Any, assert_type

import pytest
import torch
from torch import nn

import twoaxis
import twoaxis.depth
import twoaxis.feed_forward
import twoaxis.local
import twoaxis.sequence
from twoaxis import DEPTH, FEED_FORWARD, LOCAL, SEQUENCE, ConfigError, TokenLayout
from twoaxis.core.registry import Row
from twoaxis.depth import (
    MHC,
    AttentionResiduals,
    DeepDelta,
    DeepDeltaConfig,
    DepthAxis,
    Residual,
    ResidualConfig,
    ValueResidual,
)
from twoaxis.local import Canon
from twoaxis.sequence import ShortConv, ShortSWA, ShortSWAConfig

D, VOCAB = 16, 5
PACKAGES = {twoaxis.depth: DEPTH, twoaxis.sequence: SEQUENCE, twoaxis.local: LOCAL, twoaxis.feed_forward: FEED_FORWARD}
ROWS = [pytest.param(package, row, id=row.kind) for package, table in PACKAGES.items() for row in table]
IN_A_DEEPER_MODEL = {"n_layers": 3, "sublayers": 2, "index": 5}


def mixer_class(package: Any, row: Row) -> Any:
    name = row.config.__name__.removesuffix("Config")
    assert name in package.__all__ and name in dir(twoaxis)
    return getattr(twoaxis, name)


def standing(package: Any, cls: Any) -> list[dict[str, int]]:
    """Keywords about the surrounding model."""
    known = {"vocab_size": 40} if "vocab_size" in cls.around else {}
    return [known, {**known, **IN_A_DEEPER_MODEL}] if package is twoaxis.depth else [known]


@pytest.mark.parametrize("package, row", ROWS)
def test_a_row_is_a_module_by_keywords(package: Any, row: Row) -> None:
    cls, built = mixer_class(package, row), 0
    for options in row.examples.values():
        for around in standing(package, cls):
            try:
                mixer = cls(d_model=D, **options, **around)
            except ConfigError as error:
                # Parts that only a whole model has: the error names what has them.
                assert "in a Decoder" in str(error) or "build a DepthAxis or a Decoder" in str(error)
                continue
            built += 1
            same = cls({"kind": row.kind, **options}, D, **around), cls(row.kind, d_model=D, **options, **around)
            for other in (*same, cls(row.config(**options), d_model=D, **around), copy.deepcopy(mixer)):
                assert type(other) is type(mixer) and shapes(other) == shapes(mixer)
            assert all(parameter.isfinite().all() for parameter in mixer.parameters())
            with torch.device("meta"):
                assert all(parameter.is_meta for parameter in cls(d_model=D, **options, **around).parameters())
    assert built


def untyped(value: Any) -> Any:
    return value


def shapes(module: nn.Module) -> dict[str, Any]:
    return {name: parameter.shape for name, parameter in module.named_parameters()}


@pytest.mark.parametrize("package, row", [one for one in ROWS if one.values[0] is not twoaxis.depth])
def test_without_a_layout_every_row_is_one_document(package: Any, row: Row) -> None:
    cls = mixer_class(package, row)
    (around,) = standing(package, cls)
    mixer, x = cls(d_model=D, **next(iter(row.examples.values())), **around), torch.randn(2, 5, D)
    layout = TokenLayout.left_padded(torch.tensor([3, 5]), 5)
    if around:
        # A table of tokens.
        with pytest.raises(ConfigError, match=rf"^{row.kind}: the layout has no token ids: must have them; pass input ids"):
            mixer(x)
        layout = layout.of(torch.arange(10).view(2, 5))
    else:
        assert torch.equal(mixer(x)[0], mixer(x, TokenLayout.contiguous(5))[0])
        name = "x" if package is twoaxis.local else "context"
        assert torch.equal(mixer(**{name: x})[0], mixer(x, layout=None)[0])
    wild = x.clone()
    wild[0, :2] = torch.nan
    assert torch.equal(mixer(wild, layout)[0][0, 2:], mixer(x, layout)[0][0, 2:])
    with pytest.raises(ConfigError, match=r"^layout=None: must be given with a cache"):
        mixer(x, cache=mixer.new_cache())


def test_what_is_drawn_is_what_the_configuration_builds() -> None:
    torch.manual_seed(3)
    one = ShortSWA(d_model=D, window=4)
    torch.manual_seed(3)
    other = ShortSWAConfig(window=4).build(twoaxis.core.position.LayerStack(D, 1e-6, (1,)).sites[0])
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_keywords_accept_what_a_decoder_accepts() -> None:
    mixer = ShortSWA(d_model=D, n_heads=2, input_local="canon", projected_local={"kind": "canon", "kernel": 2})
    assert type(mixer.input_local) is Canon
    assert type(mixer.projected_local) is Canon and mixer.projected_local.options.kernel == 2
    assert ShortSWA({"window": 3}, D, window=4).config.window == 4
    assert MHC(d_model=D, norm_eps=1e-3, preset="glm5").config.norm_eps == 1e-3


def test_a_mixer_of_heads_takes_those_of_attention() -> None:
    mixer = ValueResidual(d_model=D, variant="gated", n_layers=2, index=1, n_heads=8, n_kv_heads=2)
    assert 2 in next(mixer.parameters()).shape


def test_a_subclass_is_called_as_it_is_written() -> None:
    class Mine(DeepDelta):
        def __init__(self) -> None:
            super().__init__(DeepDeltaConfig(), twoaxis.core.position.LayerStack(D, 1e-6, (1,)).sites[0])

    assert shapes(Mine()) == shapes(DeepDelta(d_model=D))
    assert isinstance(Residual(), Residual) and isinstance(Residual(d_model=D), Residual)


def test_help_shows_the_keywords() -> None:
    names = list(inspect.signature(DeepDelta).parameters)
    assert names[:2] == ["config", "d_model"] and "value_target" in names and "norm_eps" in names
    assert "norm_eps" not in inspect.signature(Canon).parameters
    assert "n_heads" in inspect.signature(ValueResidual).parameters


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: DeepDelta(), "^DeepDelta: d_model is missing: must be the width of the model; add it, such as d_model=64$"),
        (lambda: Canon(kernel=3), "^Canon: d_model is missing"),
        (
            lambda: DeepDelta(d_model=4, value_targt="paper"),
            r"^DeepDelta: unknown keyword 'value_targt'; did you mean 'value_target'\?$",
        ),
        (lambda: ShortConv(d_modle=4), r"^ShortConv: unknown keyword 'd_modle'; did you mean 'd_model'\?$"),
        (lambda: Canon(d_model=4, n_layers=2), "^Canon: unknown keyword 'n_layers'"),
        (lambda: DeepDelta(d_model=untyped("4")), "^DeepDelta: d_model='4': must be a whole number >= 1"),
        (lambda: DeepDelta(d_model=0), "^DeepDelta: d_model=0: must be a whole number >= 1"),
        (lambda: DeepDelta(d_model=4, index=2, n_layers=2), "^DeepDelta: index=2: must be a whole number from 0 to 1"),
        (lambda: DeepDelta(d_model=4, norm_eps=0), "^DeepDelta: norm_eps=0: must be a finite number > 0"),
        (lambda: ValueResidual(d_model=8, n_kv_heads=3), "^ValueResidual: n_kv_heads=3: must be a divisor of n_heads=4"),
        (lambda: DeepDelta("residual", d_model=4), "^kind='residual': must be 'deep_delta'"),
        (lambda: DeepDelta(ResidualConfig(), d_model=4), r"^DeepDelta: config=.*: must be a DeepDeltaConfig"),
        (lambda: ShortSWA(d_model=4, window=0), "^window=0: must be >= 1"),
        (lambda: ShortSWA(*("short_swa", 4, 1e-6, 1)), "^ShortSWA: got 4 arguments without names: must be at most 3"),
        (lambda: AttentionResiduals(d_model=4, key_rank=2), "must be used in a Decoder; leave out key_rank"),
    ],
)
def test_what_cannot_be_built_is_said_in_one_line(build: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        build()
    assert "\n" not in str(error.value)


def test_a_type_checker_sees_the_class_that_keywords_build() -> None:
    # `make check` reads this too. Any remains, since a configuration may build a variant of another class.
    assert assert_type(DeepDelta(d_model=D), DeepDelta | Any).compress is None
    assert assert_type(ShortSWA(d_model=D, n_heads=2), ShortSWA | Any) is not None


def test_a_mixer_without_a_method_that_it_needs_is_refused_where_it_is_defined() -> None:
    """Catches an error at the first model, which asks to report it as one of ours."""
    with pytest.raises(ConfigError, match=r"^mixer Unfinished has no write; define it in that class$"):

        class Unfinished(twoaxis.depth.DepthMixer, config=ResidualConfig):
            pass


class TooFewConfig(ResidualConfig):
    kind: Any = "too_few"

    def build(self, stack: Any) -> Any:
        mixers, ends = super().build(stack)
        return mixers[1:], ends


@pytest.mark.parametrize(
    "use", [lambda c: twoaxis.Decoder(dict(vocab_size=5, d_model=8, n_layers=1, depth=c)), lambda c: DepthAxis(c, 8, 1)]
)
def test_mixers_of_another_package_are_as_many_as_sublayers(use: Any) -> None:
    message = (
        r"^depth mixer 'too_few': mixers from build=1: must be 2, one for each sublayer; build one for each of stack.sites$"
    )
    with pytest.raises(ConfigError, match=message):
        use(TooFewConfig())
