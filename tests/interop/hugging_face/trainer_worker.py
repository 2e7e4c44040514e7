"""One rank of Hugging Face Trainer, which trains every model by DDP and FSDP2, and saves it."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import twoaxis.hf  # noqa: F401, registers the models

ROWS, STEPS = 8, 3
MODELS = ("streams", "windows", "views")
FSDP2 = {
    "fsdp": True,
    "fsdp_config": {
        "version": 2,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": ["Block"],
        "state_dict_type": "FULL_STATE_DICT",
    },
}


class Rows(torch.utils.data.Dataset):
    """Random tokens, the same ones for the same index."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 40, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def trained(source: Path, out: Path, ranks: int, **options: Any) -> tuple[Trainer, list[list[float]]]:
    """Trains the model of a folder, with the same rows per step for any number of ranks; returns losses and norms."""
    arguments = TrainingArguments(
        output_dir=str(out),
        max_steps=STEPS,
        per_device_train_batch_size=ROWS // ranks,
        learning_rate=1e-2,
        logging_steps=1,
        report_to=[],
        save_strategy="steps",
        save_steps=STEPS,
        use_cpu=True,
        disable_tqdm=True,
        seed=0,
        **options,
    )
    if options.get("fsdp"):
        # Here, since this file is also collected where accelerate is absent.
        from accelerate.state import PartialState
        from accelerate.utils import DistributedType

        # Without a GPU accelerate takes no notice of `fsdp` and runs DDP.
        assert arguments.device.type == "cpu"
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    trainer = Trainer(model=AutoModelForCausalLM.from_pretrained(source), args=arguments, train_dataset=Rows())
    trainer.train()
    found = [[entry["loss"], entry["grad_norm"]] for entry in trainer.state.log_history if "loss" in entry]
    return trainer, found


def main(folder: Path, rank: int, ranks: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": (folder / "port").read_text()}
    found = {}
    for name in MODELS:
        ddp, found[f"{name}-ddp"] = trained(folder / name, folder / f"{name}-ddp", ranks)
        assert isinstance(ddp.model_wrapped, DistributedDataParallel)
        fsdp, found[f"{name}-fsdp"] = trained(folder / name, folder / f"{name}-fsdp", ranks, **FSDP2)
        model: Any = fsdp.model_wrapped
        units = [unit for unit in model.modules() if isinstance(unit, FSDPModule)]
        assert all(block in units for block in model.model.decoder.blocks), "every block is a unit of its own"
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()
