"""CompleteP: nothing changes at the base size, and beside it the first steps move a model as far as there."""

import json
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from twoaxis import DEPTH, ConfigError, Decoder, DecoderConfig
from twoaxis.checkpoints.layouts import state_map
from twoaxis.core.cost import Shape
from twoaxis.core.parameters import declarations
from twoaxis.core.position import LayerStack
from twoaxis.model.block import Sublayer
from twoaxis.model.config_json import CONFIG_NAMES
from twoaxis.model.cost import decoder_cost
from twoaxis.train import TrainConfig
from twoaxis.train.optim import OptimizerConfig, parameter_groups

from ..scripts import DOCS, load_script

Recipe = Callable[..., TrainConfig]
EXAMPLES = [
    pytest.param(f"{row.kind}-{name}", row.example(name), id=f"{row.kind}-{name}") for row in DEPTH for name in row.examples
]


@pytest.fixture(scope="module")
def check() -> ModuleType:
    """The coordinate check of the documentation."""
    return load_script(DOCS / "coordinates.py")


def config(width: int = 32, layers: int = 4, **changes: Any) -> DecoderConfig:
    attention = {"kind": "attention", "n_heads": width // 8, "head_dim": 8}
    sizes = {"vocab_size": 17, "d_model": width, "n_layers": layers, "blocks": [[attention, "swiglu"]]}
    return DecoderConfig.from_data({**sizes, **changes})


def completep(width: int = 32, layers: int = 4, **changes: Any) -> DecoderConfig:
    base = {"parametrization": "completep", "base_d_model": 16, "base_n_layers": 2}
    return config(width, layers, **{**base, **changes})


@pytest.mark.parametrize("row", [*DEPTH], ids=lambda row: row.kind)
def test_at_the_base_size_it_is_the_standard_one(row: Any) -> None:
    depth = row.example(next(iter(row.examples)))
    same = {"base_d_model": 16, "base_n_layers": 4, "tie_embeddings": False, "depth": depth}
    models = [Decoder.build(config(16, 4, tie_embeddings=False, depth=depth)), Decoder.build(completep(16, 4, **same))]
    tokens = torch.arange(12).reshape(2, 6) % 17
    losses = [model.loss(tokens, tokens.roll(-1, 1))[0] for model in models]
    for loss in losses:
        loss.backward()
    assert torch.equal(*losses)
    for (name, one), other in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other), name
        assert (one.grad is None and other.grad is None) or torch.equal(one.grad, other.grad), name  # type: ignore[arg-type]
    for kind in ("adamw", "muon"):
        optimizer = OptimizerConfig(kind=kind)
        groups = [
            [(group.rule, group.lr_scale, group.weight_decay, group.eps, list(group.parameters)) for group in found]
            for found in (parameter_groups(model, optimizer) for model in models)
        ]
        assert groups[0] == groups[1]


def test_rates_decay_and_eps_follow_the_table_of_the_paper() -> None:
    # m_N = 2, m_L = 2; the numbers of table 1 with alpha = 1, and eq. 40.
    model = Decoder.build(completep(tie_embeddings=False, depth="residual_scalars"))
    tags = {name: declaration for name, _, declaration in declarations(model)}
    expected = {
        # (rate, decay, eps) over those of the base.
        "embedding.weight": (1, 1, 1 / 2),
        "head.weight": (1, 1, 1 / 2),
        "norm.gain": (1, 0, 1 / 2),
        "blocks.0.attention.norm.gain": (1, 0, 1 / 4),
        "blocks.3.attention.mixer.qkv.weight": (1 / 2, 2, 1 / 4),
        "blocks.3.swiglu.mixer.down.weight": (1 / 2, 2, 1 / 4),
        # They act on the stream in every layer.
        "blocks.1.swiglu.depth.stream_weight": (1 / 2, 0, 1 / 4),
    }
    base = OptimizerConfig(weight_decay=0.3, eps=1e-6)
    groups = parameter_groups(model, base)
    found = {name: (g.lr_scale, g.weight_decay / 0.3, g.eps / 1e-6) for g in groups for name in g.parameters}
    for name, factors in expected.items():
        assert found[name] == pytest.approx(factors), name
    muon = parameter_groups(model, OptimizerConfig(kind="muon"))
    rates = {name: group.lr_scale for group in muon for name in group.parameters}
    # A head of queries keeps its rows; the norm of an orthogonal matrix that grows in both dimensions grows with their root.
    assert rates["blocks.3.attention.mixer.qkv.weight"] == 1 / 2
    assert rates["blocks.3.swiglu.mixer.down.weight"] == pytest.approx(2**-0.5)
    assert rates["embedding.weight"] == rates["norm.gain"] == 1
    assert tags["head.weight"].tag == "head"


def test_options_by_name_are_factors_of_the_rates() -> None:
    groups = [{"pattern": "*.qkv.weight", "lr_scale": 3.0, "weight_decay": 0.5}, {"pattern": "norm.gain", "lr_scale": 0}]
    found = parameter_groups(Decoder.build(completep()), OptimizerConfig.from_data({"groups": groups}))
    by_name = {name: group for group in found for name in group.parameters}
    qkv = by_name["blocks.0.attention.mixer.qkv.weight"]
    assert (qkv.lr_scale, qkv.weight_decay) == (1.5, 1.0) and by_name["norm.gain"].lr_scale == 0


def test_initial_values_are_those_of_the_base() -> None:
    base, here = (Decoder.build(one) for one in (config(16, 2, tie_embeddings=False), completep(tie_embeddings=False)))

    def std(model: Decoder, name: str) -> float:
        return model.get_parameter(name).std().item()

    # By the inputs in hidden matrices, not by the depth in the maps back to the stream, and the same in embedding and head.
    for name, ratio in {
        "embedding.weight": 1.0,
        "head.weight": 1.0,
        "blocks.0.attention.mixer.qkv.weight": 2**-0.5,
        "blocks.0.attention.mixer.output.weight": 2**-0.5,
    }.items():
        assert std(here, name) / std(base, name) == pytest.approx(ratio, rel=0.15), name


def test_the_forward_pass_has_the_factors_of_the_paper() -> None:
    standard = config()
    model, plain = Decoder.build(completep()), Decoder.build(standard)
    with torch.no_grad():
        for one, other in zip(plain.parameters(), model.parameters(), strict=True):
            one.copy_(other)
        # A factor on the last map of each branch and on the last norm is what the factors are.
        for name, one in plain.named_parameters():
            if name.endswith(("output.weight", "down.weight")) or name == "norm.gain":
                one.mul_(0.5)
    tokens = torch.arange(12).reshape(2, 6) % 17
    torch.testing.assert_close(model(tokens), plain(tokens))
    assert decoder_cost(completep(), Shape(1, 1)).elementwise_flops - decoder_cost(standard, Shape(1, 1)).elementwise_flops == (
        9 * 32
    )


def test_records_have_it_and_older_ones_are_standard() -> None:
    wanted = completep()
    assert DecoderConfig.from_record(wanted.to_data()) == wanted
    older = {
        key: value
        for key, value in config().to_data().items()
        if key not in ("parametrization", "base_d_model", "base_n_layers")
    }
    assert DecoderConfig.from_record(older) == config()
    assert set(CONFIG_NAMES.values()) == set(DecoderConfig.model_fields)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parametrization": "mup"}, "parametrization='mup': must be 'standard' or 'completep'"),
        (
            {"base_d_model": 16},
            "base_d_model=16: must be left out with parametrization='standard'; set parametrization=completep",
        ),
        (
            {"parametrization": "completep", "base_d_model": 16},
            "base_n_layers=None: must be the size of the model that rates are",
        ),
        (
            {"parametrization": "completep", "base_d_model": 16, "base_n_layers": 1, "blocks": [["attention", "swiglu"]]},
            "head_dim of 'attention': 8, and 4 at base_d_model=16: must be equal with parametrization='completep'; give",
        ),
    ],
)
def test_a_parametrization_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(**changes)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_layout_without_the_factors_is_refused() -> None:
    with pytest.raises(ConfigError, match="parametrization='completep': must be 'standard' in layout 'llama', which has no"):
        state_map("llama", completep())


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_the_first_steps_move_a_plain_model_as_far_at_any_width_and_depth(kind: str, check: ModuleType) -> None:
    sizes = [*check.sizes()] if kind == "adamw" else [check.BASE, (128, 2), (32, 8)]
    base = check.change(check.model_of("residual", check.BASE), kind)
    for size in sizes:
        assert 0.6 < check.change(check.model_of("residual", size), kind) / base < 1.2, size
    for size in ((128, 2), (32, 8)):
        assert check.change(check.model_of("residual", size, "standard"), kind) > 2 * base, size


def test_without_the_factor_of_updates_they_do_not(check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    base = check.change(check.model_of("residual", check.BASE))
    monkeypatch.setattr(Sublayer, "_scaled", lambda self, update: update)
    assert check.change(check.model_of("residual", (32, 16))) > 2 * base


@pytest.mark.parametrize("row", [*DEPTH], ids=lambda row: row.kind)
def test_the_first_steps_move_any_depth_mixer_as_far_in_a_larger_model(row: Any, check: ModuleType) -> None:
    """As the kept check of every example says, which a test of the page reads."""
    name = next(iter(row.examples))
    depth, name = row.example(name), f"{row.kind}-{name}"
    base, larger = (check.change(check.model_of(depth, size), rows=4, tokens=8) for size in (check.BASE, (64, 6)))
    # The page says of the others how far they are apart.
    assert 0.4 < larger / base < 2.0 or name in check.APART, f"{name}: {larger / base:.2f}"


def test_updates_that_lose_their_scale_get_it_behind_the_norm() -> None:
    # A direction has no length, and a normalised update no scale, so a factor on the update alone changes nothing.
    generator = torch.Generator().manual_seed(0)
    state, update, context = (torch.randn(1, 3, 8, generator=generator) for _ in range(3))
    for kind, index in (("deep_delta", 0), ("laurel_gemma3n", 1)):
        moved = []
        for scale in (1.0, 0.25):
            torch.manual_seed(0)
            mixers, _ = DEPTH.parse(kind).build(LayerStack(8, 1e-6, (2,), update_scale=scale))
            moved.append(mixers[index].write(state, scale * update, context, None) - state)
        torch.testing.assert_close(moved[1], 0.25 * moved[0])


def test_logits_of_normalised_updates_start_at_the_logarithm_of_the_factor() -> None:
    for kind in ({"kind": "elc_bert", "variant": "normalized"}, "vertical_attention"):
        here, base = (
            Decoder.build(config(16, layers, depth=kind, **changes))
            for layers, changes in ((4, {"parametrization": "completep", "base_d_model": 16, "base_n_layers": 2}), (4, {}))
        )
        weights = [
            [torch.softmax(one.detach(), 0) for name, one in model.named_parameters() if name.endswith(".logits")]
            for model in (here, base)
        ]
        assert weights[0]
        for one, other in zip(*weights, strict=True):
            expected = other * torch.tensor([1.0, *[0.5] * (len(other) - 1)])
            torch.testing.assert_close(one, expected / expected.sum())


def test_the_page_has_every_mixer_and_the_numbers_that_are_kept(check: ModuleType) -> None:
    data = json.loads(check.KEPT.read_text())
    assert check.PAGE.read_text() == check.page(data), "run `python docs/coordinates.py page`"
    assert set(check.CHANGES) == {row.kind for row in DEPTH}
    assert set(data["mixers"]) == {param.values[0] for param in EXAMPLES} and set(check.APART) <= set(data["mixers"])
    for name, found in data["mixers"].items():
        assert name in check.APART or all(0.2 < one < 2.2 for ratios in found.values() for one in ratios), name
