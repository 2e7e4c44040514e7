"""The state of a model, its optimizer and torch's random generators: read for a checkpoint, and restored from one."""

import base64
import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from twoaxis.core.errors import CheckpointError


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The parameters by name, on the CPU."""
    return {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}


@torch.no_grad()
def restore_model(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copies tensors into the parameters.

    Raises:
        CheckpointError: a parameter that is missing, unknown, or of another shape or dtype.
    """
    parameters = dict(model.named_parameters())
    compare_names(parameters, tensors)
    for name, parameter in parameters.items():
        compare("parameter", name, tensors[name], parameter)
        parameter.copy_(tensors[name])


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer state by `kind/name of the parameter`, on the CPU."""
    return {
        f"{kind}/{name}": value.detach().cpu()
        for name, parameter in model.named_parameters()
        for kind, value in optimizer.state.get(parameter, {}).items()
    }


def restore_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Sets the optimizer state; parameters without saved state start without one.

    Raises:
        CheckpointError: state of an unknown parameter, or of another shape.
    """
    parameters = dict(model.named_parameters())
    optimizer.state.clear()
    for key, value in tensors.items():
        kind, _, name = key.partition("/")
        if name not in parameters:
            raise CheckpointError(f"checkpoint has optimizer state of the unknown parameter {name!r}; use the run's own model")
        parameter = parameters[name]
        if value.ndim:
            compare("optimizer state", key, value, parameter)
        # Copied into memory that torch allocates: kernels may round differently at the alignment of the file.
        fresh = torch.empty_like(value, device=parameter.device if optimizer.defaults["fused"] or value.ndim else "cpu")
        optimizer.state[parameter][kind] = fresh.copy_(value)


def random_state() -> dict[str, str]:
    """The state of torch's random generators on every device in use."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states |= {f"cuda:{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}
    return {device: base64.b64encode(state.numpy().tobytes()).decode() for device, state in states.items()}


def restore_random_state(states: Mapping[str, str]) -> None:
    """Sets the random generators; GPUs that this machine does not have are skipped."""
    for device, text in states.items():
        state = torch.from_numpy(np.frombuffer(base64.b64decode(text), dtype=np.uint8).copy())
        if device == "cpu":
            torch.set_rng_state(state)
        elif torch.cuda.is_available() and torch.device(device).index < torch.cuda.device_count():
            torch.cuda.set_rng_state(state, device)


def parameters_sha256(model: nn.Module) -> dict[str, str]:
    """The SHA-256 of every parameter by name."""
    return {name: tensor_sha256(tensor) for name, tensor in model_tensors(model).items()}


def tensor_sha256(tensor: Tensor) -> str:
    """The SHA-256 of the dtype, shape and bytes of a tensor on the CPU."""
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
    digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def compare_names(here: Mapping[str, Any], there: Mapping[str, Any]) -> None:
    """Compares the names of the parameters of a model with those of a checkpoint.

    Raises:
        CheckpointError: one is missing or unknown.
    """
    missing, unknown = sorted(here.keys() - there.keys()), sorted(there.keys() - here.keys())
    if missing or unknown:
        differs = f"lacks {missing[0]!r}" if missing else f"has the unknown {unknown[0]!r}"
        more = f" (and {len(missing) + len(unknown) - 1} more differ)" if len(missing) + len(unknown) > 1 else ""
        raise CheckpointError(f"checkpoint {differs}{more}; it belongs to another model; use the run's own configuration")


def compare(what: str, name: str, there: Tensor, here: Tensor) -> None:
    """Compares shape and dtype of a tensor in a checkpoint with those of the model.

    Raises:
        CheckpointError: one differs.
    """
    if there.shape != here.shape or there.dtype != here.dtype:
        raise CheckpointError(
            f"checkpoint {what} {name!r} is {_kind(there)}; must be {_kind(here)}; use the run's own configuration"
        )


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
