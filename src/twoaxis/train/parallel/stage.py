"""One pipeline stage, and what ranks share: values kept for later stages, and shared parameters."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_unflatten

from twoaxis.core.errors import ConfigError, problem
from twoaxis.core.layout import TokenLayout
from twoaxis.core.parameters import initialise, materialize
from twoaxis.model import Decoder, DecoderConfig
from twoaxis.model.block import run_blocks
from twoaxis.ops.cross_entropy import IGNORE, linear_cross_entropy
from twoaxis.train.parallel.boundaries import Plan, Recompute


@dataclass
class CachedTensor:
    """A tensor with its graph, and the gradient accumulated from later stages."""

    tensor: Tensor
    gradient: Tensor | None = None


class StageCache:
    """The tensors that the stages of one rank share, by microbatch and number.

    A later stage gets a tensor as a detached leaf, so no graph spans two stages. Its gradient is accumulated here until the
    backward pass of the stage that cached the tensor, which runs later on the same rank.
    """

    def __init__(self) -> None:
        self._cached: dict[tuple[int, int], CachedTensor] = {}

    def __len__(self) -> int:
        return len(self._cached)

    def put(self, microbatch: int, number: int, tensor: Tensor) -> None:
        """Caches a tensor until `pop`."""
        self._cached[microbatch, number] = CachedTensor(tensor)

    def get_grad_leaf(self, microbatch: int, number: int) -> Tensor:
        """Returns a cached tensor as a leaf that requires a gradient if the tensor does."""
        tensor = self._cached[microbatch, number].tensor
        return tensor.detach().requires_grad_(tensor.requires_grad and torch.is_grad_enabled())

    def accumulate_grad(self, microbatch: int, number: int, gradient: Tensor) -> None:
        """Adds the gradient of a leaf."""
        cached = self._cached[microbatch, number]
        cached.gradient = gradient if cached.gradient is None else cached.gradient + gradient

    def pop(self, microbatch: int, numbers: Iterable[int]) -> list[CachedTensor]:
        """Removes and returns cached tensors with their gradients."""
        return [self._cached.pop((microbatch, number)) for number in numbers]


Sum = Callable[[Tensor], Tensor]
"""Returns the sum of a tensor over some ranks, each of which calls it."""


def sum_over_two(other: int, group: dist.ProcessGroup | None) -> Sum:
    """The sum over this rank and the rank `other` of the group.

    The two exchange their tensors, since all processes would have to take part in creating a process group of two.
    """

    def summed(own: Tensor) -> Tensor:
        received = torch.empty_like(own)
        ways = ((dist.isend, own), (dist.irecv, received))
        for work in dist.batch_isend_irecv([dist.P2POp(way, tensor, group=group, group_peer=other) for way, tensor in ways]):
            work.wait()
        return own + received

    return summed


def sum_over_all(group: dist.ProcessGroup | None) -> Sum:
    """The sum over all ranks of the group."""

    def summed(own: Tensor) -> Tensor:
        total = own.clone()
        dist.all_reduce(total, group=group)
        return total

    return summed


class SharedGradients:
    """Sums the gradients of shared parameters over their ranks, which start equal and therefore stay equal.

    The parameters have the same order on all of these ranks.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], sum_over_ranks: Sum) -> None:
        self.parameters, self._sum_over_ranks = parameters, sum_over_ranks

    @contextmanager
    def summed(self) -> Iterator[None]:
        """Sums the gradients of backward passes inside; gradients from before are sums already."""
        before = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        yield
        self._sum()
        for parameter, earlier in zip(self.parameters, before, strict=True):
            if earlier is not None:
                parameter.grad = earlier if parameter.grad is None else earlier + parameter.grad

    @torch.no_grad()
    def _sum(self) -> None:
        if not self.parameters:
            return
        # A parameter that only some ranks have used still has a sum; one that none has used has no gradient.
        used = torch.tensor([parameter.grad is not None for parameter in self.parameters], device=self.parameters[0].device)
        for parameter, users in zip(self.parameters, self._sum_over_ranks(used.int()).tolist(), strict=True):
            if users:
                own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.contiguous()
                if isinstance(own, DTensor):
                    # The other ranks hold the same shard of it.
                    own.to_local().copy_(self._sum_over_ranks(own.to_local()))
                    parameter.grad = own
                else:
                    parameter.grad = self._sum_over_ranks(own)


def build_part(
    config: DecoderConfig,
    blocks: Collection[int],
    *,
    holds_first: bool,
    holds_last: bool,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Decoder:
    """Builds a decoder with only these blocks and the other modules that the rank needs; nothing else takes memory.

    On the meta device it has no initial values.

    Names and initial values are those of the whole decoder, so the parts of all ranks together are its checkpoint. The
    ends of the stack, and a tied embedding, are on the first and on the last rank; ends that lend their parameters to the
    sublayers are on every rank.

    Example:
        >>> config = DecoderConfig(vocab_size=16, d_model=8, n_layers=4)
        >>> part = build_part(
        ...     config, [3], holds_first=False, holds_last=False, seed=0, device=torch.device("cpu"), dtype=torch.float32
        ... )
        >>> sorted({name.split(".")[1] for name, _ in part.named_parameters()})
        ['3']
    """

    def build() -> Decoder:
        part = Decoder(config)
        for index in set(range(config.n_layers)) - set(blocks):
            part.blocks[index] = nn.Identity()
        needed = {
            "embedding": holds_first or (holds_last and config.tie_embeddings),
            "embedding_norm": holds_first,
            "embedding_local": holds_first,
            "ends": holds_first or holds_last or part.ends.shares_parameters,
            "norm": holds_last,
            "head": holds_last,
        }
        for name, needs in needed.items():
            if not needs:
                setattr(part, name, None)
                part.declarations.pop(f"{name}.weight", None)
        return part

    if device.type == "meta":
        with device:
            return build().to(dtype)
    part = materialize(build, device).to(dtype)
    initialise(part, seed)
    return part


def parameters_of_two_ranks(part: Decoder) -> list[nn.Parameter]:
    """Parameters that only the first and the last rank hold, from the part of any rank."""
    tied = part.embedding.parameters() if part.config.tie_embeddings and part.embedding is not None else ()
    return [*tied, *(() if part.ends is None or part.ends.shares_parameters else part.ends.parameters())]


def parameters_of_all_ranks(part: Decoder) -> list[nn.Parameter]:
    """Parameters that every rank holds."""
    return list(part.ends.parameters()) if part.ends is not None and part.ends.shares_parameters else []


class DecoderStage(nn.Module):
    """Runs the blocks of one stage, from received tensors to sent ones; rows have `tokens` tokens.

    The first stage receives token ids; the last returns the summed token loss, and in a pass without gradients the number of
    targets that are the most likely token.
    """

    def __init__(
        self,
        model: Decoder,
        plan: Plan,
        index: int,
        tokens: int,
        cache: StageCache,
        recompute: Recompute,
        autocast: bool = False,
    ) -> None:
        super().__init__()
        self.plan, self.index, self.tokens, self.cache = plan, index, tokens, cache
        # Not as a submodule: those of a stage are what it uses, so that it can be sharded by itself.
        self._model = (model,)
        self.recompute, self.autocast = recompute == "block", autocast
        self.is_first, self.is_last = index == 0, index == plan.stages - 1
        self.blocks = nn.ModuleList(model.blocks[block] for block in plan.blocks[index])
        self.embedding = model.embedding if self.is_first or (self.is_last and model.head is None) else None
        self.embedding_norm = model.embedding_norm if self.is_first else None
        self.embedding_local = model.embedding_local if self.is_first else None
        self.norm, self.head = (model.norm, model.head) if self.is_last else (None, None)
        shared = model.ends is not None and model.ends.shares_parameters
        self.ends = model.ends if self.is_first or self.is_last or shared else None
        self.received = () if self.is_first else plan.sent(index - 1)
        self.sent = () if self.is_last else plan.sent(index)
        self.fetched, self.kept = plan.fetched(index), plan.kept(index)
        self._leaves: dict[int, dict[int, Tensor]] = {}

    def forward(
        self,
        *received: Tensor,
        microbatch: int,
        targets: Int[Tensor, "B T"] | None = None,
        documents: Int[Tensor, "B T"] | None = None,
        tokens: Int[Tensor, "B T"] | None = None,
    ) -> Tensor | tuple[Tensor, ...]:
        """Returns the sent tensors, or what the last stage has measured."""
        with torch.autocast(received[0].device.type, torch.bfloat16, enabled=self.autocast):
            return self._run(received, microbatch, targets, documents, tokens)

    def _run(
        self,
        received: tuple[Tensor, ...],
        microbatch: int,
        targets: Tensor | None,
        documents: Tensor | None,
        tokens: Tensor | None,
    ) -> Tensor | tuple[Tensor, ...]:
        model, device = self._model[0], received[0].device
        layout = TokenLayout.contiguous(self.tokens, device=device) if documents is None else TokenLayout.packed(documents)
        layout = layout.of(tokens)
        entering: dict[int, Tensor] = {}
        if self.is_first:
            state, _ = model.ends.enter(model.mix_embeddings(model.embed(*received), layout)[0], layout)
        else:
            boundary = self.plan.boundaries[self.index - 1]
            entering = self._gather(received, microbatch)
            state = tree_unflatten([entering[number] for number in boundary.leaves], boundary.structure)
        state = run_blocks(self.blocks, state, layout, self.recompute)
        if self.is_last:
            assert targets is not None
            hidden, _ = model.ends.leave(state, layout)
            return self._measure(model, model.norm(hidden), targets)
        leaving = dict(zip(self.plan.boundaries[self.index].leaves, tree_leaves(state), strict=True))
        for number in self.sent:
            if leaving[number].dtype != self.plan.tensors[number].dtype:
                allowed = f"{self.plan.tensors[number].dtype}, for which the next stage has its buffers"
                got = str(leaving[number].dtype)
                raise ConfigError(problem("dtype of the depth state", got, allowed, "use precision=float32 with this mixer"))
        for number in self.kept:
            self.cache.put(microbatch, number, entering[number] if number in entering else leaving[number])
        return tuple(leaving[number].contiguous() for number in self.sent)

    def _measure(self, model: Decoder, hidden: Float[Tensor, "B T D"], targets: Int[Tensor, "B T"]) -> Float[Tensor, "2"]:
        """The summed loss, and without gradients the number of targets that are the most likely token."""
        loss = linear_cross_entropy(hidden.flatten(0, 1), model.head_weight, targets.flatten())
        correct = torch.zeros_like(loss)
        if not torch.is_grad_enabled():
            valid = targets != IGNORE
            correct += (model.logits(hidden[valid]).argmax(-1) == targets[valid]).sum()
        return torch.stack((loss, correct))

    def _gather(self, received: tuple[Tensor, ...], microbatch: int) -> dict[int, Tensor]:
        """The tensors of the entering state by number: received ones and cached ones."""
        fetched = {number: self.cache.get_grad_leaf(microbatch, number) for number in self.fetched}
        self._leaves[microbatch] = {number: leaf for number, leaf in fetched.items() if leaf.requires_grad}
        return dict(zip(self.received, received, strict=True)) | fetched

    def pop_cached(self, microbatch: int) -> list[CachedTensor]:
        """Removes and returns the tensors that this stage has cached, with the gradients from later stages."""
        return self.cache.pop(microbatch, self.kept)

    def accumulate_grads(self, microbatch: int) -> None:
        """Adds the gradients of fetched tensors to the cache."""
        for number, leaf in self._leaves.pop(microbatch, {}).items():
            if leaf.grad is not None:
                self.cache.accumulate_grad(microbatch, number, leaf.grad)


class CachingStage(PipelineStage):
    """A pipeline stage that passes the microbatch to its module, and starts the backward pass at cached tensors too."""

    submod: DecoderStage

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: dict[str, Any] | None = None, save_forward_output: bool = True
    ) -> Any:
        """Runs the forward pass of one microbatch."""
        given = {**(kwargs or {}), "microbatch": fwd_chunk_id}
        return super().forward_one_chunk(fwd_chunk_id, args, given, save_forward_output)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Tensor | None = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Runs the backward pass of one microbatch, or without one only clears its cached tensors."""
        self._microbatch = bwd_chunk_id
        if not self.has_backward:
            self.submod.pop_cached(bwd_chunk_id)
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_maybe_with_nosync(self, backward_type: Any, bwd_kwargs: dict[str, Any], last_backward: bool = False) -> Any:
        """Includes the gradients of cached tensors, and accumulates those of fetched ones."""
        returned = [cached for cached in self.submod.pop_cached(self._microbatch) if cached.gradient is not None]
        if returned:
            bwd_kwargs = {
                **bwd_kwargs,
                "stage_output": (*bwd_kwargs["stage_output"], *(cached.tensor for cached in returned)),
                "output_grads": (*bwd_kwargs["output_grads"], *(cached.gradient for cached in returned)),
            }
        result = super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        self.submod.accumulate_grads(self._microbatch)
        return result
