"""The audit of a run: measures a sample of its validation text and writes one file."""

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from twoaxis.audit.ablation import Removal, removals
from twoaxis.audit.observe import Observer
from twoaxis.audit.open_loop import Probe, Sample, check_loop, run_pass, sequence_losses
from twoaxis.audit.result import Ablation, Audit, AuditedSublayer, Effort, Routing
from twoaxis.audit.routing import rounded
from twoaxis.audit.summary import attention_of, gates_of, norms_of, routing_note, streams_of
from twoaxis.audit.token_classes import token_classes
from twoaxis.core.errors import CheckpointError, ConfigError, DataError, problem
from twoaxis.data import Batch, Tokenizer, prepare, validation_batches
from twoaxis.model import Decoder
from twoaxis.ops.cross_entropy import linear_cross_entropy
from twoaxis.train import Progress, load_trained
from twoaxis.train.run_folder import RunFolder

TOKENS = 8192
"""The default size of a sample."""

TOKENS_AT_ONCE = 1024
"""Bounds the memory to the depth states of one batch of this size, or of one longer window."""

FILE = "audit"
"""The name of the file in a run folder, without its suffix."""

OnProgress = Callable[[str, int, int], None]
"""Progress callback: stage, done, total."""


def audit_run(
    run: Path | str, tokens: int = TOKENS, seed: int = 0, progress: Progress | None = None, step: int | None = None
) -> Audit:
    """Audits a checkpoint of a run on its own validation text, and writes `audit.json` into its folder.

    Args:
        run: the folder of a run.
        tokens: to read, rounded up to whole windows.
        seed: of random changes and of the random sources.
        progress: progress callbacks, optional.
        step: of the checkpoint; None audits the newest.

    Raises:
        CheckpointError: no run folder, a missing or damaged checkpoint, or a diverged run.
        DataError: the corpus of the run cannot be read, or has changed.
        ConfigError: fewer than one token, or a model that does not follow the depth contract.
    """
    if tokens < 1:
        raise ConfigError(problem("tokens", tokens, "at least 1", "leave it out to read a few thousand"))
    folder = RunFolder(run)
    result = folder.result
    if result is not None and result.status == "diverged":
        raise CheckpointError(f"run folder {folder.path}: its run has diverged; must be sound; audit another run")
    progress = progress or Progress()
    trained = load_trained(run, step)
    data = trained.config.data
    prepared = prepare(data.corpus, data.tokenizer.in_run_folder(folder.path), progress=progress.preparing)
    _check_corpus(folder, prepared.to_data())
    rows = max(1, TOKENS_AT_ONCE // data.seq_len)
    batches = validation_batches(prepared.validation, rows, data.seq_len, tokens, data.packing, prepared.answer_cues)
    found = audit_model(trained.model, batches, trained.tokenizer, step=trained.step, seed=seed, progress=progress.preparing)
    folder.write(FILE, found.to_data())
    return found


def read_audit(run: Path | str) -> Audit | None:
    """Reads the audit of a run folder; None when the run has not been audited.

    Raises:
        CheckpointError: the file is damaged, or has another format.
    """
    folder = RunFolder(run)
    if not (path := folder.path / f"{FILE}.json").exists():
        return None
    try:
        return Audit.from_data(folder.read(FILE))
    except ConfigError as error:
        raise CheckpointError(f"{path}: is no audit of this version ({error}); audit the run again") from None


def audit_model(
    model: Decoder,
    batches: Sequence[Batch],
    tokenizer: Tokenizer,
    *,
    step: int = 0,
    seed: int = 0,
    progress: OnProgress | None = None,
) -> Audit:
    """Audits a model on given batches: a measured pass, a backward pass, and one pass per removal and control.

    Args:
        model: on the CPU; it is not changed.
        batches: of validation text; the depth states of one at a time are kept.
        tokenizer: decodes tokens.
        step: recorded in the audit.
        seed: of random changes and of random sources.
        progress: progress callback, optional.

    Raises:
        ConfigError: a loss that is not finite, or a model that does not follow the depth contract.
        DataError: no token has a loss.
    """
    progress = progress or (lambda stage, done, total: None)
    targets = sum(batch.n_targets for batch in batches)
    if not targets:
        raise DataError("the sample holds no target; must hold one; read more tokens")
    check_loop(model, Sample.of(batches[0]))
    clock = _Clock()
    classes = token_classes((batch.tokens for batch in batches), tokenizer, model.config.vocab_size)
    observer = Observer(model, classes)
    losses = []
    for number, batch in enumerate(batches):
        losses.append(observer.observe(Sample.of(batch)))
        progress("measuring", number + 1, len(batches))
    observe_seconds = clock.lap()
    for batch in batches:
        _add_gradients(observer, Sample.of(batch))
    gradient_seconds = clock.lap()
    routing = observer.routing.result()
    removed = removals(observer, routing, seed)
    ablations = _ablate(model, batches, removed, seed, progress)
    effort = Effort(
        observe_seconds=observe_seconds,
        gradient_seconds=gradient_seconds,
        ablation_seconds=clock.lap(),
        passes=2 * len(removed),
    )
    return _audit(observer, routing, ablations, effort, torch.cat(losses), batches, step, seed)


def _audit(
    observer: Observer,
    routing: tuple[Routing, ...],
    ablations: tuple[Ablation, ...],
    effort: Effort,
    losses: Tensor,
    batches: Sequence[Batch],
    step: int,
    seed: int,
) -> Audit:
    config = observer.model.config
    targets = sum(batch.n_targets for batch in batches)
    return Audit(
        step=step,
        depth=config.depth.kind,
        seed=seed,
        tokens=sum(batch.tokens.numel() for batch in batches),
        targets=targets,
        sequences=len(losses),
        loss=float(losses.sum()) / targets,
        sublayers=tuple(AuditedSublayer(index=s.index, block=s.block, kind=s.slot.kind) for s in config.stack.sites),
        class_tokens={name: int(observer.means["class", name].total) for name in observer.classes.names},
        routing=routing,
        routing_note=routing_note(config.depth, routing),
        gates=gates_of(observer),
        streams=streams_of(observer),
        norms=norms_of(observer),
        attention=attention_of(observer),
        ablations=ablations,
        effort=effort,
    )


class _Clock:
    def __init__(self) -> None:
        self.begin = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last call."""
        before, self.begin = self.begin, time.perf_counter()
        return round(self.begin - before, 3)


class _Updates(Probe):
    """Records the updates of a pass, as tensors that have a gradient even where all parameters so far are frozen."""

    def __init__(self) -> None:
        self.updates: list[Tensor] = []

    def update(self, index: int, update: Tensor) -> Tensor:
        update = update if update.requires_grad else update.detach().requires_grad_()
        self.updates.append(update)
        return update


class _States(Probe):
    """Records the states of a pass."""

    def __init__(self) -> None:
        self.states: list[Any] = []

    def state(self, index: int, state: Any) -> Any:
        self.states.append(state)
        return state


def _add_gradients(observer: Observer, sample: Sample) -> None:
    """Measures the gradient of the loss with respect to each update, by one backward pass."""
    model, probe = observer.model, _Updates()
    with torch.enable_grad():
        hidden = run_pass(model, sample, probe)
        loss = linear_cross_entropy(hidden.flatten(0, 1), model.head_weight, sample.batch.targets.flatten())
        found = torch.autograd.grad(loss, probe.updates, allow_unused=True)
    for index, (update, gradient) in enumerate(zip(probe.updates, found, strict=True)):
        gradient = torch.zeros_like(update) if gradient is None else gradient
        observer.means["gradient", index].add(torch.linalg.vector_norm(gradient, dim=-1))


@torch.no_grad()
def _ablate(
    model: Decoder, batches: Sequence[Batch], removed: Sequence[Removal], seed: int, progress: OnProgress
) -> tuple[Ablation, ...]:
    """Measures the loss of every sequence under each removal and each control."""
    changes = torch.zeros(len(removed), 2, sum(len(batch.tokens) for batch in batches), dtype=torch.float64)
    counts = torch.cat([(batch.targets >= 0).sum(1) for batch in batches])
    first = 0
    for number, batch in enumerate(batches):
        sample, states = Sample.of(batch), _States()
        loss = sequence_losses(model, run_pass(model, sample, states), batch)
        rows = slice(first, first + len(loss))
        first += len(loss)
        for row, removal in enumerate(removed):
            for control in (False, True):
                name = f"audit/{seed}/{removal.what}/{removal.sublayer}/{removal.target}/{removal.replacement}/{number}"
                removal.direction = name if control else None
                with removal.attached():
                    hidden = run_pass(model, sample, removal, states.states)
                changes[row, int(control), rows] = sequence_losses(model, hidden, batch) - loss
            progress("ablating", number * len(removed) + row + 1, len(batches) * len(removed))
    return tuple(_outcome(removal, pair, counts) for removal, pair in zip(removed, changes, strict=True))


def _outcome(removal: Removal, changes: Tensor, counts: Tensor) -> Ablation:
    loss_change, error = mean_change(changes[0], counts)
    control_change, control_error = mean_change(changes[1], counts)
    return Ablation(
        what=removal.what,
        sublayer=removal.sublayer,
        target=removal.target,
        replacement=removal.replacement,
        choice=removal.choice,
        change_norm=removal.sizes.number("change"),
        loss_change=loss_change,
        standard_error=error,
        control_loss_change=control_change,
        control_standard_error=control_error,
    )


def mean_change(changes: Tensor, counts: Tensor) -> tuple[float | None, float | None]:
    """The loss change per token over sequences of different lengths, and its standard error as a ratio of two sums.

    Equation: r = sum_s d_s / N,  se = sqrt(n / (n - 1) * sum_s (d_s - r n_s)^2) / N,  N = sum_s n_s, over n sequences

    Example:
        >>> mean_change(torch.tensor([2.0, 4.0]), torch.tensor([2, 2]))
        (1.5, 0.5)
    """
    total, n = int(counts.sum()), len(counts)
    ratio = float(changes.sum()) / total
    if not math.isfinite(ratio):
        return None, None
    change = rounded(torch.tensor([ratio], dtype=torch.float64))[0]
    if n < 2:
        return change, None
    spread = float((changes - ratio * counts).square().sum())
    return change, rounded(torch.tensor([math.sqrt(n / (n - 1) * spread) / total], dtype=torch.float64))[0]


def _check_corpus(folder: RunFolder, now: dict[str, Any]) -> None:
    recorded = folder.read("data")
    for what in ("corpus", "tokenizer"):
        if recorded[what]["fingerprint"] != now[what]["fingerprint"]:
            raise DataError(
                f"{what} of run folder {folder.path}: is not the one the run was trained on; must be equal; restore the {what}"
            )
