"""Everything that a run trains with, restored from its newest checkpoint, and validation on fixed batches."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from twoaxis.core.errors import DataError
from twoaxis.core.files import remove_drafts
from twoaxis.data import Batch, PackedSampler, PreparedData, prepare, validation_batches
from twoaxis.model import Decoder
from twoaxis.train.checkpoint import Checkpoint, load_newest, remove_old, save_checkpoint, set_aside_newer
from twoaxis.train.environment import changed_environment, describe_environment, peak_bytes
from twoaxis.train.metrics import MetricsLog
from twoaxis.train.optim import build_optimizer, group_table, parameter_groups
from twoaxis.train.progress import Progress
from twoaxis.train.recipe import TrainConfig
from twoaxis.train.run_folder import RunFolder, lengthen
from twoaxis.train.schedule import Annealing
from twoaxis.train.step import StepOutcome, TokenLoss, choose_device, rows_at_once, take_step
from twoaxis.train.training_state import (
    model_tensors,
    optimizer_tensors,
    parameters_sha256,
    random_state,
    restore_model,
    restore_optimizer,
    restore_random_state,
)


class Validation(NamedTuple):
    """The measurements of a validation.

    Attributes:
        loss: mean over the valid tokens in nats per token.
        bpb: the same loss in bits per byte of text.
        tokens: valid tokens.
        accuracy: fraction of the valid tokens that are the model's most likely ones; None for a corpus without answers.
    """

    loss: float
    bpb: float
    tokens: int
    accuracy: float | None = None


def evaluate(
    token_loss: Callable[[Batch], Tensor],
    batches: Sequence[Batch],
    data: PreparedData,
    hits: Callable[[Batch], Tensor] | None = None,
) -> Validation:
    """Computes the mean loss over batches from summed token losses, and the accuracy from `hits` for a corpus with answers.

    Raises:
        DataError: the batches have no valid target.
    """
    tokens = sum(batch.n_targets for batch in batches)
    if not tokens:
        raise DataError(
            "validation has no valid target: every next token belongs to another document; "
            "use longer documents or data.packing=joined"
        )
    # In float64, so that many batches lose no digits.
    loss = float(torch.stack([token_loss(batch) for batch in batches]).cpu().double().sum()) / tokens
    accuracy = None
    if hits is not None and data.answer_cues:
        accuracy = int(torch.stack([hits(batch) for batch in batches]).sum()) / tokens
    return Validation(loss, data.bits_per_byte(loss), tokens, accuracy)


class Trainer:
    """The model, data and optimizer of a run, restored from its newest intact checkpoint.

    Attributes:
        config: the recipe.
        folder: of the run.
        progress: progress callbacks.
        step: steps taken.
        saved_step: the step of the newest checkpoint, 0 when there is none.
        tokens_per_step: tokens read in a step.
        earlier_peak_bytes: the largest resident memory of the processes before this one.

    Raises:
        ConfigError: a recipe that cannot be run here.
        DataError: a corpus or tokenizer that cannot be used.
        CheckpointError: a folder of another run, or no intact checkpoint among several.
    """

    def __init__(self, config: TrainConfig, folder: RunFolder, progress: Progress) -> None:
        self.config, self.folder, self.progress = config, folder, progress
        data, rows, device = config.data, rows_at_once(config), choose_device(config.device)
        self.data = prepare(data.corpus, data.tokenizer.in_run_folder(folder.path), progress=progress.preparing)
        self.rows = rows
        cues, held_out = self.data.answer_cues, self.data.validation
        self.sampler = PackedSampler(self.data.train, config.batch_size, data.seq_len, config.seed, data.packing, cues)
        self.validation = validation_batches(held_out, rows, data.seq_len, config.validation_tokens, data.packing, cues)
        torch.manual_seed(config.seed)
        self.model = Decoder.build(config.decoder(self.data.tokenizer.vocab_size), config.seed)
        options = (*config.optimizer.groups, *(anneal.group for anneal in config.anneal))
        groups = parameter_groups(self.model, config.optimizer.replace(groups=options))
        self.annealing = Annealing(self.model, config.anneal)
        # After the data and the model, so that an error above leaves the shorter run unchanged.
        lengthen(folder, config, progress)
        folder.claim(config, self.data)
        folder.write_once("initial_parameters", parameters_sha256(self.model))
        self.model.to(device)
        self.optimizer = build_optimizer(groups, config.optimizer)
        self.token_loss = TokenLoss(self.model, config)
        self.tokens_per_step = config.batch_size * data.seq_len
        self.step = self.saved_step = self.earlier_peak_bytes = 0
        self._noted_empty = False
        self._describe(group_table(groups))
        self._resume()

    def take_step(self, multiplier: float) -> StepOutcome:
        """Takes the next step at the full learning rate times the multiplier."""
        self.annealing.set(self.step)
        outcome = take_step(
            self.token_loss,
            self.optimizer,
            self.sampler.next(),
            rows=self.rows,
            multiplier=multiplier,
            clip_norm=self.config.optimizer.clip_norm,
        )
        self.step += 1
        if not outcome.tokens and not self._noted_empty:
            self._noted_empty = True
            self.progress.note(
                f"step {self.step}: no token of the batch carries a loss, so it counts as 0 tokens with loss 0 (said once); "
                "use longer documents or data.packing=joined"
            )
        return outcome

    def validate(self) -> Validation:
        """Measures loss, and accuracy for a corpus with answers, on the validation batches."""
        return evaluate(self.token_loss.evaluate, self.validation, self.data, self.token_loss.hits)

    def save(self) -> None:
        """Writes a checkpoint.

        Raises:
            CheckpointError: the disk is full or cannot be written; earlier checkpoints are unchanged.
        """
        self.metrics.sync()
        losses = [record.validation_loss for record in self.metrics.records if record.validation_loss is not None]
        state = {
            "schedule_step": self.step,
            "sampler": self.sampler.state(),
            "random": random_state(),
            "best_validation_loss": min(losses, default=None),
            "peak_memory_bytes": max(self.earlier_peak_bytes, peak_bytes()),
        }
        checkpoint = Checkpoint(self.step, model_tensors(self.model), optimizer_tensors(self.model, self.optimizer), state)
        save_checkpoint(self.folder.checkpoints, checkpoint, self.config.keep_checkpoints)
        self.saved_step = self.step

    def _resume(self) -> None:
        remove_drafts(self.folder.checkpoints)
        checkpoint = load_newest(self.folder.checkpoints, self.progress.note)
        if checkpoint is not None:
            restore_model(self.model, checkpoint.model)
            self.step = self.saved_step = checkpoint.step
            self.progress.note(f"{self.folder.path}: resuming after step {self.step}")
        # The checkpoint of an imported model has nothing but weights.
        if checkpoint is not None and "sampler" in checkpoint.state:
            restore_optimizer(self.model, self.optimizer, checkpoint.optimizer)
            self.sampler.restore(checkpoint.state["sampler"])
            restore_random_state(checkpoint.state["random"])
            self.earlier_peak_bytes = checkpoint.state["peak_memory_bytes"]
        self.metrics = MetricsLog(self.folder.metrics, self.step)
        set_aside_newer(self.folder.checkpoints, self.step)
        # After an intact one is found: a process that was killed may have left more than `keep_checkpoints`.
        remove_old(self.folder.checkpoints, self.config.keep_checkpoints)

    def _describe(self, groups: str) -> None:
        for remark in self.data.remarks:
            self.progress.note(remark)
        read, wanted = sum(batch.tokens.numel() for batch in self.validation), self.config.validation_tokens
        if read < wanted:
            has = f"the validation text has {read:,} tokens in whole windows"
            self.progress.note(f"validation_tokens={wanted:,}: {has}; all of them are read")
        environment = describe_environment(self.token_loss.device, self.token_loss.dtype)
        self.folder.write_once("env", environment)
        changes = changed_environment(self.folder.read("env"), environment)
        if changes:
            self.progress.note(f"not the environment the run began in, so its last digits may differ: {', '.join(changes)}")
        self.progress.note(groups)
        self.progress.note(
            f"device {environment['device']}, {environment['precision']}, {environment['threads']} threads, "
            f"compile {self.config.compile}" + ("; the first step compiles" if self.config.compile != "off" else "")
        )
