"""One rank of runs of torchtitan's trainer on CPUs: `python -m benchmarks.engines.titan_rank FOLDER CASES`.

torchtitan is written for GPUs and for a newer torch. What it misses here is put in its place before it is imported: the kind of
device, the functions of a device module, and `torch.distributed.set_timeout`.
"""

import json
import os
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch._utils
import torch.distributed as dist


def stand_in_for_a_gpu() -> None:
    """Names the CPU as the device, and adds what torchtitan asks of a device module."""
    torch._utils._get_available_device_type = lambda: "cpu"  # type: ignore[assignment]
    cpu: Any = torch.cpu
    cpu.get_device_name = lambda device=None: "CPU"
    cpu.get_device_properties = lambda device=None: SimpleNamespace(total_memory=1 << 34, name="CPU")
    cpu.memory_stats = lambda device=None: {}
    cpu.reset_peak_memory_stats = cpu.empty_cache = lambda *given: None
    cpu.current_device = lambda: 0
    distributed: Any = dist
    distributed.set_timeout = lambda timeout, group=None: None
    barrier = dist.barrier
    # gloo takes no list of devices.
    distributed.barrier = lambda *given, device_ids=None, **others: barrier(*given, **others)


def main() -> None:
    """Trains every case, and writes the loss and the gradient norm of every step, or why there are none."""
    folder, cases = Path(sys.argv[1]), json.loads(sys.argv[2])
    torch.set_num_threads(1)
    stand_in_for_a_gpu()
    from benchmarks.engines.titan_trainer import run

    first = os.environ["RANK"] == "0"
    for name, case in cases.items():
        os.environ["MASTER_PORT"] = str(case["port"])
        try:
            losses = run(folder / name, case)
        except Exception as error:
            traceback.print_exc()
            if first:
                (folder / name / "error.txt").write_text(f"{type(error).__name__}: {' '.join(str(error).split())}"[:300])
        else:
            if first:
                (folder / name / "losses.json").write_text(json.dumps(losses))
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
