"""Folders of safetensors: one file, or shards with an index."""

from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from twoaxis.core.errors import CheckpointError
from twoaxis.core.text import decode_text, json_value

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON table.

    Raises:
        CheckpointError: it is missing, damaged or no table.
    """
    try:
        return parse_json(path.read_bytes(), str(path))
    except OSError as error:
        reason = error.strerror or error
        raise CheckpointError(f"{path}: cannot be read ({reason}); name the folder of a whole checkpoint") from None


def parse_json(content: bytes, where: str) -> dict[str, Any]:
    """Reads a JSON table from the content of a file.

    Raises:
        CheckpointError: it is damaged or no table.
    """
    text = decode_text(content, where, CheckpointError)
    try:
        data = json_value(text)
    except ValueError as error:
        raise CheckpointError(f"{where}: cannot be read ({error}); name the folder of a whole checkpoint") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{where}: must be a table; name the folder of a whole checkpoint")
    return data


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Reads every tensor of a folder, as it is stored.

    Raises:
        CheckpointError: no safetensors, a shard that is missing or damaged, or one that lacks what the index says it has.
    """
    tensors: dict[str, Tensor] = {}
    for name, expected in _files(folder).items():
        try:
            with safe_open(folder / name, framework="pt") as file:
                tensors.update({key: file.get_tensor(key) for key in file.keys()})  # noqa: SIM118, not a dict
        except (OSError, SafetensorError) as error:
            reason = getattr(error, "strerror", None) or error
            raise CheckpointError(f"{folder / name}: cannot be read ({reason}); fetch the file again") from None
        if missing := sorted(set(expected) - tensors.keys()):
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise CheckpointError(f"{folder / name}: lacks {missing[0]!r}{more}, which the index says it has; fetch it again")
    return tensors


def _files(folder: Path) -> dict[str, list[str]]:
    """The files with the tensors that an index promises in each; one file goes before an index, as in transformers."""
    if (folder / SINGLE).exists():
        return {SINGLE: []}
    if (folder / INDEX).exists():
        found: dict[str, list[str]] = {}
        weights = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weights, dict):
            raise CheckpointError(f"{folder / INDEX}: has no weight_map; fetch the file again")
        for key, name in weights.items():
            if Path(str(name)).name != name:
                raise CheckpointError(f"{folder / INDEX}: shard={name!r}: must be a file of the folder; fetch the index again")
            found.setdefault(name, []).append(key)
        return found
    other = sorted(path.name for path in folder.glob("*.bin")) if folder.is_dir() else []
    remedy = f"convert {other[0]}, a pickle, which is never read" if other else "name the folder of a checkpoint"
    raise CheckpointError(f"{folder}: must hold {SINGLE} or {INDEX}; {remedy}")
