"""The nine cases of the scale page: three shapes at three contexts, and how each is arranged on GPUs."""

from dataclasses import dataclass

from twoaxis.planner.coefficients import Data, Engine
from twoaxis.planner.hardware import read_device
from twoaxis.planner.ledger import Forwarding
from twoaxis.planner.setting import ParallelLayout, Recompute, Setting

DEVICE = "h100"

SHAPES = {"dense-7b": "7B", "dense-70b": "70B", "moe-1t": "1T MoE"}
"""What the page calls each preset."""

CONTEXTS = {2**13: "8k", 2**17: "128k", 2**20: "1M"}

CHUNK_TOKENS = 2**14
"""Of a prefill in chunks, as the report on Attention Residuals has them: arXiv:2603.15031."""


@dataclass(frozen=True)
class Case:
    """One shape at one context: how it is trained and how it is served.

    A layout has no ranks that share a sequence beyond the tensor-parallel ones. Here `context` data-parallel ranks do: each
    computes 1/`context` of the tokens and of the visible pairs of a sequence, and holds 1/`context` of its activations. What
    they send each other for attention is left out; it is the same for every method but the local mixers, whose windows
    reach a few tokens into the neighbour's part.

    Attributes:
        shape: name of the preset.
        tokens: of one sequence.
        layout: for training; its `data` counts the ranks that share a sequence too.
        context: ranks that share a sequence.
        sequences: in one microbatch of those ranks.
        recompute: in training.
        serving_ranks: tensor-parallel ranks that generate.
        serving_batch: sequences that they generate at once.
        serving_device: on which they do.
        weights_bytes: of a weight there.
    """

    shape: str
    tokens: int
    layout: ParallelLayout
    context: int
    sequences: int
    recompute: Recompute
    serving_ranks: int
    serving_batch: int
    serving_device: str = DEVICE
    weights_bytes: int = 2

    @property
    def name(self) -> str:
        """As the page calls it."""
        return f"{SHAPES[self.shape]}, {CONTEXTS[self.tokens]}"

    def training(self, engine: Engine = "fused", forwarding: Forwarding = "cached") -> Setting:
        """The setting of a training step; `run` adds what a layout cannot say."""
        return Setting(
            read_device(DEVICE),
            self.layout,
            self.sequences * self.layout.data * self.layout.microbatches,
            self.tokens,
            recompute=self.recompute,
            engine=engine,
            forwarding=forwarding,
        )

    def run(self, setting: Setting) -> Data:
        """What runs in one microbatch on each of the ranks that share a sequence."""
        return setting.run | {"batch": self.sequences / self.context}

    def serving(self, engine: Engine = "fused") -> Setting:
        """The setting of prefill and generation."""
        ranks = self.serving_ranks
        layout = ParallelLayout(gpus=ranks, tensor=ranks, sequence="tensor" if ranks > 1 else "none")
        return Setting(read_device(self.serving_device), layout, 1, self.tokens, engine=engine)


def _layout(tensor: int, pipeline: int, data: int, context: int, microbatches: int) -> ParallelLayout:
    replicas = data * context
    return ParallelLayout(
        gpus=tensor * pipeline * replicas,
        tensor=tensor,
        pipeline=pipeline,
        virtual=2,
        data=replicas,
        microbatches=microbatches,
        sequence="tensor",
    )


CASES = (
    Case("dense-7b", 2**13, _layout(2, 4, 8, 1, 16), 1, 1, "off", 1, 8),
    Case("dense-7b", 2**17, _layout(8, 4, 2, 1, 16), 1, 1, "block", 4, 2),
    Case("dense-7b", 2**20, _layout(8, 4, 1, 2, 16), 2, 1, "block", 8, 1),
    Case("dense-70b", 2**13, _layout(8, 8, 8, 1, 32), 1, 1, "off", 8, 32),
    Case("dense-70b", 2**17, _layout(8, 8, 2, 4, 32), 4, 1, "block", 8, 8),
    Case("dense-70b", 2**20, _layout(8, 8, 1, 8, 32), 8, 1, "block", 8, 1),
    Case("moe-1t", 2**13, _layout(8, 16, 16, 1, 32), 1, 2, "block", 8, 64, "b200", 1),
    Case("moe-1t", 2**17, _layout(8, 16, 2, 8, 32), 8, 1, "block", 8, 16, "b200", 1),
    Case("moe-1t", 2**20, _layout(8, 16, 1, 32, 32), 32, 1, "block", 8, 2, "b200", 1),
)


def case(shape: str, tokens: int) -> Case:
    """The case of a shape and a context.

    Example:
        >>> case("moe-1t", 2**20).layout.gpus, case("dense-7b", 2**17).name
        (4096, '7B, 128k')
    """
    return next(found for found in CASES if (found.shape, found.tokens) == (shape, tokens))
