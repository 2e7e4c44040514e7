"""Pipeline-parallel training of a decoder on several processes.

Letters: B rows of a batch, T position.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from twoaxis.core.errors import ConfigError, problem
from twoaxis.model import DecoderConfig
from twoaxis.ops.cross_entropy import IGNORE
from twoaxis.ops.precision import statistics_dtype
from twoaxis.train.parallel.boundaries import PipelineConfig, make_plan
from twoaxis.train.parallel.sharding import initialise_shards, shard_units
from twoaxis.train.parallel.stage import (
    CachingStage,
    DecoderStage,
    SharedGradients,
    StageCache,
    build_part,
    parameters_of_all_ranks,
    parameters_of_two_ranks,
    sum_over_all,
    sum_over_two,
)
from twoaxis.train.training_state import parameters_sha256


class PipelineLoss(NamedTuple):
    """The loss of a step, the same on every rank.

    Attributes:
        total: the sum of the token losses in nats.
        tokens: the number of tokens with a loss.
        correct: of a pass without gradients: targets that are the most likely token; 0 otherwise.
    """

    total: Float[Tensor, ""]
    tokens: Int[Tensor, ""]
    correct: Int[Tensor, ""]


class Pipeline:
    """One rank of a pipeline; every rank of the group builds one with the same arguments.

    Cost: receive buffers for activations and gradients at the boundaries of this rank, for every microbatch, for the lifetime
          of the pipeline (torch.distributed.pipelining)

    Args:
        decoder: the whole model.
        config: the stages and the schedule.
        batch_size: rows of every batch.
        seq_len: tokens in every row; fixed, since buffers are.
        seed: of the initial values, which are those of the undivided decoder.
        device: of the parameters; the group must be able to send from it.
        dtype: of the parameters.
        group: the processes, in the order of the stages; None means all.
        autocast: whether the stages run under bfloat16 autocast.
        mesh: the ranks among which each part is sharded (FSDP2), which divide the rows of a batch; None keeps it whole.

    Attributes:
        model: the part of the decoder on this rank, with the parameter names of the whole.
        plan: the tensors that cross each boundary.
        initial_sha256: the SHA-256 of the initial value of every whole parameter of this rank, by name.

    Raises:
        ConfigError: a pipeline that does not fit the model, the batch or the group.

    Example:
        >>> from datetime import timedelta
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=10))
        >>> config = DecoderConfig(vocab_size=16, d_model=8, n_layers=2)
        >>> pipeline = Pipeline(config, PipelineConfig(ranks=1, microbatches=2), batch_size=2, seq_len=3)
        >>> tokens = torch.tensor([[1, 2, 3], [4, 5, 6]])
        >>> pipeline.step(tokens, tokens.roll(-1)).tokens
        tensor(6)
        >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        decoder: DecoderConfig,
        config: PipelineConfig,
        batch_size: int,
        seq_len: int,
        *,
        seed: int = 0,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
        group: dist.ProcessGroup | None = None,
        autocast: bool = False,
        mesh: DeviceMesh | None = None,
    ) -> None:
        _check_sizes(decoder, config, batch_size, seq_len, group)
        self.config, self.shape, self.group = config, (batch_size, seq_len), group
        self.device = device or torch.device("cpu")
        self.plan = make_plan(decoder, config, batch_size // config.microbatches, seq_len, dtype, autocast)
        self._autocast, self._divisor = autocast, 1
        self.rank = dist.get_rank(group)
        mine = range(self.rank, config.stages, config.ranks)
        self.holds_first, self.holds_last = self.rank == 0, self.rank == config.ranks - 1
        self.model = build_part(
            decoder,
            [block for stage in mine for block in self.plan.blocks[stage]],
            holds_first=self.holds_first,
            holds_last=self.holds_last,
            seed=seed,
            device=self.device if mesh is None else torch.device("meta"),
            dtype=dtype,
        )
        self._cache = StageCache()
        modules = [self._module(index) for index in mine]
        if mesh is not None:
            if config.virtual > 1 and self.model.ends is not None and self.model.ends.shares_parameters:
                allowed = "1 with sharded parameters and a depth mixer whose ends share parameters with every block"
                raise ConfigError(problem("virtual", config.virtual, allowed, "use schedule='1f1b'"))
            shard_units(self.model, [(module, module.blocks) for module in modules], mesh, gathers_once=True)
            self.initial_sha256 = initialise_shards(self.model, seed)
        else:
            self.initial_sha256 = parameters_sha256(self.model)
        self._stages = [self._stage(module) for module in modules]
        self._schedule = _schedule(config, self._stages, self._loss)
        self._shared = self._shared_gradients()

    def step(
        self,
        tokens: Int[Tensor, "B T"],
        targets: Int[Tensor, "B T"],
        documents: Int[Tensor, "B T"] | None = None,
        divide_by: int = 1,
    ) -> PipelineLoss:
        """Accumulates the gradient of the summed token loss in the parameters of this rank.

        Every rank receives the whole batch. Gradients of shared parameters are summed over their ranks.

        Args:
            tokens: ids.
            targets: the next ids, or IGNORE.
            documents: the document of each token; None means that rows are one document each.
            divide_by: of the gradient, such as the number of all tokens; the returned loss is not divided.

        Raises:
            ConfigError: a batch of another shape than the buffers, or autocast, under which dtypes would differ from theirs.
        """
        self._check(tokens, targets, documents)
        self._divisor = divide_by
        with ExitStack() as stack:
            for shared in self._shared:
                stack.enter_context(shared.summed())
            loss = self._run(self._schedule.step, tokens, targets, documents)
        assert not len(self._cache), "a stage has cached tensors that its backward pass did not remove"
        return loss

    @torch.no_grad()
    def evaluate(
        self, tokens: Int[Tensor, "B T"], targets: Int[Tensor, "B T"], documents: Int[Tensor, "B T"] | None = None
    ) -> PipelineLoss:
        """The summed token loss, without gradients."""
        self._check(tokens, targets, documents)
        return self._run(self._schedule.eval, tokens, targets, documents)

    def reshard(self) -> None:
        """Frees the gathered parameters of sharded stages."""
        for stage in self._stages:
            for module in stage.submod.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    def _check(self, tokens: Tensor, targets: Tensor, documents: Tensor | None) -> None:
        for name, given in (("tokens", tokens), ("targets", targets), ("documents", documents)):
            if given is not None and tuple(given.shape) != self.shape:
                allowed = f"{list(self.shape)}, for which this pipeline has its buffers"
                remedy = "drop a shorter last batch, or build another Pipeline"
                raise ConfigError(problem(f"shape of {name}", list(given.shape), allowed, remedy))
        if torch.is_autocast_enabled(self.device.type):
            raise ConfigError(
                "autocast is on: must be off, since buffers have the dtypes of a pass without; give the pipeline a dtype"
            )

    def _run(self, run: Callable[..., Any], tokens: Tensor, targets: Tensor, documents: Tensor | None) -> PipelineLoss:
        given = {"targets": targets.to(self.device), "tokens": tokens.to(self.device)}
        if documents is not None:
            given["documents"] = documents.to(self.device)
        self._measured: list[Tensor] = []
        run(
            *((given["tokens"],) if self.holds_first else ()),
            target=given["targets"] if self.holds_last else None,
            return_outputs=False,
            **given,
        )
        measured = torch.zeros(2, dtype=statistics_dtype(next(self.model.parameters())), device=self.device)
        if self.holds_last:
            measured += torch.stack(self._measured).sum(0)
        dist.broadcast(measured, group=self.group, group_src=self.config.ranks - 1)
        return PipelineLoss(measured[0], (targets != IGNORE).sum(), measured[1].long())

    def _module(self, index: int) -> DecoderStage:
        return DecoderStage(self.model, self.plan, index, self.shape[1], self._cache, self.config.recompute, self._autocast)

    def _stage(self, module: DecoderStage) -> CachingStage:
        plan, index, rows = self.plan, module.index, self.shape[0] // self.config.microbatches
        tokens = torch.empty(rows, self.shape[1], dtype=torch.int64, device="meta")
        dtype = statistics_dtype(next(self.model.parameters()))
        measured = torch.empty(2, dtype=dtype, device="meta", requires_grad=True)
        return CachingStage(
            module,
            index,
            plan.stages,
            self.device,
            input_args=plan.placeholders(index - 1) if index else (tokens,),
            output_args=plan.placeholders(index) if index < plan.stages - 1 else (measured,),
            group=self.group,
        )

    def _loss(self, measured: Float[Tensor, "2"], targets: Int[Tensor, "B T"]) -> Float[Tensor, ""]:
        del targets
        self._measured.append(measured.detach())
        return measured[0] / self._divisor

    def _shared_gradients(self) -> list[SharedGradients]:
        """For the parameters of all ranks, and for those of the first and the last rank."""
        if self.config.ranks == 1:
            return []
        found = [SharedGradients(parameters_of_all_ranks(self.model), sum_over_all(self.group))]
        if self.holds_first or self.holds_last:
            other = self.config.ranks - 1 if self.holds_first else 0
            found.append(SharedGradients(parameters_of_two_ranks(self.model), sum_over_two(other, self.group)))
        return found


def _schedule(config: PipelineConfig, stages: list[CachingStage], loss: Callable[..., Tensor]) -> Any:
    given = {"n_microbatches": config.microbatches, "loss_fn": loss, "scale_grads": False}
    if config.schedule == "gpipe":
        return ScheduleGPipe(stages[0], **given)
    if config.schedule == "1f1b":
        return Schedule1F1B(stages[0], **given)
    return ScheduleInterleaved1F1B(list(stages), **given)


def _check_sizes(
    decoder: DecoderConfig, config: PipelineConfig, batch_size: int, seq_len: int, group: dist.ProcessGroup | None
) -> None:
    processes = dist.get_world_size(group)
    if config.ranks != processes:
        allowed = f"{processes}, the number of processes in the group"
        raise ConfigError(problem("ranks", config.ranks, allowed, "change it, or start as many processes"))
    config.blocks(decoder.n_layers)
    if batch_size < 1 or batch_size % config.microbatches:
        allowed = f"a multiple of microbatches={config.microbatches}"
        raise ConfigError(problem("batch_size", batch_size, allowed, "change one of them"))
    if not 1 <= seq_len <= decoder.max_seq_len:
        allowed = f"in 1..max_seq_len={decoder.max_seq_len}"
        raise ConfigError(problem("seq_len", seq_len, allowed, "raise max_seq_len or cut the windows"))
