"""How a run is spread over processes: the part `parallel` of a recipe."""

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from twoaxis.core.config import Config
from twoaxis.core.errors import ConfigError, problem

if TYPE_CHECKING:
    from twoaxis.train.parallel.boundaries import PipelineConfig

Schedule = Literal["gpipe", "1f1b", "interleaved"]
Recompute = Literal["off", "block"]


class ParallelConfig(Config):
    """The processes of a run; by default there is one.

    The product of `pipeline`, `replicate`, `shard` and `tensor` is the number of processes, which `torchrun` starts; ranks of
    one tensor group have neighbouring numbers. The layout changes neither the data of a step nor the meaning of another option,
    so a run may be resumed with a different one.

    Source: ZeRO, arXiv:1910.02054, stage 3, as torch.distributed.fsdp.fully_shard does it; pipelines as in `PipelineConfig`;
            tensor ranks: Megatron-LM, arXiv:1909.08053, section 3, and arXiv:2205.05198, section 4.2.2

    Args:
        shard: ranks that divide parameters, gradients and optimizer state among them, and the rows of a batch.
        replicate: copies of such a group, which divide the rows of a batch further.
        pipeline: stages of blocks, one for each rank; the micro-batches of a recipe are those of the pipeline.
        schedule: `gpipe` runs all forward passes first; `1f1b` and `interleaved` alternate, the latter over several stages on
            each rank.
        virtual: stages on each rank, above 1 with `interleaved` only.
        forwarding: what crosses a boundary: the whole depth state (`naive`), or those of its tensors that the receiving rank
            has not received (`cached`), or neither received nor computed (`cached_own`).
        tensor: ranks that divide heads of attention and hidden numbers of feed-forwards; depth mixers are whole on each.
        sequence: streams and depth states are whole on every tensor rank (`none`), or each has its part of every window
            (`tensor`).
        saving: `wait` writes a checkpoint before the next step; `background` copies what it holds and writes it meanwhile.
        timeout_seconds: how long a rank waits for the others before it gives up.

    Example:
        >>> ParallelConfig(shard=4, replicate=2).ranks
        8
    """

    called: ClassVar[str] = "part `parallel` of a recipe"

    shard: int = Field(default=1, ge=1)
    replicate: int = Field(default=1, ge=1)
    pipeline: int = Field(default=1, ge=1)
    schedule: Schedule = "1f1b"
    virtual: int = Field(default=1, ge=1)
    forwarding: Literal["naive", "cached", "cached_own"] = "naive"
    tensor: int = Field(default=1, ge=1)
    sequence: Literal["none", "tensor"] = "none"
    saving: Literal["wait", "background"] = "wait"
    timeout_seconds: float = Field(default=600.0, gt=0)

    @property
    def ranks(self) -> int:
        """The number of processes."""
        return self.pipeline * self.data_ranks * self.tensor

    @property
    def data_ranks(self) -> int:
        """The number of parts of a batch."""
        return self.shard * self.replicate

    def stages(self, batch_size: int, micro_batch_size: int | None, recompute: Recompute) -> "PipelineConfig":
        """The pipeline of a recipe.

        Raises:
            ConfigError: micro-batches that do not fit the schedule.
        """
        from twoaxis.train.parallel.boundaries import PipelineConfig

        rows = batch_size // self.data_ranks
        size = micro_batch_size or rows
        if rows % size:
            allowed = f"a divisor of the {rows} windows of a pipeline, batch_size={batch_size} over {self.data_ranks}"
            raise ConfigError(problem("micro_batch_size", micro_batch_size, allowed, "change one of them"))
        count = rows // size
        if self.schedule == "1f1b" and count < self.pipeline:
            allowed = f"at most {rows // self.pipeline} for {self.pipeline} or more micro-batches with schedule='1f1b'"
            raise ConfigError(problem("micro_batch_size", size, allowed, "lower it, raise batch_size, or use schedule=gpipe"))
        sizes = {"ranks": self.pipeline, "virtual": self.virtual, "microbatches": count}
        return PipelineConfig(**sizes, schedule=self.schedule, forwarding=self.forwarding, recompute=recompute)

    def check(
        self,
        *,
        n_layers: int,
        batch_size: int,
        micro_batch_size: int | None,
        compiled: str,
        recompute: Recompute,
    ) -> None:
        """Refuses a recipe that this layout cannot run.

        Raises:
            ConfigError: a batch, blocks or micro-batches that do not divide, or a model that cannot be compiled like this.
        """
        if batch_size % self.data_ranks:
            allowed = f"a multiple of parallel.shard * parallel.replicate = {self.data_ranks}"
            raise ConfigError(problem("batch_size", batch_size, allowed, "change one of them"))
        rows = batch_size // self.data_ranks
        if micro_batch_size is not None and micro_batch_size > rows:
            allowed = f"at most the {rows} windows of a rank, batch_size={batch_size} over {self.data_ranks}"
            raise ConfigError(problem("micro_batch_size", micro_batch_size, allowed, "lower it, or leave it out"))
        if self.ranks > 1 and compiled == "model":
            allowed = "'off' or 'block' with more than one process, where parameters are gathered between blocks"
            raise ConfigError(problem("compile", compiled, allowed, "use compile=block"))
        if self.tensor > 1 and self.pipeline > 1:
            raise ConfigError(problem("parallel.tensor", self.tensor, "1 with a pipeline", "use one of them, with shard"))
        if self.tensor > 1 and compiled != "off":
            raise ConfigError(problem("compile", compiled, f"'off' with parallel.tensor={self.tensor}", "use compile=off"))
        if self.tensor == 1 and self.sequence != "none":
            allowed = "left out without tensor ranks"
            raise ConfigError(problem("parallel.sequence", self.sequence, allowed, "set parallel.tensor"))
        if compiled != "off" and (self.pipeline > 1 or (self.ranks > 1 and recompute == "block")):
            why = "a pipeline" if self.pipeline > 1 else "recompute='block' on more than one process"
            raise ConfigError(problem("compile", compiled, f"'off' with {why}", "leave one of them out"))
        if self.pipeline > 1:
            self.stages(batch_size, micro_batch_size, recompute).blocks(n_layers)
        elif (self.virtual, self.forwarding, self.schedule) != (1, "naive", "1f1b"):
            name = "virtual" if self.virtual != 1 else "forwarding" if self.forwarding != "naive" else "schedule"
            raise ConfigError(
                problem(f"parallel.{name}", getattr(self, name), "left out without a pipeline", "set parallel.pipeline")
            )
