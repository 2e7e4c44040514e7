"""Models of this library in torchtitan's trainer: `torchtitan.train --module my.runs --config small`.

`my/runs.py` holds a function that says what to train:

    def small():
        return trainer_config(DecoderConfig(vocab_size=32_000, d_model=512, n_layers=8, depth="deep_delta"))

`--module twoaxis.interop.torchtitan` has three such functions for torchtitan's own small tokenizer: `plain`,
`recommended_block` and `deep_delta`.

Written for torchtitan 0.3.0, whose interfaces still move, and for a GPU. Tested: imports, that such configurations build, that
the model computes what the decoder does (documents packed in a row apart), its parameters and operations, and refusals. Not
tested: the trainer itself, which does not run on a CPU, so neither FSDP, compilation nor checkpoints.

Letters: B batch, T position, V vocabulary.
"""

import importlib.util
from dataclasses import dataclass
from typing import Any

from twoaxis.core.errors import ConfigError, problem

if importlib.util.find_spec("torchtitan") is None:
    raise ConfigError("torchtitan is not installed: must be there for its trainer; pip install 'torchtitan==0.3.0'")

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torchtitan.protocols.model import BaseModel
from torchtitan.protocols.model_spec import ModelSpec

from twoaxis.core.cost import Shape
from twoaxis.core.layout import TokenLayout
from twoaxis.core.parameters import initial_values
from twoaxis.model import Decoder, DecoderConfig
from twoaxis.model.cost import decoder_cost
from twoaxis.planner.ledger import BACKWARD


class TitanDecoder(BaseModel):
    """Our decoder, as torchtitan builds, initialises and calls a model."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):
        """What to build.

        Attributes:
            decoder: data of a `DecoderConfig`, as plain as torchtitan's records want it.
            seed: of the initial values.
        """

        decoder: dict[str, Any]
        seed: int = 0

        @property
        def decoder_config(self) -> DecoderConfig:
            """The configuration that the data stand for."""
            return DecoderConfig.from_data(self.decoder)

        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            """Checks the length of rows.

            Raises:
                ConfigError: rows longer than the model's documents may be.
            """
            rows, longest = config.training.seq_len, self.decoder_config.max_seq_len
            if rows > longest:
                raise ConfigError(problem("training.seq_len", rows, f"at most max_seq_len={longest}", "raise max_seq_len"))

        def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
            """Returns the parameters, and the operations of a training step per token, both as declared."""
            cost = decoder_cost(self.decoder_config, Shape(batch=1, tokens=seq_len))
            return cost.params, (1 + BACKWARD) * cost.flops // seq_len

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.seed, self.recompute = config.seed, False
        self.decoder = Decoder(config.decoder_config)

    def forward(self, tokens: Int[Tensor, "B T"], positions: Int[Tensor, "_ T"] | None = None) -> Float[Tensor, "B T V"]:
        """Returns logits; a position 0 begins another document, and documents are isolated."""
        layout = None
        if positions is not None:
            positions = positions.expand_as(tokens)
            layout = TokenLayout(positions, (positions == 0).cumsum(dim=1))
        decoder = self.decoder
        hidden, _ = decoder.hidden(decoder.embed(tokens), layout, recompute=self.recompute)
        return decoder.logits(hidden)

    def verify_module_protocol(self) -> None:
        """Passes: the modules of a decoder are plain ones, and `init_states` sets all their values."""

    @torch.no_grad()
    def init_states(self, *, buffer_device: torch.device | None = None) -> None:
        """Sets every parameter to its initial value for the seed, whole or in parts."""
        for parameter, value in initial_values(self.decoder, self.seed):
            if isinstance(parameter, DTensor):
                placed = value.to(parameter.device, parameter.dtype)
                parameter.copy_(distribute_tensor(placed, parameter.device_mesh, parameter.placements))
            else:
                parameter.copy_(value)


OTHERS = {"tp": "tensor", "cp": "context", "pp": "pipeline", "ep": "expert"}
"""What this function does not do, by torchtitan's short names."""


def parallelize(
    model: TitanDecoder,
    *,
    parallel_dims: Any,
    training: Any,
    parallelism: Any,
    compile_config: Any,
    ac_config: Any,
    **others: Any,
) -> TitanDecoder:
    """Shards parameters over the data-parallel devices, and compiles or recomputes blocks where asked.

    Args:
        model: on the meta device.
        parallel_dims: the meshes.
        training: precisions.
        parallelism: not read beyond the meshes.
        compile_config: whether blocks are compiled.
        ac_config: anything but None has every block run again in the backward pass.
        others: not read.

    Raises:
        ConfigError: another parallelism, which is left to `twoaxis train`.
    """
    from torchtitan.config import TORCH_DTYPE_MAP

    for short, name in OTHERS.items():
        if getattr(parallel_dims, f"{short}_enabled"):
            allowed = "1 with models of this library"
            raise ConfigError(problem(f"{name} parallel degree", "> 1", allowed, "use data parallelism, or `twoaxis train`"))
    model.recompute = ac_config is not None
    if compile_config.enable and "model" in compile_config.components:
        for block in model.decoder.blocks:
            block.compile()
    axes = ["dp_replicate", "fsdp"] if parallel_dims.dp_replicate_enabled else ["fsdp"]
    precision = {"param_dtype": training.mixed_precision_param, "reduce_dtype": training.mixed_precision_reduce}
    policy = MixedPrecisionPolicy(
        **{name: TORCH_DTYPE_MAP[dtype] for name, dtype in precision.items()}, cast_forward_inputs=False
    )
    mesh = parallel_dims.get_mesh(axes)
    for module in (*model.decoder.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # The trainer has divided the loss by the tokens of all devices already.
            module.set_gradient_divide_factor(1.0)
    return model


def model_spec(decoder: DecoderConfig, seed: int = 0) -> ModelSpec:
    """The decoder as torchtitan's bundle of a model and how to spread it; its flavor is the depth mixer."""
    return ModelSpec(
        name="twoaxis",
        flavor=decoder.depth.kind,
        model=TitanDecoder.Config(decoder=decoder.to_data(), seed=seed),
        parallelize_fn=parallelize,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=None,
    )


def trainer_config(decoder: DecoderConfig, seed: int = 0, **fields: Any) -> Any:
    """A configuration of torchtitan's trainer: plain cross entropy over the logits, and no CUDA graphs.

    Args:
        decoder: the model.
        seed: of its initial values.
        fields: of `Trainer.Config`, such as `training`, `dataloader` or `hf_assets_path`, before these and its defaults.
    """
    # Here, since the trainer imports triton, which need not be there to define a run.
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.config import TrainingConfig
    from torchtitan.trainer import Trainer

    ours = {
        "model_spec": model_spec(decoder, seed),
        "loss": CrossEntropyLoss.Config(global_vocab_size=decoder.vocab_size),
        "training": TrainingConfig(seq_len=decoder.max_seq_len, disable_cuda_graphs=True),
    }
    return Trainer.Config(**{**ours, **fields})


SIZES: dict[str, Any] = {"vocab_size": 2048, "d_model": 256, "n_layers": 6, "max_seq_len": 2048}
"""A model that fits everywhere, for torchtitan's own small tokenizer."""


def plain() -> Any:
    """Attention, SwiGLU and the residual stream."""
    return trainer_config(DecoderConfig.from_data(SIZES))


def recommended_block() -> Any:
    """ShortSWA before attention in every block."""
    return trainer_config(DecoderConfig.from_data({**SIZES, "blocks": [["short_swa", "attention", "swiglu"]]}))


def deep_delta() -> Any:
    """Deep Delta Learning in the place of the residual stream."""
    return trainer_config(DecoderConfig.from_data({**SIZES, "depth": "deep_delta"}))
