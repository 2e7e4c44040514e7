"""How a run is spread over processes: the part `parallel` of a recipe."""

from pydantic import Field

from twoaxis.core.config import Config
from twoaxis.core.errors import ConfigError, problem


class ParallelConfig(Config):
    """The processes of a run; by default there is one.

    The product of all sizes is the number of processes, which `torchrun` starts. The layout changes neither the data of a step
    nor the meaning of any other option, so a run may be resumed with another one.

    Source: ZeRO, arXiv:1910.02054, stage 3, as torch.distributed.fsdp.fully_shard does it

    Args:
        shard: ranks that divide parameters, gradients and optimizer state among them, and the rows of a batch.
        replicate: copies of such a group, which divide the rows of a batch further.
        timeout_seconds: how long a rank waits for the others before it gives up.

    Example:
        >>> ParallelConfig(shard=4, replicate=2).ranks
        8
    """

    shard: int = Field(default=1, ge=1)
    replicate: int = Field(default=1, ge=1)
    timeout_seconds: float = Field(default=600.0, gt=0)

    @property
    def ranks(self) -> int:
        """The number of processes."""
        return self.shard * self.replicate

    @property
    def data_ranks(self) -> int:
        """The number of parts of a batch."""
        return self.shard * self.replicate

    def check(self, batch_size: int, micro_batch_size: int | None, compiled: str) -> None:
        """Refuses a recipe that this layout cannot run.

        Raises:
            ConfigError: a batch that does not divide, or a model that is compiled as a whole.
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
