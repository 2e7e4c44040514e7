"""Where the numbers come from: the device, its driver, versions, and the commit of the code."""

import torch

from benchmarks.gpu.settings import Items, Row, Settings
from benchmarks.measure import header
from twoaxis.train.environment import describe_environment

GIB = 2**30


def items(settings: Settings) -> Items:
    """One item with a row per fact."""
    return {"environment": lambda: facts(settings)}


def facts(settings: Settings) -> list[Row]:
    """The facts, the device first."""
    found: dict[str, object] = {}
    if settings.on_gpu:
        properties = torch.cuda.get_device_properties(settings.device)
        found |= {
            "device": f"{properties.name}, {properties.total_memory / GIB:.0f} GiB, "
            f"{properties.multi_processor_count} multiprocessors, capability {properties.major}.{properties.minor}",
            "CUDA of torch": torch.version.cuda,
            "bfloat16": torch.cuda.is_bf16_supported(),
        }
    described = describe_environment(torch.device(settings.device), torch.bfloat16)
    found |= {key: described[key] for key in ("git_commit", "code", "kernels")} | described["versions"] | header()
    return [{"what": key, "value": str(value)} for key, value in found.items()]
