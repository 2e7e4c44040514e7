"""Peak memory of the process and of the GPU."""

import contextlib
import sys
from pathlib import Path

import torch


def reset_peak() -> None:
    """Begins a new peak, so that runs in one process do not inherit each other's; only Linux and GPUs can."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()


def peak_bytes() -> int:
    """The largest resident memory of the process since the last reset, where it can be known, else 0."""
    try:
        import resource
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts in KiB, macOS in bytes.
    return peak if sys.platform == "darwin" else peak * 1024


def peak_device_bytes() -> int:
    """The largest memory allocated on the GPU since the last reset."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() and torch.cuda.is_initialized() else 0
