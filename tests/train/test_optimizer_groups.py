"""A14: what decays, what does not, and who decides."""

import re
import tomllib
from typing import Any

import pytest
import torch

from twoaxis import DEPTH, LOCAL, SEQUENCE, ConfigError, Decoder, DecoderConfig
from twoaxis.core.parameters import declarations
from twoaxis.core.registry import sections
from twoaxis.train.optim import OptimizerConfig, build_optimizer, group_table, parameter_groups

DEPTHS = [pytest.param(row.example(name), id=f"{row.kind}-{name}") for row in DEPTH for name in row.examples]
SEQUENCES = [pytest.param(row.example(name), id=f"{row.kind}-{name}") for row in SEQUENCE for name in row.examples]


def small(depth: object = "residual", sequence: object = None) -> Decoder:
    mixer = sequence or {"kind": "attention", "n_heads": 2}
    config = {"vocab_size": 11, "d_model": 8, "n_layers": 2, "depth": depth, "blocks": [[mixer, "swiglu"]]}
    return Decoder.build(DecoderConfig.from_data(config))


def assert_groups(model: Decoder) -> None:
    config = OptimizerConfig(lr=0.1, weight_decay=0.1)
    groups = parameter_groups(model, config)
    names = [name for group in groups for name in group.parameters]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())

    declared = {name: declaration for name, _, declaration in declarations(model)}
    decayed = {name for group in groups if group.weight_decay for name in group.parameters}
    assert decayed == {name for name, one in declared.items() if one.tag in ("matrix", "head", "embedding")}
    assert all(declared[name].lr_scale == group.lr_scale for group in groups for name in group.parameters)

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
            parameter.grad = torch.zeros_like(parameter)
    build_optimizer(groups, config).step()
    for name, parameter in model.named_parameters():
        expected = 0.99 if name in decayed else 1.0
        assert torch.allclose(parameter, torch.full_like(parameter, expected), rtol=1e-6), name
        assert name in decayed or torch.equal(parameter, torch.ones_like(parameter)), name


@pytest.mark.parametrize("depth", DEPTHS)
def test_no_depth_parameter_decays_but_matrices(depth: object) -> None:
    model = small(depth)
    assert_groups(model)
    groups = parameter_groups(model, OptimizerConfig())
    kept = {name for group in groups if not group.weight_decay for name in group.parameters}
    mixers = {n: d.tag for n, _, d in declarations(model) if ".depth." in n or n.startswith("ends.")}
    assert {name for name, tag in mixers.items() if tag != "matrix"} == mixers.keys() & kept


@pytest.mark.parametrize("sequence", SEQUENCES)
def test_sequence_mixers_are_grouped_by_tag(sequence: object) -> None:
    assert_groups(small(sequence=sequence))


def authors_groups(config: type) -> list[list[dict[str, Any]]]:
    """The groups with which a docstring says that the authors train, each as `optimizer.groups` takes it."""
    said = " ".join(sections(config).get("Deviates", "").split())
    return [tomllib.loads(f"groups={found}")["groups"] for found in re.findall(r"optimizer\.groups=(\[\{.*?\}\])", said)]


AUTHORS = {
    # kind: the options, and what the authors do otherwise with each tag of its own parameters: (rate, decay).
    "denseformer": [({}, {"mixing": (1.0, 0.1)}), ({"variant": "skip_gains"}, {"mixing": (1.0, 0.1)})],
    "muddformer": [({"source_norm": "rms", "post_norm": "all"}, {"mixing": (1.0, 0.1), "norm": (1.0, 0.1)})],
    "lime": [({}, {"mixing": (10.0, 0.0)})],
    "hyper_connections": [({}, {"gate": (1.0, 0.1), "mixing": (1.0, 0.0), "matrix": (1.0, 0.1)})],
}


@pytest.mark.parametrize("row", [*DEPTH, *SEQUENCE, *LOCAL], ids=lambda row: row.kind)
def test_the_groups_that_a_docstring_names_train_as_its_authors_do(row: Any) -> None:
    named = authors_groups(row.config)
    expected = AUTHORS.get(row.kind, [])
    assert len(named) == len(expected)
    for groups, (options, changed) in zip(named, expected, strict=True):
        model = small({"kind": row.kind, **options})
        tags = {name: declaration.tag for name, _, declaration in declarations(model)}
        found = parameter_groups(model, OptimizerConfig.from_data({"weight_decay": 0.1, "groups": groups}))
        for group in found:
            for name in group.parameters:
                if ".depth." in name or name.startswith("ends."):
                    assert (group.lr_scale, group.weight_decay) == changed[tags[name]], name


def test_patterns_override_and_the_later_one_wins() -> None:
    changes = [
        {"pattern": "*.gain", "weight_decay": 0.5, "lr_scale": 3.0},
        {"pattern": "norm.gain", "lr_scale": 0.25},
    ]
    config = OptimizerConfig.from_data({"lr": 0.1, "groups": changes})
    groups = parameter_groups(small(), config)
    found = {name: (group.weight_decay, group.lr_scale) for group in groups for name in group.parameters}
    assert found["norm.gain"] == (0.5, 0.25)
    assert found["blocks.0.swiglu.norm.gain"] == (0.5, 3.0)
    assert found["embedding.weight"] == (0.1, 1.0)
    rates = {group["lr"] for group in build_optimizer(groups, config).param_groups}
    assert rates == {0.1, 0.1 * 3.0, 0.1 * 0.25}


def test_a_pattern_that_matches_nothing_is_an_error_with_a_remedy() -> None:
    config = OptimizerConfig.from_data({"groups": [{"pattern": "*.gian", "weight_decay": 0.0}]})
    with pytest.raises(ConfigError, match=r"pattern '\*.gian' matches no parameter of this model; did you mean '\*.gain'\?"):
        parameter_groups(small(), config)


def test_what_the_caller_has_frozen_stays_frozen() -> None:
    # Caught: build_optimizer asked for gradients of every parameter of a trained group.
    model, config = small(), OptimizerConfig(lr=0.1)
    frozen = [model.embedding.weight, *model.blocks[0].parameters()]
    for parameter in frozen:
        parameter.requires_grad_(False)
    before = [parameter.clone() for parameter in model.parameters()]
    groups = parameter_groups(model, config)
    assert sum(len(group.parameters) for group in groups) == len(before)
    assert {name for group in groups if not group.lr_scale for name in group.parameters} == {
        name for name, parameter in model.named_parameters() if not parameter.requires_grad
    }
    optimizer = build_optimizer(groups, config)
    tokens = torch.tensor([[1, 2, 3, 4]])
    model.loss(tokens, tokens.roll(-1))[0].backward()
    optimizer.step()
    given = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for parameter, start in zip(model.parameters(), before, strict=True):
        held = any(parameter is one for one in frozen)
        assert parameter.requires_grad != held and (id(parameter) in given) != held
        assert torch.equal(parameter, start) == held

    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(ConfigError, match="every parameter is frozen: must leave one to train; give some an lr_scale above 0"):
        build_optimizer(parameter_groups(model, config), config)


def test_the_table_tells_every_group() -> None:
    groups = parameter_groups(small("attention_residuals"), OptimizerConfig())
    lines = group_table(groups).splitlines()
    assert len(lines) == 1 + len(groups)
    assert any("query" in line and line.split()[0] == "0" for line in lines)
    assert any("embedding, matrix" in line and line.split()[0] == "0.1" for line in lines)
