"""Everything that a run trains with, restored from its newest checkpoint, and validation on fixed batches."""

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from twoaxis.core.errors import DataError
from twoaxis.core.files import remove_drafts
from twoaxis.data import Batch, PackedSampler, PreparedData, prepare, validation_batches
from twoaxis.train.checkpoint import BackgroundWriter, remove_old, set_aside_newer
from twoaxis.train.environment import (
    PeakMemory,
    changed_environment,
    code_sha256,
    describe_environment,
    prepare_kernels,
)
from twoaxis.train.metrics import MetricsLog, UnwrittenMetrics
from twoaxis.train.optim import build_optimizer, group_table, parameter_groups
from twoaxis.train.parallel.placement import placement_of
from twoaxis.train.parallel.ranks import Ranks
from twoaxis.train.progress import Progress
from twoaxis.train.recipe import TrainConfig
from twoaxis.train.run_folder import RunFolder
from twoaxis.train.schedule import Annealing
from twoaxis.train.step import StepOutcome, take_step
from twoaxis.train.token_loss import choose_device, rows_at_once
from twoaxis.train.training_state import random_state, restore_random_state


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
    total: Callable[[Tensor], Tensor] = lambda value: value,
) -> Validation:
    """Computes the mean loss over batches from summed token losses, and the accuracy from `hits` for a corpus with answers.

    Args:
        token_loss: the summed loss of a batch.
        batches: the validation batches.
        data: their corpus.
        hits: the number of right answers of a batch.
        total: makes a number that of all processes.

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
    loss = float(total(torch.stack([token_loss(batch) for batch in batches]).cpu().double().sum())) / tokens
    accuracy = None
    if hits is not None and data.answer_cues:
        accuracy = int(total(torch.stack([hits(batch) for batch in batches]).cpu().sum())) / tokens
    packing = "joined" if batches[0].documents is None else "isolated"
    return Validation(loss, data.bits_per_byte(loss, packing), tokens, accuracy)


class Trainer:
    """The model, data and optimizer of a run, restored from its newest intact checkpoint.

    Attributes:
        config: the recipe.
        folder: of the run.
        progress: progress callbacks.
        step: steps taken.
        tokens_per_step: tokens read in a step.
        earlier_peak: memory of the processes before this one.
        placement: what this process holds of model, batches and checkpoints.

    Raises:
        ConfigError: a recipe that cannot be run here.
        DataError: a corpus or tokenizer that cannot be used.
        CheckpointError: a folder of another run, or no intact checkpoint among several.
    """

    def __init__(self, config: TrainConfig, folder: RunFolder, progress: Progress, ranks: Ranks | None = None) -> None:
        ranks = ranks or Ranks()
        self.config, self.folder, self.progress = config, folder, progress
        self.placement, self.ranks = placement_of(ranks), ranks
        self.rows = ranks.each(lambda: rows_at_once(config))
        device = ranks.device or ranks.each(lambda: choose_device(config.device))
        self.data = self._prepare()
        decoder = ranks.each(lambda: config.decoder(self.data.tokenizer.vocab_size))
        torch.manual_seed(config.seed)
        self.model = self.placement.build(config, decoder, device)
        whole = self.placement.whole(self.model)
        groups = ranks.each(lambda: parameter_groups(whole, config.parameter_options))
        self.annealing = ranks.each(
            lambda: Annealing(self.model, config.anneal, [name for name, _ in whole.named_parameters()])
        )
        # After the data and the model, so that an error above leaves the folder free.
        ranks.first(self._claim)
        local, wholes = self.placement.local, self.placement.of_wholes
        self.optimizer = ranks.each(lambda: build_optimizer(local(groups, self.model), config.optimizer, wholes))
        self.token_loss = self.placement.losses(self.model, config)
        self.tokens_per_step = config.batch_size * config.data.seq_len
        self.step, self.earlier_peak = 0, PeakMemory(0, 0)
        self._noted_empty = False
        ranks.first(lambda: self._describe(group_table(groups)))
        self._resume()

    def take_step(self, multiplier: float) -> StepOutcome:
        """Takes the next step at the full learning rate times the multiplier."""
        self.annealing.set(self.step)
        outcome = take_step(
            self.placement,
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
        rows, loss = self.placement.rows, self.token_loss
        measured = evaluate(
            lambda batch: loss.evaluate(rows(batch)),
            self.validation,
            self.data,
            lambda batch: loss.hits(rows(batch)),
            self.ranks.sum,
        )
        self.placement.end_validation(self.model)
        return measured

    def save(self) -> None:
        """Writes a checkpoint.

        Raises:
            CheckpointError: the disk is full or cannot be written; earlier checkpoints are unchanged.
        """
        # Before anything is copied, so that there are never two copies.
        self._writer.finish()
        self.ranks.first(self.metrics.sync)
        losses = [record.validation_loss for record in self.metrics.records if record.validation_loss is not None]
        state = {
            "schedule_step": self.step,
            "sampler": self.sampler.state(),
            "random": random_state(),
            "best_validation_loss": min(losses, default=None),
            **self.peak._asdict(),
        }
        folder, keep = self.folder.checkpoints, self.config.keep_checkpoints
        background = self.config.parallel.saving == "background"
        write = self.placement.checkpoint(folder, self.step, self.model, self.optimizer, state, keep, copied=background)
        (self._writer.start if background else self._writer.run)(write, self.step)

    def finish_saving(self) -> None:
        """Waits for a checkpoint that is being written in the background.

        Raises:
            CheckpointError: it could not be written.
        """
        self._writer.finish()

    def abandon_saving(self) -> None:
        """Waits, not for ever, for a checkpoint that is being written when the run ends by an error."""
        self._writer.abandon(self.config.parallel.timeout_seconds)

    @property
    def peak(self) -> PeakMemory:
        """The peak memory of this process and those before it."""
        return PeakMemory(*map(max, self.earlier_peak, PeakMemory.now()))

    @property
    def saved_step(self) -> int:
        """The step of the newest complete checkpoint, 0 without one."""
        return self._writer.saved_step

    def _prepare(self) -> PreparedData:
        """Reads the data, which must be the same on all ranks, and the windows of training and validation."""
        config, data, ranks = self.config, self.config.data, self.ranks
        tokenizer = data.tokenizer.in_run_folder(self.folder.path)
        prepared = ranks.in_turn(lambda: prepare(data.corpus, tokenizer, progress=self.progress.preparing))
        ranks.check_same(
            {
                "recipe": hashlib.sha256(json.dumps(config.to_data(), sort_keys=True).encode()).hexdigest()[:12],
                "corpus": prepared.train.header.corpus[:12],
                "tokenizer": prepared.train.header.tokenizer[:12],
                "torch version": torch.__version__,
                "code of twoaxis": code_sha256()[:12],
            }
        )
        cues = prepared.answer_cues
        self.sampler = ranks.each(
            lambda: PackedSampler(prepared.train, config.batch_size, data.seq_len, config.seed, data.packing, cues)
        )
        rows, tokens = self.rows * config.parallel.data_ranks, config.validation_tokens
        self.validation = ranks.each(
            lambda: validation_batches(prepared.validation, rows, data.seq_len, tokens, data.packing, cues)
        )
        return prepared

    def _claim(self) -> None:
        self.folder.claim(self.config, self.data)
        self.folder.write_once("initial_parameters", self.placement.initial_sha256)

    def _resume(self) -> None:
        ranks, folder = self.ranks, self.folder.checkpoints
        ranks.first(lambda: remove_drafts(folder))
        restored = self.placement.restore(folder, self.model, self.optimizer, self.progress.note)
        if restored is not None:
            self.step, state = restored
            self.progress.note(f"{self.folder.path}: resuming after step {self.step}")
            # The checkpoint of an imported model has nothing but weights.
            if "sampler" in state:
                ranks.each(lambda: self.sampler.restore(state["sampler"]))
                restore_random_state(state["random"])
                # Older checkpoints do not count the memory of the GPU.
                self.earlier_peak = PeakMemory(*(state.get(name, 0) for name in PeakMemory._fields))
        self._writer = BackgroundWriter(self.step)
        self.metrics = ranks.each(self._metrics)
        ranks.first(lambda: set_aside_newer(folder, self.step))
        # After an intact one is found: a process that was killed may have left more than `keep_checkpoints`.
        ranks.first(lambda: remove_old(folder, self.config.keep_checkpoints))

    def _metrics(self) -> MetricsLog | UnwrittenMetrics:
        return MetricsLog(self.folder.metrics, self.step) if self.ranks.is_first else UnwrittenMetrics()

    def _describe(self, groups: str) -> None:
        for remark in self.data.remarks:
            self.progress.note(remark)
        read, wanted = sum(batch.tokens.numel() for batch in self.validation), self.config.validation_tokens
        if read < wanted:
            has = f"the validation text has {read:,} tokens in whole windows"
            self.progress.note(f"validation_tokens={wanted:,}: {has}; all of them are read")
        for one in self.config.anneal:
            if (last := one.value(self.config.steps - 1)) != one.stop:
                takes = f"takes {one.begin + one.steps + 1} steps to reach {one.stop:g}, and the run has {self.config.steps}"
                self.progress.note(f"anneal pattern {one.pattern!r}: {takes}; the last value is {last:g}")
        prepare_kernels(self.token_loss.device, self.progress.note)
        environment = describe_environment(self.token_loss.device, self.token_loss.dtype, self.ranks.count)
        self.folder.write_once("env", environment)
        changes = changed_environment(self.folder.read("env"), environment)
        if changes:
            self.progress.note(f"not the environment the run began in, so its last digits may differ: {', '.join(changes)}")
        self.progress.note(groups)
        self.progress.note(
            f"device {environment['device']}, {environment['precision']}, {environment['threads']} threads, "
            + (f"{self.ranks.count} processes, " if self.ranks.count > 1 else "")
            + f"compile {self.config.compile}"
            + ("; the first step compiles" if self.config.compile != "off" else "")
        )
