"""What the blocks of a decoder read from the depth state during a call.

Letters: B batch, T position, D width.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from twoaxis.model import Decoder
from twoaxis.model.block import Block

Reads = Callable[[], list[Float[Tensor, "B T D"]]]


@contextmanager
def recorded_reads(decoder: Decoder, wanted: bool | None) -> Iterator[Reads]:
    """Yields a function that returns what the first sublayer of every block has read meanwhile, before its norm.

    Tokens of several calls follow one another. Where a sublayer reads separate queries, keys and values, it is the queries.

    Args:
        decoder: the model.
        wanted: whether anything is to be recorded.
    """
    found: list[list[Tensor]] = [[] for _ in decoder.blocks]
    with ExitStack() as hooks:
        for block, reads in zip(decoder.blocks if wanted else (), found, strict=False):

            def record(module: nn.Module, inputs: tuple[Any, ...], reads: list[Tensor] = reads) -> None:
                reads.append(inputs[0])

            handle = cast(Block, block).sublayers[0].norm.register_forward_pre_hook(record)
            hooks.callback(handle.remove)
        yield lambda: [torch.cat(reads, dim=1) for reads in found]
