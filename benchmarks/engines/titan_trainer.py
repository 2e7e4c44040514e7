"""A recipe of `twoaxis train` as a run of torchtitan's trainer, on the same batches."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC

from twoaxis import TokenLayout
from twoaxis.data import PackedSampler, prepare
from twoaxis.interop.torchtitan import optimizer_config, trainer_config
from twoaxis.train import TrainConfig


class Batches(BaseDataLoader):
    """The rows of this rank of every batch that `twoaxis train` reads."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """What to read.

        Attributes:
            recipe: data of a `TrainConfig`.
        """

        recipe: dict[str, Any] = field(default_factory=dict)

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, **others: Any) -> None:
        del others
        recipe, self.rank, self.ranks = TrainConfig.from_data(config.recipe), dp_rank, dp_world_size
        data = recipe.data
        prepared = prepare(data.corpus, data.tokenizer)
        options = (recipe.batch_size, data.seq_len, recipe.seed, data.packing, prepared.answer_cues)
        self.sampler = PackedSampler(prepared.train, *options)

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            batch = self.sampler.next().part(self.rank, self.ranks)
            given = {"input": batch.tokens}
            if batch.documents is not None:
                given["positions"] = TokenLayout.packed(batch.documents).positions
            yield given, batch.targets

    def state_dict(self) -> dict[str, Any]:
        """Where the reading stands."""
        return self.sampler.state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from there."""
        self.sampler.restore(state_dict)


class NoTokenizer(BaseTokenizer):
    """The batches are tokens already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """Has no options."""

    def __init__(self, config: Config, *, tokenizer_path: str) -> None:
        del config, tokenizer_path
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        """Not used."""
        raise NotImplementedError

    def decode(self, *args: Any, **kwargs: Any) -> str:
        """Not used."""
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        """Bytes."""
        return 256


def configuration(recipe: TrainConfig, case: dict[str, Any], folder: Path) -> Any:
    """The run of torchtitan that should equal the recipe."""
    decoder, replicate = recipe.decoder(vocab_size=256), case.get("replicate", 1)
    ranks = int(os.environ["WORLD_SIZE"])
    backend = {"spmd_backend": case["spmd_backend"]} if "spmd_backend" in case else {}
    export = {"initial_load_path": str(folder / "export"), "initial_load_in_hf": True} if "from_export" in case else {}
    return trainer_config(
        decoder,
        # Weights that are read from the export need not be right before.
        recipe.seed + len(export),
        dump_folder=str(folder / "theirs"),
        tokenizer=NoTokenizer.Config(),
        dataloader=Batches.Config(recipe=recipe.to_data()),
        # The fused optimizer takes no distributed tensors on CPUs.
        optimizer=optimizer_config(decoder, recipe.optimizer, implementation="foreach"),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=0, decay_ratio=0.0),
        training=TrainingConfig(
            local_batch_size=recipe.batch_size // ranks,
            seq_len=recipe.data.seq_len,
            max_norm=recipe.optimizer.clip_norm or float("inf"),
            steps=recipe.steps,
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(data_parallel_replicate_degree=replicate, data_parallel_shard_degree=-1, **backend),
        metrics=MetricsProcessor.Config(log_freq=1),
        checkpoint=CheckpointManager.Config(
            enable=True, interval=recipe.steps, last_save_model_only=True, last_save_in_hf=True, **export
        ),
        activation_checkpoint=FullAC.Config() if case.get("recompute") else None,
    )


def run(folder: Path, case: dict[str, Any]) -> list[list[float]]:
    """The loss and the gradient norm of every step."""
    recipe = TrainConfig.from_data(json.loads((folder / "recipe.json").read_text()))
    trainer, seen = configuration(recipe, case, folder).build(), list[list[float]]()

    def log(step: int, loss: float, largest: float, norm: float, **others: Any) -> None:
        seen.append([loss, norm])

    trainer.metrics_processor.log = log
    trainer.train()
    trainer.close()
    return seen
