"""Our decoder under torchtitan's protocol: configurations, names, groups, and what the model computes.

Its trainer runs on two processes in `benchmarks/engines/titan_runs.py`.
"""

import importlib
import importlib.util
import re
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import pytest
import torch

pytest.importorskip("torchtitan", reason="needs torchtitan 0.3.0")

from torchtitan.config import ParallelismConfig
from torchtitan.protocols.model_spec import ModelSpec

from twoaxis import DEPTH, ConfigError, Decoder, DecoderConfig, TokenLayout
from twoaxis.interop import torchtitan as runs
from twoaxis.interop.torchtitan import TitanDecoder, model_spec, optimizer_config, parallelize
from twoaxis.model.cost import Shape, decoder_cost
from twoaxis.train.optim import OptimizerConfig, parameter_groups

CONFIG = DecoderConfig.from_data(
    {
        "vocab_size": 13,
        "d_model": 8,
        "n_layers": 2,
        "max_seq_len": 16,
        "depth": "deep_delta",
        "blocks": [[{"kind": "short_swa", "n_heads": 2, "window": 3}, {"kind": "attention", "n_heads": 2}, "swiglu"]],
    }
)
TOKENS = torch.tensor([[1, 7, 3, 9, 2, 11], [5, 5, 0, 8, 6, 4]])


def built(seed: int = 3) -> tuple[ModelSpec, Any]:
    """A model as the trainer makes one: on the meta device, then given memory, then its values."""
    spec = model_spec(CONFIG, seed)
    with torch.device("meta"):
        model: Any = spec.model.build()
    model.verify_module_protocol()
    assert all(parameter.is_meta for parameter in model.parameters())
    model.to_empty(device="cpu")
    model.init_weights(buffer_device=None)
    return spec, model


@torch.no_grad()
def test_model_computes_what_the_decoder_does():
    _, model = built()
    decoder = Decoder.build(CONFIG, seed=3)
    assert isinstance(model, TitanDecoder) and torch.equal(model(TOKENS), decoder(TOKENS))
    positions = torch.tensor([[0, 1, 2, 3, 0, 1], [0, 1, 0, 1, 0, 1]])
    documents = torch.tensor([[0, 0, 0, 0, 1, 1], [0, 0, 1, 1, 2, 2]])
    torch.testing.assert_close(model(TOKENS, positions=positions), decoder(TOKENS, TokenLayout.packed(documents)))
    assert not torch.allclose(model(TOKENS, positions=positions), model(TOKENS))


def test_recomputing_blocks_changes_no_gradient():
    _, model = built()
    gradients = []
    for model.recompute in (False, True):
        model.zero_grad()
        model(TOKENS).square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(torch.equal(kept, again) for kept, again in zip(*gradients, strict=True))


def test_parameters_and_operations_are_the_declared_ones():
    spec, model = built()
    params, flops = spec.model.get_nparams_and_flops(model, 16)
    assert params == sum(parameter.numel() for parameter in model.parameters())
    assert flops == 3 * decoder_cost(CONFIG, Shape(batch=1, tokens=16)).flops // 16
    assert spec.model.get_nparams_and_flops(model, 4)[1] < flops


def test_records_hold_plain_data():
    record = model_spec(CONFIG).model.to_dict()
    assert DecoderConfig.from_data(record["decoder"]) == CONFIG and record["seed"] == 0


def test_rows_are_no_longer_than_documents_may_be():
    trainer = SimpleNamespace(training=SimpleNamespace(seq_len=17))
    with pytest.raises(ConfigError, match=r"training\.seq_len=17: must be at most max_seq_len=16"):
        model_spec(CONFIG).model.update_from_config(config=trainer)


class Dims(SimpleNamespace):
    """Meshes of torchtitan by axis, of which one more than data parallelism may be on."""

    def __init__(self, backend: str = "spmd_types", enabled: str = "", replicate: bool = False) -> None:
        others = {f"{axis}_enabled": axis == enabled for axis in ("tp", "cp", "pp", "ep")}
        super().__init__(spmd_backend=backend, dp_replicate_enabled=replicate, **others)

    def get_mesh(self, axes: list[str]) -> Any:
        return axes


@pytest.mark.parametrize(("short", "name"), [("tp", "tensor"), ("cp", "context"), ("pp", "pipeline"), ("ep", "expert")])
def test_other_parallelisms_are_refused(short, name):
    nothing: dict[str, Any] = dict.fromkeys(("training", "parallelism", "compile_config", "ac_config"))
    with pytest.raises(ConfigError, match=f"{name} parallel degree='> 1': must be 1"):
        parallelize(built()[1], parallel_dims=Dims(enabled=short), **nothing)


def test_pipelines_are_refused_by_the_function_that_the_trainer_calls():
    spec, model = built()
    assert spec.pipelining_fn is not None
    with pytest.raises(ConfigError, match="pipeline parallel degree='> 1': must be 1"):
        spec.pipelining_fn(model, parallel_dims=Dims(enabled="pp"))


@pytest.mark.parametrize(
    ("backend", "replicate", "axes"),
    [
        ("spmd_types", False, ["dp_shard"]),
        ("spmd_types", True, ["dp_replicate", "dp_shard"]),
        ("partial_dtensor", False, ["fsdp"]),
        ("partial_dtensor", True, ["dp_replicate", "fsdp"]),
    ],
)
def test_axes_of_both_backends(backend, replicate, axes):
    assert runs.data_mesh(Dims(backend, replicate=replicate)) == axes
    assert backend in get_args(get_type_hints(ParallelismConfig)["spmd_backend"])


def test_distributed_tokens_are_refused():
    with pytest.raises(
        ConfigError, match=r"parallelism\.spmd_backend='full_dtensor': must be 'spmd_types' or 'partial_dtensor'"
    ):
        runs.data_mesh(Dims("full_dtensor"))


@pytest.mark.parametrize("tie", [True, False])
def test_names_are_those_of_exports(tie):
    pytest.importorskip("transformers")
    from twoaxis.interop.hugging_face import to_hugging_face

    config = CONFIG.replace(tie_embeddings=tie)
    spec = model_spec(config)
    assert spec.state_dict_adapter is not None
    adapter: Any = spec.state_dict_adapter(spec.model, None)
    native = {f"decoder.{name}": value for name, value in Decoder.build(config).state_dict().items()}
    theirs = to_hugging_face(Decoder.build(config)).state_dict()
    tied = {"lm_head.weight"} if tie else set()
    assert adapter.to_hf(native).keys() == theirs.keys() - tied
    assert adapter.from_hf(theirs).keys() == native.keys()
    assert all(torch.equal(value, native[name]) for name, value in adapter.from_hf(adapter.to_hf(native)).items())


@pytest.mark.parametrize("row", list(DEPTH), ids=lambda row: row.kind)
def test_groups_are_those_of_our_trainer(row):
    config = CONFIG.replace(depth=row.example(next(iter(row.examples))))
    changes = [{"pattern": "blocks.1.*", "lr_scale": 0.5}, {"pattern": "embedding.weight", "weight_decay": 0.3}]
    optimizer = OptimizerConfig.from_data({"groups": changes, "weight_decay": 0.2, "lr": 0.01})
    expected = parameter_groups(Decoder.build(config), optimizer)
    found = optimizer_config(config, optimizer).param_groups
    assert [group.optimizer_kwargs["weight_decay"] for group in found] == [group.weight_decay for group in expected]
    assert [group.optimizer_kwargs["lr"] for group in found] == [0.01 * group.lr_scale for group in expected]
    names = [f"decoder.{name}" for name, _ in Decoder.build(config).named_parameters()]
    for group, ours in zip(found, expected, strict=True):
        assert {name for name in names if re.search(group.pattern, name)} == {f"decoder.{name}" for name in ours.parameters}


def test_equal_blocks_share_a_pattern():
    small, large = (optimizer_config(CONFIG.replace(n_layers=layers)).param_groups for layers in (2, 20))
    assert [group.pattern for group in small] == [group.pattern for group in large]


def test_frozen_groups_are_refused():
    optimizer = OptimizerConfig.from_data({"groups": [{"pattern": "embedding.weight", "lr_scale": 0}]})
    with pytest.raises(ConfigError, match=r"lr_scale of 'embedding\.weight'=0: must be > 0 in torchtitan"):
        optimizer_config(CONFIG, optimizer)


RUNS = ("plain", "recommended_block", "deep_delta")


def test_runs_are_found_under_both_names():
    for module in (runs, importlib.import_module("twoaxis.interop.torchtitan")):
        assert all(callable(getattr(module, run)) for run in RUNS)


# Its imports prepare compilation, where torch warns of its own parts.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_runs_build_configurations_of_the_trainer():
    if importlib.util.find_spec("triton") is None:
        pytest.skip("torchtitan's trainer imports triton")
    from torchtitan.config.manager import ConfigManager

    for run in RUNS:
        options = ["--training.steps", "7", "--hf_assets_path", "."]
        config: Any = ConfigManager().parse_args(["--module", runs.__name__, "--config", run, *options])
        assert config.training.steps == 7 and config.training.disable_cuda_graphs
        config.model_spec.model.update_from_config(config=config)
        with torch.device("meta"):
            model = config.model_spec.model.build()
        assert config.loss.global_vocab_size == model.decoder.config.vocab_size == 2048
        assert config.to_dict()["model_spec"]["name"] == "twoaxis"
