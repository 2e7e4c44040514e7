"""Models of this library in torchtitan's trainer: `torchtitan.train --module my.runs --config small`.

`my/runs.py` holds a function that says what to train:

    def small():
        return trainer_config(DecoderConfig(vocab_size=32_000, d_model=512, n_layers=8, depth="deep_delta"))

`--module twoaxis.interop.torchtitan` has three such functions for torchtitan's own small tokenizer: `plain`,
`recommended_block` and `deep_delta`.

Written for torchtitan 0.3.0, whose interfaces still move. Parameters are divided as in `twoaxis train`, parameter groups come
from the declarations of the model, and checkpoints can be written and read under the names of our Hugging Face exports. Its own
trainer was run on two processes with gloo; docs/engines.md says on what, and that losses equalled those of `twoaxis train`.

Letters: B batch, T position, V vocabulary.
"""

import importlib.util
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from twoaxis.core.errors import ConfigError, problem

if importlib.util.find_spec("torchtitan") is None:
    raise ConfigError("torchtitan is not installed: must be there for its trainer; pip install 'torchtitan==0.3.0'")

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torchtitan.protocols.model import BaseModel
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.state_dict_adapter import StateDictAdapter

from twoaxis.core.cost import Shape
from twoaxis.core.layout import TokenLayout
from twoaxis.core.parameters import initial_values
from twoaxis.model import Decoder, DecoderConfig
from twoaxis.model.cost import decoder_cost
from twoaxis.planner.ledger import BACKWARD
from twoaxis.train.optim import OptimizerConfig, parameter_groups
from twoaxis.train.parallel.sharding import divide, local_part


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
        hidden, _ = decoder.hidden(decoder.embed(tokens), layout, recompute=self.recompute, tokens=tokens)
        return decoder.logits(hidden)

    def verify_module_protocol(self) -> None:
        """Passes: the modules of a decoder are plain ones, and `init_states` sets all their values."""

    @torch.no_grad()
    def init_states(self, *, buffer_device: torch.device | None = None) -> None:
        """Sets every parameter to its initial value for the seed, whole or in parts."""
        for parameter, value in initial_values(self.decoder, self.seed):
            if isinstance(parameter, DTensor):
                parameter.to_local().copy_(local_part(value, parameter))
            else:
                parameter.copy_(value)


OTHERS = {"tp": "tensor", "cp": "context", "pp": "pipeline", "ep": "expert"}
"""What this function does not do, by torchtitan's short names."""

SHARD_AXES = {"spmd_types": "dp_shard", "partial_dtensor": "fsdp"}
"""The axis of a mesh that divides parameters, by `parallelism.spmd_backend`; the other backend passes distributed tokens."""


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
        ConfigError: another parallelism, which is left to `twoaxis train`, or `spmd_backend="full_dtensor"`.
    """
    from torchtitan.config import TORCH_DTYPE_MAP

    for short in OTHERS:
        if getattr(parallel_dims, f"{short}_enabled"):
            raise _unsupported(short)
    model.recompute = ac_config is not None
    if compile_config.enable and "model" in compile_config.components:
        for block in model.decoder.blocks:
            block.compile()
    precision = {"param_dtype": training.mixed_precision_param, "reduce_dtype": training.mixed_precision_reduce}
    policy = MixedPrecisionPolicy(
        **{name: TORCH_DTYPE_MAP[dtype] for name, dtype in precision.items()}, cast_forward_inputs=False
    )
    # The trainer has divided the loss by the tokens of all devices already, so gradients are sums.
    divide(model, model.decoder.blocks, data_mesh(parallel_dims), policy)
    return model


def pipeline(*args: Any, **others: Any) -> Any:
    """Refuses: the trainer calls schedules with `arg_mbs`, which those of torch 2.13 do not have.

    Raises:
        ConfigError: always.
    """
    raise _unsupported("pp")


def data_mesh(parallel_dims: Any) -> DeviceMesh:
    """The devices that divide parameters and the rows of a batch.

    Raises:
        ConfigError: a backend that passes distributed tensors through the model.
    """
    backend = parallel_dims.spmd_backend
    if backend not in SHARD_AXES:
        allowed = " or ".join(f"'{name}'" for name in SHARD_AXES)
        raise ConfigError(problem("parallelism.spmd_backend", backend, allowed, "models of this library take plain tensors"))
    replicate = ["dp_replicate"] if parallel_dims.dp_replicate_enabled else []
    return parallel_dims.get_mesh([*replicate, SHARD_AXES[backend]])


def _unsupported(short: str) -> ConfigError:
    allowed = "1 with models of this library"
    return ConfigError(problem(f"{OTHERS[short]} parallel degree", "> 1", allowed, "use data parallelism, or `twoaxis train`"))


PREFIX, HEAD = "decoder.", "decoder.head.weight"
THEIR_PREFIX, THEIR_HEAD = "model.decoder.", "lm_head.weight"


class HuggingFaceNames(StateDictAdapter):
    """Weights under the names of our Hugging Face exports; `checkpoint.last_save_in_hf` writes them so."""

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Renames the weights of a `TitanDecoder`."""
        return {
            THEIR_HEAD if name == HEAD else THEIR_PREFIX + name.removeprefix(PREFIX): value
            for name, value in state_dict.items()
        }

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """Renames the weights of an export; a head that is the embedding is not among ours."""
        tied = self.model_config.decoder_config.tie_embeddings
        return {
            HEAD if name == THEIR_HEAD else PREFIX + name.removeprefix(THEIR_PREFIX): value
            for name, value in hf_state_dict.items()
            if not (tied and name == THEIR_HEAD)
        }


def optimizer_config(decoder: DecoderConfig, optimizer: OptimizerConfig | None = None, **fields: Any) -> Any:
    """AdamW as torchtitan configures it, with the groups of `twoaxis train`: norms, biases, gates and mixing do not decay.

    Args:
        decoder: the model.
        optimizer: rates and options by parameter name; `clip_norm` is torchtitan's `training.max_norm`.
        fields: of `OptimizersContainer.Config`, such as `implementation`.

    Raises:
        ConfigError: a pattern that matches no parameter, a group that is frozen, which torchtitan cannot leave out, or Muon.
    """
    from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

    optimizer = optimizer or OptimizerConfig()
    if optimizer.kind != "adamw":
        raise ConfigError(problem("optimizer.kind", optimizer.kind, "'adamw' in torchtitan", "train with `twoaxis train`"))
    with torch.device("meta"):
        groups = parameter_groups(Decoder(decoder), optimizer)
    patterns = _patterns([list(group.parameters) for group in groups])
    configured = []
    for group, pattern in zip(groups, patterns, strict=True):
        if not group.lr_scale:
            frozen = next(iter(group.parameters))
            raise ConfigError(problem(f"lr_scale of {frozen!r}", 0, "> 0 in torchtitan", "freeze it with `twoaxis train`"))
        options = {"lr": optimizer.lr * group.lr_scale, "betas": optimizer.betas, "eps": group.eps}
        options["weight_decay"] = group.weight_decay
        configured.append(ParamGroupConfig(pattern=pattern, optimizer_name="AdamW", optimizer_kwargs=options))
    return OptimizersContainer.Config(param_groups=configured, **fields)


def _patterns(groups: list[list[str]]) -> list[str]:
    """A regular expression for the parameters of each group; names that differ in numbers only become one where they may."""
    members = Counter(form for names in groups for form in {_numberless(name) for name in names})

    def forms(names: list[str]) -> Iterator[str]:
        for name in names:
            form = _numberless(name)
            yield form if members[form] == 1 else re.escape(name)

    return [f"^{re.escape(PREFIX)}(?:{'|'.join(dict.fromkeys(forms(names)))})$" for names in groups]


def _numberless(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\\\.)", r"\\d+", re.escape(name))


def model_spec(decoder: DecoderConfig, seed: int = 0) -> ModelSpec:
    """The decoder as torchtitan's bundle of a model and how to spread it; its flavor is the depth mixer."""
    return ModelSpec(
        name="twoaxis",
        flavor=decoder.depth.kind,
        model=TitanDecoder.Config(decoder=decoder.to_data(), seed=seed),
        parallelize_fn=parallelize,
        pipelining_fn=pipeline,
        post_optimizer_build_fn=None,
        state_dict_adapter=HuggingFaceNames,
    )


def trainer_config(decoder: DecoderConfig, seed: int = 0, **fields: Any) -> Any:
    """A configuration of torchtitan's trainer: cross entropy over the logits, our parameter groups, and no CUDA graphs.

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
        "optimizer": optimizer_config(decoder),
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
