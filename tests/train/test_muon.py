"""Muon: torch's own on every matrix by itself, AdamW on everything else, and what either keeps."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from twoaxis import DEPTH, SEQUENCE, ConfigError, Decoder, DecoderConfig
from twoaxis.core.config import apply_overrides
from twoaxis.core.parameters import declarations
from twoaxis.study.design import overlay
from twoaxis.study.report.analysis import rates_of
from twoaxis.study.timing import _Arm
from twoaxis.train import TrainConfig, train
from twoaxis.train.checkpoint import load_checkpoint
from twoaxis.train.optim import OptimizerConfig, build_optimizer, group_table, parameter_groups
from twoaxis.train.parallel.ranks import Ranks

Recipe = Callable[..., TrainConfig]
LR, DECAY = 0.02, 0.1
FIXED = (".bias", ".null", ".A_log", ".static")
"""Vectors, and taps [k C] of each channel."""

MUON = OptimizerConfig(kind="muon", lr=LR, weight_decay=DECAY)


def decoder(depth: Any = "residual", **changes: Any) -> Decoder:
    config = {"vocab_size": 11, "d_model": 16, "n_layers": 2, "depth": depth, "tie_embeddings": False}
    blocks = [[{"kind": "attention", "n_heads": 4, "n_kv_heads": 2}, {"kind": "swiglu", "d_ff": 24}]]
    return Decoder.build(DecoderConfig.from_data({**config, "blocks": blocks, **changes}))


def cut(name: str, n_streams: int = 4) -> list[int]:
    """The rows of each matrix in a parameter, worked out by hand."""
    heads = [4] * 8
    maps = [n_streams, n_streams, n_streams**2]
    return {"qkv.weight": heads, "gate_up.weight": [24, 24], "fn": maps}.get(".".join(name.split(".")[-2:]), [])


def steps(model: Decoder, optimizers: list[torch.optim.Optimizer], gradients: dict[str, list[torch.Tensor]]) -> None:
    for step in range(3):
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name][step].clone()
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("depth", ["residual", "mhc"])
def test_every_matrix_is_updated_as_by_torch_when_it_is_stored_alone(depth: str) -> None:
    model = decoder(depth)
    generator = torch.Generator().manual_seed(0)
    gradients = {
        name: [torch.randn(one.shape, generator=generator) for _ in range(3)] for name, one in model.named_parameters()
    }
    matrices, expected = {}, {}
    for name, parameter, declaration in declarations(model):
        if declaration.tag == "matrix":
            rows = cut(name) or ([4, 4, 16] if name.endswith("depth.fn") else [len(parameter)])
            matrices[name] = [nn.Parameter(part.clone()) for part in parameter.detach().split(rows)]
    alone = torch.optim.Muon(
        [part for parts in matrices.values() for part in parts], lr=LR, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw"
    )
    for step in range(3):
        for name, parts in matrices.items():
            for part, gradient in zip(parts, gradients[name][step].split([len(part) for part in parts]), strict=True):
                part.grad = gradient
        alone.step()
    expected = {name: torch.cat([part.detach() for part in parts]) for name, parts in matrices.items()}
    start = {name: one.detach().clone() for name, one in model.named_parameters()}
    steps(model, [build_optimizer(parameter_groups(model, MUON), MUON)], gradients)
    assert any(name.endswith("depth.fn") for name in expected) == (depth == "mhc")
    for name, parameter in model.named_parameters():
        if name in expected:
            torch.testing.assert_close(parameter.detach(), expected[name], rtol=1e-5, atol=1e-7, msg=name)
            # As large as AdamW's: 0.2 of the rate, up to the error of five iterations.
            change = (parameter.detach() - start[name]).square().mean().sqrt() / 3
            assert 0.05 * LR < change < 0.3 * LR, name


def test_everything_else_is_updated_as_by_adamw() -> None:
    one, other = decoder("mhc"), decoder("mhc")
    generator = torch.Generator().manual_seed(0)
    gradients = {name: [torch.randn(p.shape, generator=generator) for _ in range(3)] for name, p in one.named_parameters()}
    adamw = MUON.replace(kind="adamw")
    steps(one, [build_optimizer(parameter_groups(one, MUON), MUON)], gradients)
    steps(other, [build_optimizer(parameter_groups(other, adamw), adamw)], gradients)
    tags = {name: declaration.tag for name, _, declaration in declarations(one)}
    for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b) == (tags[name] != "matrix"), name
    assert {tags[name] for name in ("embedding.weight", "head.weight")} == {"embedding", "head"}


def grown(table: Any, name: str, factor: int) -> Decoder:
    """An example at a width, with as many heads as fit where a head keeps its own."""
    example = table.example(name)
    if getattr(example, "value_dim", None) is not None:
        example = example.replace(head_dim=4)
    if getattr(example, "head_dim", None) is not None:
        more = {name: getattr(example, name, None) for name in ("n_heads", "n_kv_heads")}
        example = example.replace(**{name: factor * count for name, count in more.items() if count})
    heads = {"kind": "attention", "n_heads": 2 * factor, "head_dim": 4, "n_kv_heads": factor}
    data: dict[str, Any] = {"vocab_size": 8, "d_model": 8 * factor, "n_layers": 4, "embedding_std": 1.0}
    if table.kind in DEPTH:
        data |= {"depth": example, "blocks": [[heads, "swiglu"]]}
    else:
        data |= {"blocks": [[example, "swiglu"]]}
    with torch.device("meta"):
        return Decoder(DecoderConfig(**data))


@pytest.mark.parametrize("row", [*DEPTH, *SEQUENCE], ids=lambda row: row.kind)
def test_the_dimensions_that_grow_with_the_width_are_those_that_are_declared(row: Any) -> None:
    for name in row.examples:
        small, large = grown(row, name, 2), grown(row, name, 4)
        shapes = {name: parameter.shape for name, parameter in small.named_parameters()}
        for parameter_name, parameter, declaration in declarations(large):
            before, after = shapes[parameter_name], parameter.shape
            where = f"{row.kind}-{name}: {parameter_name}"
            # Vectors of gains and biases, rows that are looked up, taps, and the head, with a factor in the forward pass.
            if declaration.tag in ("norm", "bias", "embedding", "table", "head") or after == before:
                assert declaration.grows in ("outputs", "neither", "inputs"), where
                continue
            inputs = (
                after[-1] > before[-1]
                and not parameter_name.endswith(FIXED)
                and not (row.kind == "value_embedding" and parameter_name.endswith("gate_weight"))
            )
            assert (declaration.grows in ("both", "inputs")) == inputs, where
            if declaration.tag == "matrix" and declaration.fused is None:
                assert (declaration.grows in ("both", "outputs")) == (after[0] > before[0]), where
            if declaration.fused is not None:
                sizes = max(declaration.fused.sizes)
                assert sum(declaration.fused.sizes) == after[declaration.fused.dim], where
                wider = sizes > max(dict(declared(small))[parameter_name].fused.sizes)
                assert declaration.fused.dim or (declaration.grows in ("both", "outputs")) == wider, where


def declared(model: Decoder) -> list[tuple[str, Any]]:
    return [(name, declaration) for name, _, declaration in declarations(model)]


def test_the_table_of_groups_says_by_what() -> None:
    lines = group_table(parameter_groups(decoder(), MUON)).splitlines()
    assert lines[0].split()[-2:] == ["by", "what"]
    assert [line.split()[-2:] for line in lines if " muon " in line] == [["muon", "matrix"]]
    assert any("adamw  embedding, head" in line for line in lines)


def test_frozen_parameters_leave_the_rest_to_either() -> None:
    for pattern, kinds in (("*.mixer.*", {"exp_avg"}), ("*", set()), ("blocks.*.norm.gain", {"momentum_buffer", "exp_avg"})):
        model = decoder()
        groups = [{"pattern": pattern, "lr_scale": 0}, *([{"pattern": "*.mixer.*", "lr_scale": 1}] if pattern == "*" else [])]
        config = OptimizerConfig.from_data({"kind": "muon", "groups": groups})
        optimizer = build_optimizer(parameter_groups(model, config), config)
        tokens = torch.tensor([[1, 2, 3, 4]])
        model.loss(tokens, tokens.roll(-1))[0].backward()
        optimizer.step()
        found = {kind for state in optimizer.state.values() for kind in state} - {"step", "exp_avg_sq"}
        assert found == (kinds or {"momentum_buffer"}), pattern
    everything = OptimizerConfig.from_data({"kind": "muon", "groups": [{"pattern": "*", "lr_scale": 0}]})
    with pytest.raises(ConfigError, match="every parameter is frozen"):
        build_optimizer(parameter_groups(decoder(), everything), everything)


def test_a_checkpoint_has_one_momentum_for_each_matrix(recipe: Recipe, tmp_path: Path) -> None:
    config = recipe(steps=2, optimizer={"kind": "muon"})
    train(config, tmp_path / "run")
    found = load_checkpoint(tmp_path / "run" / "checkpoints" / "step-00000002")
    kinds: dict[str, set[str]] = {}
    for key, value in found.optimizer.items():
        kind, _, name = key.partition("/")
        kinds.setdefault(name, set()).add(kind)
        assert not value.ndim or value.shape == found.model[name].shape
    assert kinds["blocks.0.attention.mixer.qkv.weight"] == {"momentum_buffer"}
    assert kinds["embedding.weight"] == kinds["norm.gain"] == {"exp_avg", "exp_avg_sq", "step"}


def test_another_optimizer_keeps_the_learning_rate_of_the_recipe() -> None:
    # Caught: another kind dropped the other keys of its table, so an arm with Muon had the default rate.
    base = {"optimizer": {"lr": 3e-3, "weight_decay": 0.2}, "model": {"depth": {"kind": "deep_delta", "beta_init": 0.5}}}
    expected = {"lr": 3e-3, "weight_decay": 0.2, "kind": "muon"}
    assert overlay(base, {"optimizer": {"kind": "muon"}})["optimizer"] == expected
    assert apply_overrides(base, ["optimizer.kind=muon"])["optimizer"] == expected
    recorded = {"optimizer": {"kind": "adamw", **base["optimizer"]}}
    assert apply_overrides(recorded, ["optimizer.kind=muon"])["optimizer"] == expected


def test_a_study_reports_what_updates_what_and_counts_its_memory(recipe: Recipe) -> None:
    adamw, muon = recipe(), recipe(optimizer={"kind": "muon"})
    found = {one.what: one.lr for one in rates_of(muon, 256)}
    assert found["matrix by muon"] == found["embedding"] == muon.optimizer.lr and "matrix" not in found
    arms = [_Arm(one, {}, Ranks()) for one in (adamw, muon)]
    matrices = sum(one.numel() for _, one, declared in declarations(arms[0].model) if declared.tag == "matrix")
    assert arms[0].state_bytes - arms[1].state_bytes == 4 * matrices
    assert arms[0].state_bytes == 16 * sum(one.numel() for one in arms[0].model.parameters())


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ({"kind": "mouon"}, "optimizer: kind='mouon': must be 'adamw' or 'muon'; did you mean 'muon'"),
        ({"kind": "muon", "momentum": 1.0}, "optimizer: momentum=1.0: must be < 1.0; correct it in the optimizer"),
        ({"momentum": 0.9}, "optimizer: momentum=0.9: must be left out with kind='adamw', which has betas; remove it, or use"),
    ],
)
def test_an_optimizer_that_cannot_be(optimizer: dict[str, Any], message: str, recipe: Recipe) -> None:
    with pytest.raises(ConfigError) as caught:
        recipe(optimizer=optimizer)
    assert message in str(caught.value) and "\n" not in str(caught.value)
