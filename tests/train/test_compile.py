"""Compiled training: the whole model is one graph, blocks are few, and the losses are those of the eager run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad

from twoaxis import ConfigError, Decoder
from twoaxis.ops.cpu import library
from twoaxis.ops.depth_read import depth_read
from twoaxis.train import TrainConfig, read_metrics, train

Recipe = Callable[..., TrainConfig]
# A scaling is part of what the rotations that layers share are called.
SCALING = {"kind": "yarn", "factor": 2.0, "original_max_seq_len": 16}
PAIR = [{"kind": "attention", "n_heads": 2, "rope_scaling": SCALING}, "swiglu"]


# Dynamo looks for a gradient on tensors inside the model, and hides the warning only after it has become an error here.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    ("mode", "depth", "blocks", "graphs"),
    [
        ("model", "residual", [PAIR] * 3, 1),
        ("model", "attention_residuals", [PAIR] * 3, 1),
        # The first block makes the rotations that the others share.
        ("block", "deep_delta", [PAIR] * 3, 2),
        # Every block sees another number of sources, more of them than torch's own limit of 8 graphs.
        ("block", "attention_residuals", [PAIR[:1], *[PAIR[1:]] * 8], 9),
    ],
)
def test_compiled_equals_eager(
    mode: str, depth: str, blocks: list[Any], graphs: int, recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = {"d_model": 16, "n_layers": len(blocks), "depth": depth, "blocks": blocks}
    run = {"steps": 3, "validate_every": 2, "micro_batch_size": 2, "model": model}
    train(recipe(**run), tmp_path / "eager")

    frames = CompileCounterWithBackend("eager")
    real = torch.compile

    def counted(function: Any, **options: Any) -> Any:
        return real(function, backend=frames, **options)

    # The graphs are what is tested here; the code generator behind them takes a minute.
    monkeypatch.setattr(torch, "compile", counted)
    torch._dynamo.reset()
    try:
        train(recipe(**run, compile=mode), tmp_path / "compiled")
    finally:
        torch._dynamo.reset()
    assert frames.frame_count == graphs
    # Opaque, so that no layer computes it again.
    assert sum("twoaxis.rotation" in str(node.target) for graph in frames.graphs for node in graph.graph.nodes) == 1
    losses = [[record.loss for record in read_metrics(tmp_path / name / "metrics.jsonl")] for name in ("eager", "compiled")]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=0.0)


@pytest.mark.parametrize(
    ("depth", "operators"),
    [
        ("attention_residuals", ["depth_read", "inverse_rms"]),
        ("deep_delta", ["delta_write"]),
        ({"kind": "mhc", "n_streams": 2}, ["mix_streams", "sinkhorn"]),
    ],
)
def test_a_graph_with_gradients_calls_kernels_and_one_without_none(
    depth: Any, operators: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a compiled training step that falls back to plain forms, and decoding that calls a kernel for a few numbers."""
    assert library.status() == "on"
    model = Decoder.build({"vocab_size": 8, "d_model": 8, "n_layers": 2, "depth": depth})
    tokens, real = torch.randint(8, (2, 6)), library.call
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    expected, called = model.loss(inputs, targets)[0], set[str]()

    def noted(name: str, *arguments: Any) -> None:
        called.add(name)
        real(name, *arguments)

    monkeypatch.setattr(library, "call", noted)
    for gradients in (False, True):
        torch._dynamo.reset()
        with torch.set_grad_enabled(gradients):
            loss, *_ = torch.compile(model.loss, backend="aot_eager", fullgraph=True)(inputs, targets)
        torch.testing.assert_close(loss, expected)
        if gradients:
            loss.backward()
        assert called == {name for each in operators for name in (each, f"{each}_backward") if gradients}


def _gradient(read: Callable[[Tensor], Tensor], query: Tensor) -> Tensor:
    return torch.func.grad(lambda q: read(q).square().sum())(query)


def _derivative(read: Callable[[Tensor], Tensor], query: Tensor) -> Tensor:
    return torch.func.jvp(read, (query,), (query.cos(),))[1]


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("transform", [_gradient, _derivative])
def test_a_transformed_and_compiled_read_runs_in_its_plain_form(transform: Callable[..., Tensor]) -> None:
    """Catches zeros in place of a gradient: a transform within a graph takes the results of kernels for constants."""
    read, query = _read(), torch.randn(8)
    torch._dynamo.reset()
    compiled = torch.compile(lambda q: transform(read, q), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(query), transform(read, query))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_a_compiled_read_passes_on_a_tangent() -> None:
    """Catches a tangent that a kernel in a graph drops."""
    read, query = _read(), torch.randn(8)
    torch._dynamo.reset()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(query, query.cos())
        found = forward_ad.unpack_dual(torch.compile(read, backend="aot_eager")(dual)).tangent
    torch.testing.assert_close(found, _derivative(read, query))


def _read() -> Callable[[Tensor], Tensor]:
    """A depth read that kernels serve, of its query."""
    assert library.status() == "on"
    sources, factors = [torch.randn(2, 3, 8) for _ in range(2)], [torch.rand(2, 3) for _ in range(2)]
    return lambda query: depth_read(sources, factors, query)


@pytest.mark.parametrize("depth", ["residual", "attention_residuals"])
def test_an_exported_model_needs_no_operator_of_ours(depth: str) -> None:
    model = Decoder.build({"vocab_size": 8, "d_model": 8, "n_layers": 1, "depth": depth})
    exported = torch.export.export(model, (torch.zeros(1, 4, dtype=torch.long),))
    assert "twoaxis" not in exported.graph_module.code


def test_static_shapes_need_equal_micro_batches(recipe: Recipe, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"micro_batch_size=3: must be a divisor of batch_size=4 when compiled; change one"):
        train(recipe(compile="model", micro_batch_size=3), tmp_path / "run")
