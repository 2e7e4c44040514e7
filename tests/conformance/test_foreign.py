"""Modules as other libraries write them: a check finds the fault of each, and passes on the same module mended."""

import random
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twoaxis.testing import ForeignDepth, ForeignSequence, check_foreign, float64_stays, foreign_checks
from twoaxis.testing.foreign import iterate_foreign, not_run


class Stream(ForeignDepth):
    """Adds what a sublayer returns, weighted by gates."""

    starts_as = "exact"

    def __init__(self, d_model: int, sublayers: int) -> None:
        super().__init__(d_model, sublayers)
        self.gates = nn.ParameterList(self.gate(d_model) for _ in range(sublayers))
        self.register_buffer("one", torch.ones(1), persistent=False)

    def gate(self, d_model: int) -> Tensor:
        return torch.ones(1)

    def write(self, index: int, state: Any, update: Tensor, carry: Any) -> Any:
        return state + self.gates[index] * update * self.get_buffer("one")


class Unset(Stream):
    def gate(self, d_model: int) -> Tensor:
        return torch.empty(1)


class Scratch(Stream):
    """Accumulates in memory that nothing was written to."""

    def write(self, index: int, state: Tensor, update: Tensor, carry: Any) -> Tensor:
        return super().write(index, state, update, carry) + torch.empty_like(state) * 0


class Drawn(Stream):
    """Starts from Python's generator, whose state torch's seed leaves alone."""

    def gate(self, d_model: int) -> Tensor:
        return torch.full((1,), random.SystemRandom().random())


class Scalar(Stream):
    def gate(self, d_model: int) -> Tensor:
        return torch.ones(())


class Dead(Stream):
    """Creates its gates, and forgets to apply them."""

    def write(self, index: int, state: Tensor, update: Tensor, carry: Any) -> Tensor:
        return state + update


class DeadOnPurpose(Dead):
    dead: ClassVar[dict[str, str]] = {"gates.*": "kept for old checkpoints"}


class Mixed(Stream):
    """Mixes two streams by a matrix."""

    starts_as = "up_to_norm"

    def gate(self, d_model: int) -> Tensor:
        return torch.eye(2)

    def enter(self, embeddings: Tensor) -> Tensor:
        return torch.stack((embeddings, embeddings), -2)

    def read(self, index: int, state: Tensor) -> tuple[Tensor, Tensor]:
        return state[..., index % 2, :], self.mixed(index, state)

    def mixed(self, index: int, state: Tensor) -> Tensor:
        return torch.einsum("ij,btjd->btid", self.gates[index], state)

    def write(self, index: int, state: Tensor, update: Tensor, carry: Tensor) -> Tensor:
        return carry + update.unsqueeze(-2)

    def leave(self, state: Tensor) -> Tensor:
        return state.sum(-2)


class MixedAndDropped(Mixed):
    """Computes the mixed streams, and returns those that came in."""

    def mixed(self, index: int, state: Tensor) -> Tensor:
        super().mixed(index, state)
        return state


class HalfMixed(Mixed):
    """Normalises one column at a time, which is then constant."""

    def mixed(self, index: int, state: Tensor) -> Tensor:
        columns = self.gates[index].unsqueeze(-1).softmax(-1).squeeze(-1)
        return torch.einsum("ij,btjd->btid", torch.stack((columns[:, 0], self.gates[index][:, 1]), 1), state)


class MeanOfAll(Stream):
    """Centres updates by their mean over all positions."""

    starts_as = None

    def mean(self, x: Tensor) -> Tensor:
        return x.mean(1, keepdim=True)

    def write(self, index: int, state: Tensor, update: Tensor, carry: Any) -> Tensor:
        return super().write(index, state, update - self.mean(update), carry)


class MeanOfChannels(MeanOfAll):
    def mean(self, x: Tensor) -> Tensor:
        return x.mean(-1, keepdim=True)


class Narrow(Stream):
    """A gate from a norm, computed in the dtype of the model."""

    starts_as = None

    def wide(self, x: Tensor) -> Tensor:
        return x

    def write(self, index: int, state: Tensor, update: Tensor, carry: Any) -> Tensor:
        wide = self.wide(state)
        gate = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * self.wide(self.gates[index])
        return (wide + gate * self.wide(update)).to(state.dtype)


class Wide(Narrow):
    def wide(self, x: Tensor) -> Tensor:
        return x.to(torch.promote_types(x.dtype, torch.float32))


class Float32(Stream):
    """Computes in float32, in a float64 model too."""

    def write(self, index: int, state: Tensor, update: Tensor, carry: Any) -> Tensor:
        return (state.float() + self.gates[index].float() * update.float()).to(state.dtype)


class Float32Mended(Float32):
    def write(self, index: int, state: Tensor, update: Tensor, carry: Any) -> Tensor:
        with float64_stays():
            return super().write(index, state, update, carry)


class InPlace(Stream):
    def write(self, index: int, state: Tensor, update: Tensor, carry: Any) -> Tensor:
        return state.add_(self.gates[index] * update)


class Keeps(Stream):
    """Keeps the last state on the module."""

    def read(self, index: int, state: Tensor) -> tuple[Tensor, None]:
        self.last = state
        return state, None


class Scaled(Stream):
    def gate(self, d_model: int) -> Tensor:
        return torch.full((1,), 1.46)


class Conv(ForeignSequence):
    """A causal convolution of three tokens, with a cache of the last two."""

    receptive_field = 3

    def __init__(self, d_model: int) -> None:
        super().__init__(d_model)
        self.taps = nn.Parameter(torch.randn(3, d_model))

    def forward(self, x: Tensor) -> Tensor:
        return self.convolve(F.pad(x, (0, 0, 2, 0)))

    def convolve(self, padded: Tensor) -> Tensor:
        tokens = padded.shape[1] - 2
        return sum((padded[:, at : at + tokens] * self.taps[at] for at in range(3)), torch.zeros(()))

    def new_cache(self) -> Any:
        return ()

    def step(self, x: Tensor, cache: Any, start: int) -> tuple[Tensor, Any]:
        before = cache if isinstance(cache, Tensor) else torch.zeros_like(x[:, :1]).expand(-1, 2, -1)
        padded = torch.cat((before, x), 1)
        return self.convolve(padded), padded[:, -2:]


class PromptForgets(Conv):
    """Takes a chunk of several tokens for a prompt, and ignores the cache."""

    def step(self, x: Tensor, cache: Any, start: int) -> tuple[Tensor, Any]:
        return super().step(x, cache if x.shape[1] == 1 else (), start)


class WritesCache(Conv):
    """Writes the cache in place."""

    def step(self, x: Tensor, cache: Any, start: int) -> tuple[Tensor, Any]:
        y, after = super().step(x, cache, start)
        return y, cache.copy_(after) if isinstance(cache, Tensor) else after.clone()


class OneTooMany(Conv):
    receptive_field = 2


class TailIsLeft(Conv):
    """Pads both ends, and leaves the tail."""

    def forward(self, x: Tensor) -> Tensor:
        return self.convolve(F.pad(x, (0, 0, 1, 1)))


class Documents(Conv):
    """Takes documents, and ignores them."""

    def packed(self, x: Tensor, documents: Tensor) -> Tensor:
        return self(x)


class OwnDocuments(Conv):
    def packed(self, x: Tensor, documents: Tensor) -> Tensor:
        padded, own = F.pad(x, (0, 0, 2, 0)), F.pad(documents, (2, 0), value=-1)
        tokens = x.shape[1]
        parts = (
            padded[:, at : at + tokens] * self.taps[at] * (own[:, at : at + tokens] == documents).unsqueeze(-1)
            for at in range(3)
        )
        return sum(parts, torch.zeros(()))


FAULTS: list[tuple[type[Any], type[Any], str]] = [
    (Unset, Stream, "no_uninitialised_memory"),
    (Scratch, Stream, "no_uninitialised_memory"),
    (Drawn, Stream, "deterministic_for_seed"),
    (Scalar, Stream, "parameters_can_be_sharded"),
    (Dead, Stream, "gradients_reach_parameters"),
    (Dead, DeadOnPurpose, "gradients_reach_parameters"),
    (MixedAndDropped, Mixed, "gradients_reach_columns"),
    (HalfMixed, Mixed, "gradients_reach_columns"),
    (HalfMixed, Mixed, "init_equivalence"),
    (MeanOfAll, MeanOfChannels, "causal_along_positions"),
    (MeanOfAll, MeanOfChannels, "incremental_decode"),
    (Narrow, Wide, "depth_statistics_are_wide"),
    (Float32, Float32Mended, "init_equivalence"),
    (InPlace, Stream, "state_is_immutable"),
    (Keeps, Stream, "graph_is_released"),
    (Scaled, Stream, "init_equivalence"),
    (PromptForgets, Conv, "chunk_size_invariance"),
    (WritesCache, Conv, "forked_cache"),
    (OneTooMany, Conv, "receptive_field_is_exact"),
    (TailIsLeft, Conv, "causal_along_positions"),
    (Documents, OwnDocuments, "document_isolation"),
]


@pytest.mark.parametrize(("faulty", "mended", "name"), FAULTS, ids=lambda one: getattr(one, "__name__", one))
def test_a_known_fault_is_found(faulty: type[Any], mended: type[Any], name: str) -> None:
    def result(adapter: type[Any]) -> Any:
        one = [check for check in foreign_checks(adapter) if check.name == name]
        return next(iter(iterate_foreign(adapter, one, slow=False)))

    found = result(faulty)
    assert found.ok is False and found.message and "\n" not in found.message
    assert result(mended).ok is True


def test_what_an_adapter_cannot_support_is_not_run_and_says_why() -> None:
    class Plain(ForeignSequence):
        def forward(self, x: Tensor) -> Tensor:
            return x

    for adapter, left in (
        (Plain, {"forked_cache", "document_isolation", "sublayer_init_equivalence"}),
        (Conv, {"left_padding"}),
    ):
        results = {one.name: one for one in check_foreign(adapter, slow=False)}
        assert all(one.message.startswith("not run: ") for one in results.values() if one.ok is None)
        assert {name for name, one in results.items() if one.ok is None} >= left | {"compiles_once"}
        assert set(results) == {check.name for check in foreign_checks(adapter)}


@pytest.mark.parametrize("adapter", [Stream, Conv])
def test_checks_that_are_not_run_exist(adapter: type[Any]) -> None:
    both = {check.name for each in (Stream, Conv) for check in foreign_checks(each)}
    assert set(not_run(adapter)) <= both
