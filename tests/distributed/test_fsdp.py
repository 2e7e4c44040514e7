"""A13: every depth mixer can be sharded by two processes: one step, save, load, and the same loss as one process."""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

from twoaxis import DEPTH, Decoder, DecoderConfig
from twoaxis.core.parameters import initialise
from twoaxis.depth import DepthConfig

DEPTHS = {row.kind: row.example(next(iter(row.examples))) for row in DEPTH}
PROCESSES = 2


def build(depth: DepthConfig) -> Decoder:
    blocks = [[{"kind": "attention", "n_heads": 2}, "swiglu"]]
    return Decoder(DecoderConfig.from_data({"vocab_size": 11, "d_model": 8, "n_layers": 2, "depth": depth, "blocks": blocks}))


def shard(model: Decoder) -> Decoder:
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    # The loss is a second way into the model besides forward, and has to gather the parameters too.
    register_fsdp_forward_method(model, "loss")
    return model


def data() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.arange(2 * PROCESSES * 7).reshape(2 * PROCESSES, 7) * 5 % 11
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def losses_of_two_steps(model: Decoder, rank: int, processes: int) -> list[float]:
    """Takes a step on this rank's part of the data; returns the mean loss over all of it, before and after."""
    tokens, targets = (part.chunk(processes)[rank] for part in data())
    count = data()[1].numel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(2):
        total, _ = model.loss(tokens, targets)
        everywhere = total.detach().clone()
        if processes > 1:
            dist.all_reduce(everywhere)
        losses.append(everywhere.item() / count)
        # Sharded gradients are averaged over the processes, each of which has only its own sum.
        (total * processes / count).backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def whole_tensors(model: Decoder) -> dict[str, torch.Tensor]:
    return {name: parameter.full_tensor().detach() for name, parameter in model.named_parameters()}  # type: ignore[attr-defined]


def work(rank: int, folder: Path) -> None:
    """What each process does."""
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=PROCESSES)
    report = {}
    for name, depth in DEPTHS.items():
        model = build(depth)
        initialise(model, seed=0)
        losses = losses_of_two_steps(shard(model), rank, PROCESSES)
        tensors = whole_tensors(model)
        if rank == 0:
            save_file(tensors, folder / f"{name}.safetensors")
        dist.barrier()

        loaded = build(depth)
        loaded.load_state_dict(load_file(folder / f"{name}.safetensors"))
        shard(loaded)
        tokens, targets = (part.chunk(PROCESSES)[rank] for part in data())
        same = [(model.loss(tokens, targets)[0].item(), loaded.loss(tokens, targets)[0].item())]
        report[name] = {"losses": losses, "saved_and_loaded": same}
    if rank == 0:
        (folder / "report.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


def test_two_processes_do_what_one_does(tmp_path: Path) -> None:
    # Not on top, since the processes run this file as a script, which is in no package.
    from .processes import run_processes

    run_processes(Path(__file__), tmp_path, PROCESSES, timeout_seconds=300)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report.keys() == DEPTHS.keys()
    for name, depth in DEPTHS.items():
        model = build(depth)
        initialise(model, seed=0)
        expected = losses_of_two_steps(model, 0, 1)
        torch.testing.assert_close(report[name]["losses"], expected, rtol=1e-5, atol=0.0, msg=name)
        assert expected[1] < expected[0]
        assert all(saved == loaded for saved, loaded in report[name]["saved_and_loaded"]), name


def test_every_parameter_has_a_dimension_to_shard() -> None:
    for name, depth in DEPTHS.items():
        assert all(parameter.ndim >= 1 for parameter in build(depth).parameters()), name


if __name__ == "__main__":
    torch.set_num_threads(1)
    work(int(sys.argv[2]), Path(sys.argv[1]))
    # Without the end of the interpreter, which tears gloo's threads down and has aborted once all was done and written.
    os._exit(0)
