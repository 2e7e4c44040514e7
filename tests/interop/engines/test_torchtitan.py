"""Our decoder under torchtitan's protocol: imports, configurations, and what the model computes; the trainer does not run."""

import importlib
import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("torchtitan", reason="needs torchtitan 0.3.0")

from torchtitan.protocols.model_spec import ModelSpec

from twoaxis import ConfigError, Decoder, DecoderConfig, TokenLayout
from twoaxis.interop import torchtitan as runs
from twoaxis.interop.torchtitan import TitanDecoder, model_spec, parallelize
from twoaxis.model.cost import Shape, decoder_cost

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


@pytest.mark.parametrize(("short", "name"), [("tp", "tensor"), ("cp", "context"), ("pp", "pipeline"), ("ep", "expert")])
def test_other_parallelisms_are_refused(short, name):
    dims = SimpleNamespace(**{f"{axis}_enabled": axis == short for axis in ("tp", "cp", "pp", "ep")})
    nothing: dict[str, Any] = dict.fromkeys(("training", "parallelism", "compile_config", "ac_config"))
    with pytest.raises(ConfigError, match=f"{name} parallel degree='> 1': must be 1"):
        parallelize(built()[1], parallel_dims=dims, **nothing)


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
