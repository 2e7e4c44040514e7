"""How torchtitan spreads a decoder over devices: fully sharded data parallelism, block by block."""

from typing import Any

from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from twoaxis.core.errors import ConfigError, problem
from twoaxis.interop.torchtitan.model import TitanDecoder

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
