"""The weights that mixers report are the ones they use: sources times weights are the very tensors they return."""

from typing import Any

import pytest
import torch

from twoaxis import DEPTH, Decoder
from twoaxis.audit.open_loop import Probe, Sample, Written, run_pass
from twoaxis.core.measure import distance, tensors
from twoaxis.core.views import WeightedSum
from twoaxis.depth.base import Mix, Read, Write
from twoaxis.model.trace import sublayer_list

from .toy import batches, model

EXAMPLES = [pytest.param(row.kind, name, id=f"{row.kind}-{name}") for row in DEPTH for name in row.examples]

SUMMED = {row.kind for row in DEPTH if row.sums == "read"}
"""The kinds that read weighted sums of sources."""

WITHOUT = {
    ("denseformer", "skip_gains"),
    ("depth_attention", "itself"),
    ("depth_attention", "own_itself"),
    ("depth_value_mixing", "off"),
    ("mixture_of_depths_attention", "off"),
}
"""Examples of them that have no choice to make."""

WITH = {("value_embedding", "nanochat")}
"""Examples of others, around a mixer of the stream that does."""

ROUNDING = 1e-12


class Collector(Probe):
    """Keeps every sum, and checks that what it was made into is among what the mixer returned."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder, self.sublayers = decoder, sublayer_list(decoder)
        self.sums: list[tuple[int, WeightedSum]] = []

    def add(self, index: int, sums: tuple[WeightedSum, ...], returned: Any) -> None:
        self.sums += [(index, one) for one in sums]
        for one in sums:
            assert any(one.made is t for t in tensors(returned)), f"{one.result} of sublayer {index}"

    def read(self, index: int, state: Any, views: Any, carry: Any) -> tuple[Any, Any]:
        self.add(index, self.sublayers[index].depth.explain(Read(state, views, carry)).sums, (views, carry))
        return views, carry

    def mixed(self, index: int, mix: Mix) -> Mix:
        self.add(index, self.sublayers[index].depth.explain(mix).sums, (mix.mixed, mix.next_state))
        return mix

    def written(self, index: int, written: Written) -> Any:
        done = Write(*written[1:])
        self.add(index, self.sublayers[index].depth.explain(done).sums, written.next_state)
        return written.next_state

    def left(self, state: Any, left: Any) -> Any:
        self.add(len(self.sublayers), self.decoder.ends.explain(Read(state, left)).sums, left)
        return left


@torch.no_grad()
def sums_of(decoder: Decoder) -> list[tuple[int, WeightedSum]]:
    collector = Collector(decoder)
    run_pass(decoder, Sample.of(batches(1)[0]), collector)
    return collector.sums


@pytest.mark.parametrize(("kind", "name"), EXAMPLES)
def test_sources_times_weights_are_what_is_read(kind: str, name: str) -> None:
    found = sums_of(model(DEPTH[kind].example(name)))
    assert any(one.role == "read" for _, one in found) == (
        (kind in SUMMED and (kind, name) not in WITHOUT) or (kind, name) in WITH
    )
    for index, one in found:
        assert len(one.names) == len(one.sources) == len(one.weights) == len(set(one.names)), (index, one.names)
        assert len(one.parts) in (0, one.weights.shape[-1])
        largest = float(one.made.abs().max())
        assert distance(one.finished(one.total()), one.made) <= ROUNDING * max(1.0, largest), (index, one.result)


@pytest.mark.parametrize("kind", sorted(SUMMED))
def test_without_a_source_its_share_is_gone(kind: str) -> None:
    found = sums_of(model(DEPTH[kind].example(next(iter(DEPTH[kind].examples)))))
    _, one = [pair for pair in found if len(pair[1].names) > 1][-1]
    rest = sum((one.contribution(index) for index in range(1, len(one.names))), torch.zeros(()))
    assert distance(one.without(0), one.finished(rest)) <= ROUNDING * max(1.0, float(one.made.abs().max()))
    assert distance(one.without(0), one.made) > 1e-6


def test_names_mean_the_same_at_every_sublayer() -> None:
    found = sums_of(model({"kind": "attention_residuals", "block_size": 4}))
    assert [one.names for _, one in found] == [("embedding", "sublayers 0-3")] * 4 + [
        ("embedding", "sublayers 0-3", "sublayers 4-5")
    ] * 2
    found = sums_of(model({"kind": "deep_cross_attention", "k": 1}, n_layers=4))
    assert found[-1][1].names == ("embedding", "blocks 0-2", "block 3")
    found = sums_of(model({"kind": "delta_attention_residuals", "block_size": 2, "null_source": "learned"}))
    assert found[-1][1].names == ("null", "embedding", "sublayers 0-1", "sublayers 2-3")


def test_streams_are_sums_of_streams_and_update() -> None:
    found = [one for _, one in sums_of(model("hyper_connections")) if one.role == "mix"]
    assert {one.result for one in found} == {f"stream {s}" for s in range(4)}
    assert found[0].names == ("stream 0", "stream 1", "stream 2", "stream 3", "update")
