"""The part of a decoder that one rank of a pipeline holds, under the parameter names of the whole decoder."""

from collections.abc import Collection

import torch
from torch import nn

from twoaxis.core.parameters import initialise, materialize
from twoaxis.model import Decoder, DecoderConfig


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
    """Builds a decoder that has only these blocks, and of the rest what its stages need; nothing else takes memory.

    Names and initial values are those of the whole decoder, so the parts of all ranks together are its checkpoint. The
    ends of the stack, and a tied embedding, are on the first and on the last rank; ends that lend their parameters to the
    sublayers are on every rank.

    Args:
        config: of the whole decoder.
        blocks: that this rank runs.
        holds_first: whether it embeds.
        holds_last: whether it computes the loss.
        seed: of the initial values.
        device: of the parameters.
        dtype: of the parameters.

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
            "ends": holds_first or holds_last or part.ends.lends,
            "norm": holds_last,
            "head": holds_last,
        }
        for name, needs in needed.items():
            if not needs:
                setattr(part, name, None)
                part.declarations.pop(f"{name}.weight", None)
        return part

    part = materialize(build, device).to(dtype)
    initialise(part, seed)
    return part


def parameters_of_two_ranks(part: Decoder) -> list[nn.Parameter]:
    """Parameters that only the first and the last rank have; of the part of either one."""
    tied = part.embedding.parameters() if part.config.tie_embeddings else ()
    return [*tied, *(() if part.ends.lends else part.ends.parameters())]


def parameters_of_all_ranks(part: Decoder) -> list[nn.Parameter]:
    """Parameters that every rank has."""
    return list(part.ends.parameters()) if part.ends is not None and part.ends.lends else []
