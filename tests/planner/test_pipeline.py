"""Orders equal torch's; what crosses a boundary equals the published formulas, and collectives what a ring sends."""

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Literal
from unittest.mock import MagicMock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.pipelining import schedules

from twoaxis import DEPTH, DecoderConfig
from twoaxis.core.cost import Cost, Shape
from twoaxis.core.design import InitEquivalence, MixingDesign
from twoaxis.core.position import LayerStack, SublayerPosition
from twoaxis.core.registry import Row
from twoaxis.depth import AttentionResidualsConfig
from twoaxis.depth.base import DepthConfig, DepthEnds, DepthMixer, Layout
from twoaxis.ledger.stack import trace_stack
from twoaxis.planner.coefficients import coefficients
from twoaxis.planner.formulas import collectives
from twoaxis.planner.formulas.collectives import even_cuts, hop_bytes
from twoaxis.planner.formulas.counts import cache_bytes_of, parameter_counts
from twoaxis.planner.formulas.schedules import gpipe_order, interleaved_order, one_f_one_b_order, schedule_order
from twoaxis.planner.formulas.training_step import exposed_data_seconds
from twoaxis.planner.hardware import read_device
from twoaxis.planner.ledger import FORWARDINGS
from twoaxis.planner.model.shape import ModelShape
from twoaxis.planner.setting import ParallelLayout, Setting

from ..payload import edges, payload

KINDS = {schedules.FORWARD: "forward", schedules.FULL_BACKWARD: "backward"}


class Stage:
    """A stage that runs nothing and notes what a schedule asks of it."""

    def __init__(self, index: int) -> None:
        self.stage_index, self.actions = index, []

    def forward_one_chunk(self, microbatch: int, *rest: Any, **options: Any) -> None:
        self.actions.append(["forward", self.stage_index, microbatch])

    def backward_one_chunk(self, microbatch: int, **options: Any) -> None:
        self.actions.append(["backward", self.stage_index, microbatch])

    def no_operations(self, microbatch: int) -> list:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = no_operations

    def perform_reduce_grad(self, scale: int) -> None:
        pass


def run_by_torch(schedule: Any, ranks: int, microbatches: int) -> list[list[list]]:
    """The order that a schedule with one stage on each rank runs; its own table of 1F1B misnumbers the last rank."""
    stages = [Stage(rank) for rank in range(ranks)]
    for stage in stages:
        known = MagicMock(_stage=stage, _num_stages=ranks, _n_microbatches=microbatches)
        known._check_inputs.return_value = [()] * microbatches, [{}] * microbatches
        schedule._step_microbatches(known)
    return [stage.actions for stage in stages]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 4, 12])
def test_orders_with_one_stage_on_a_rank_are_those_of_torch(ranks: int, microbatches: int) -> None:
    assert gpipe_order(ranks, microbatches) == run_by_torch(schedules.ScheduleGPipe, ranks, microbatches)
    assert one_f_one_b_order(ranks, microbatches) == run_by_torch(schedules.Schedule1F1B, ranks, microbatches)


def of_torch(actions: list[Any]) -> list[list]:
    """The computations of one rank, without idle steps."""
    found = [action for action in actions if action is not None and action.computation_type in KINDS]
    return [[KINDS[action.computation_type], action.stage_index, action.microbatch_index] for action in found]


@pytest.mark.parametrize(
    ("ranks", "virtual", "microbatches"),
    [(2, 2, 2), (2, 2, 4), (2, 3, 6), (3, 2, 3), (4, 2, 8), (4, 3, 12), (4, 2, 10), (4, 2, 3), (3, 4, 2), (1, 3, 2)],
)
def test_interleaved_order_is_that_of_torch(ranks: int, virtual: int, microbatches: int) -> None:
    rounds = max(1, microbatches // ranks)
    known = SimpleNamespace(
        n_local_stages=virtual,
        pp_group_size=ranks,
        _n_microbatches=microbatches,
        microbatches_per_round=microbatches // rounds,
    )
    operations = schedules.ScheduleInterleaved1F1B._calculate_single_rank_operations
    expected = [of_torch(operations(known, rank)) for rank in range(ranks)]  # type: ignore[arg-type]
    assert interleaved_order(ranks, virtual, microbatches) == expected


@given(st.sampled_from(["gpipe", "1f1b", "interleaved"]), st.integers(1, 5), st.integers(1, 4), st.integers(1, 6))
def test_every_order_runs_every_microbatch_once_through_every_stage(
    schedule: str, ranks: int, virtual: int, rounds: int
) -> None:
    virtual = virtual if schedule == "interleaved" else 1
    order = schedule_order(schedule, ranks, virtual, rounds * ranks)
    for rank, actions in enumerate(order):
        stages = range(rank, ranks * virtual, ranks)
        wanted = set(itertools.product(("forward", "backward"), stages, range(rounds * ranks)))
        assert len(actions) == len(wanted) and {tuple(action) for action in actions} == wanted


class History(DepthConfig):
    """Keeps the embedding and the sum of every `size` blocks; the running sum is a new tensor after each sublayer."""

    kind: Literal["history"] = "history"
    size: int = 1

    @property
    def design(self) -> MixingDesign:
        return MixingDesign("none", "none", "sums", "none", "all", "none", "replaces the stream")

    @property
    def init_equivalence(self) -> InitEquivalence:
        return InitEquivalence("none", "a history for tests")

    def cost(self, site: SublayerPosition, shape: Shape) -> Cost:
        return Cost()

    def build(self, stack: LayerStack) -> tuple[list[DepthMixer], DepthEnds]:
        apart = self.size * stack.block_lengths[0]
        return [Summing(opens=site.index % apart == 0) for site in stack.sites], SummingEnds()


def source(x: Tensor) -> tuple[Tensor, Tensor]:
    """A source of its own, and a statistic of it."""
    return x, x.float().square().mean(-1)


class Summing(DepthMixer):
    def __init__(self, opens: bool) -> None:
        super().__init__()
        self.opens = opens

    def read(self, state: Any, layout: Layout = None, cache: Any = None) -> tuple[Tensor, None, Any]:
        return state[-1][0], None, cache

    def write(self, state: Any, update: Tensor, context: Any, carry: None) -> Any:
        # Each running sum is a new tensor.
        return (*state, source(update)) if self.opens else (*state[:-1], source(state[-1][0] + update))


class SummingEnds(DepthEnds):
    def enter(self, embeddings: Tensor, layout: Layout = None, cache: Any = None) -> tuple[Any, Any]:
        return (source(embeddings),), cache

    def leave(self, state: Any, layout: Layout = None, cache: Any = None) -> tuple[Tensor, Any]:
        return state[-1][0], cache


def model(n_layers: int, size: int = 1, width: int = 8) -> ModelShape:
    block = [{"kind": "attention", "n_heads": 2}, "swiglu"]
    data = {"vocab_size": 16, "d_model": width, "n_layers": n_layers, "blocks": [block]}
    return ModelShape.of_decoder(DecoderConfig.from_data(data)).with_depth(History(size=size))


PIPELINES = [(2, 1), (2, 2), (3, 2), (4, 3), (2, 5)]


def published(ranks: int, virtual: int) -> tuple[int, int]:
    """Arrivals of block sums in arXiv:2603.15031 for one new block in each chunk: naive and cached."""
    chunks = ranks * virtual
    return chunks * (chunks - 1) // 2, ranks * (ranks - 1) // 2 + (virtual - 1) * ranks**2


@pytest.mark.parametrize(("ranks", "virtual"), PIPELINES)
@pytest.mark.parametrize("each", [1, 2])
def test_payload_is_what_the_paper_counts_and_the_embedding(ranks: int, virtual: int, each: int) -> None:
    shape = model(ranks * virtual * each)
    naive, cached = published(ranks, virtual)
    source = 8 * 2 + 4  # Numbers of the model in two bytes, and an inverse rms in four.
    found = {forwarding: payload(shape, ranks, virtual, forwarding) for forwarding in FORWARDINGS}
    # The paper counts block sums only. The embedding goes along in each hop, or once to each rank that has not received it:
    # to the first one too when the pipeline comes round, for it made it.
    assert found["naive"].total == (each * naive + ranks * virtual - 1) * source
    assert found["cached"].total == (each * cached + ranks - 1 + (virtual > 1)) * source
    # What a rank has made itself, it need not be sent: one chunk less in every hop after the first round.
    assert found["cached_own"].total == (each * (cached - (virtual - 1) * ranks) + ranks - 1) * source


@pytest.mark.parametrize(("ranks", "virtual"), PIPELINES)
def test_the_largest_hop_falls_from_all_stages_to_those_of_one_round(ranks: int, virtual: int) -> None:
    shape, source = model(ranks * virtual), 8 * 2 + 4
    assert payload(shape, ranks, virtual, "naive").peak == ranks * virtual * source
    # At most P block sums, beside the embedding on the way to the first rank.
    assert payload(shape, ranks, virtual, "cached").peak == (ranks + (virtual > 1)) * source
    assert payload(shape, ranks, virtual, "cached_own").peak == ranks * source


def named(shape: ModelShape) -> list[dict[Any, int]]:
    """Bytes per token of the tensors of every state by name: of a `History` what it says, of other mixers what they make."""
    depth, stack = shape.depth, shape.stack
    if not isinstance(depth, History):
        found = trace_stack(depth, stack, Shape(1, 1, 2), traffic=False).states
        return [{tensor.number: tensor.bytes for tensor in state} for state in found]
    states, length = list[dict[Any, int]](), depth.size * stack.block_lengths[0]
    for index in range(stack.n_sublayers + 1):
        names = ["embedding", *(f"sum {n}" for n in range(index // length)), *([f"running {index}"] if index % length else [])]
        # Numbers of the model in two bytes, and a statistic in four.
        states.append(dict.fromkeys(names, 2 * stack.d_model + 4))
    return states


def holdings(states: list[dict[Any, int]], ranks: int, cuts: tuple[int, ...], forwarding: str) -> Iterator[int]:
    """Bytes of each hop by playing a microbatch through the ranks, with a set of names on each."""
    held: list[set[Any]] = [set() for _ in range(ranks)]
    for chunk, (first, last) in enumerate(itertools.pairwise(cuts)):
        rank, entering = chunk % ranks, states[first]
        if chunk:
            yield sum(size for name, size in entering.items() if name not in held[rank] or forwarding == "naive")
            held[rank] |= set(entering)
        if forwarding == "cached_own":
            held[rank] |= {name for state in states[first : last + 1] for name in state}


@given(st.integers(2, 4), st.integers(1, 3), st.integers(1, 14), st.integers(1, 3), st.sampled_from(FORWARDINGS))
def test_payload_is_what_a_microbatch_that_is_played_through_moves(
    ranks: int, virtual: int, n_layers: int, size: int, forwarding: Any
) -> None:
    shape = model(max(n_layers, ranks * virtual), size)
    expected = tuple(holdings(named(shape), ranks, edges(shape, ranks * virtual), forwarding))
    assert payload(shape, ranks, virtual, forwarding).hops == expected


def held_for(states: list[dict[Any, int]], ranks: int, cuts: tuple[int, ...], forwarding: str) -> list[dict[Any, int]]:
    """The chunk that each rank has a tensor from, by name."""
    origins: list[dict[Any, int]] = [{} for _ in range(ranks)]
    for chunk in range(len(cuts) - 1):
        own = states[cuts[chunk] : cuts[chunk + 1] + 1] if forwarding == "cached_own" else []
        entering = [states[cuts[chunk]]] if chunk else []
        for name in (name for state in (*entering, *own) for name in state):
            origins[chunk % ranks].setdefault(name, chunk)
    return origins


@given(st.integers(2, 4), st.integers(1, 3), st.integers(1, 14), st.integers(1, 3), st.sampled_from(["cached", "cached_own"]))
def test_gradients_wait_as_long_as_a_backward_pass_that_is_played_through_says(
    ranks: int, virtual: int, n_layers: int, size: int, forwarding: Any
) -> None:
    shape = model(max(n_layers, ranks * virtual), size)
    cuts, found = edges(shape, ranks * virtual), payload(shape, ranks, virtual, forwarding)
    states = named(shape)
    origins = held_for(states, ranks, cuts, forwarding)
    waits: list[dict[Any, int]] = [{} for _ in range(ranks)]
    sums = [0] * ranks
    for chunk in reversed(range(ranks * virtual)):
        rank, entering = chunk % ranks, states[cuts[chunk]] if chunk else {}
        waits[rank] |= {name: size for name, size in entering.items() if origins[rank][name] < chunk}
        sums[rank] += found.waiting[0][chunk]
        assert sums[rank] == sum(waits[rank].values())
        waits[rank] = {name: count for name, count in waits[rank].items() if origins[rank][name] < chunk}
        sums[rank] -= found.waiting[1][chunk]
        assert sums[rank] == sum(waits[rank].values())
    assert sums == [0] * ranks


def test_nothing_waits_where_every_boundary_sends_the_whole_state() -> None:
    assert payload(model(8), 2, 2, "naive").waiting == ((0,) * 4, (0,) * 4)


@pytest.mark.parametrize("row", list(DEPTH), ids=lambda row: row.kind)
def test_payload_of_every_depth_mixer_is_what_its_named_tensors_say(row: Row) -> None:
    # Those of every example are the tensors of real stages: tests/distributed/test_pipeline_plan.py.
    for name in dict.fromkeys([next(iter(row.examples)), list(row.examples)[-1]]):
        shape = model(6, width=24).with_depth(row.example(name))
        states = named(shape)
        for forwarding in FORWARDINGS:
            expected = tuple(holdings(states, 3, edges(shape, 6), forwarding))
            assert payload(shape, 3, 2, forwarding).hops == expected, (name, forwarding)


def test_a_stream_costs_the_same_however_it_is_forwarded() -> None:
    shape = model(8).with_depth(DecoderConfig.from_data({"vocab_size": 8, "d_model": 8, "n_layers": 1}).depth)
    assert {payload(shape, 2, 2, forwarding).hops for forwarding in FORWARDINGS} == {(16, 16, 16)}


def test_one_rank_sends_nothing() -> None:
    assert payload(model(4), 1, 4, "naive").hops == (0, 0, 0)


@given(st.integers(1, 30), st.integers(1, 30))
def test_chunks_are_whole_blocks_as_even_as_can_be(blocks: int, chunks: int) -> None:
    cuts = even_cuts(blocks, chunks)
    sizes = [after - before for before, after in itertools.pairwise(cuts)]
    assert cuts[0] == 0 and cuts[-1] == blocks and len(sizes) == chunks
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)


def test_edges_count_sublayers() -> None:
    assert edges(model(5), 2) == (0, 6, 10)


def test_a_leaf_that_came_and_went_is_not_sent() -> None:
    # Alive at the second boundary of three only.
    assert hop_bytes([[2, 2, 7]], [0, 1, 2, 3], 3, "naive") == [0, 7]


def test_attention_residuals_send_less_with_larger_blocks_and_a_cache() -> None:
    sizes = {"full": 1, "blocks of 4": 4, "blocks of 12": 12}
    found = {
        (name, forwarding): payload(model(12).with_depth(AttentionResidualsConfig(block_size=size)), 3, 2, forwarding)
        for name, size in sizes.items()
        for forwarding in FORWARDINGS
    }
    source = 8 * 2 + 4
    # Two layers, so four sublayers, in each of six chunks.
    naive, cached = published(3, 2)
    assert found["full", "naive"].total == (4 * naive + 5) * source
    assert found["full", "cached"].total == (4 * cached + 3) * source
    assert found["blocks of 4", "naive"].total == (naive + 5) * source
    assert found["blocks of 4", "cached"].total == (cached + 3) * source
    # Blocks of 12 sublayers span three chunks, so a running sum is sent again as often as it has grown.
    assert found["blocks of 12", "naive"].total == (5 + 1 + 1 + 1 + 2 + 2) * source
    for forwarding in FORWARDINGS:
        totals = [found[name, forwarding].total for name in sizes]
        assert totals == sorted(totals, reverse=True)


def ring(ranks: int, parts: int) -> list[int]:
    """Parts that each rank sends in a ring that reduces and scatters, then gathers; checks that all end with the sum."""
    held = [[{rank} for _ in range(ranks)] for rank in range(ranks)]
    sent = [0] * ranks
    for step in range(2 * (ranks - 1)):
        moves = [(rank, (rank - step) % ranks) for rank in range(ranks)]
        carried = [set(held[rank][part]) for rank, part in moves]
        for (rank, part), content in zip(moves, carried, strict=True):
            held[(rank + 1) % ranks][part] |= content
            sent[rank] += parts // ranks
    assert all(part == set(range(ranks)) for parts_of_rank in held for part in parts_of_rank)
    return sent


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_collectives_send_what_a_ring_sends(ranks: int) -> None:
    whole = 120 * ranks
    assert ring(ranks, whole) == [collectives.all_reduce_bytes(ranks, whole)] * ranks
    halves = collectives.reduce_scatter_bytes(ranks, whole) + collectives.all_gather_bytes(ranks, whole)
    assert halves == collectives.all_reduce_bytes(ranks, whole)


def test_tensor_parallel_moves_as_much_cut_or_whole_but_for_one_gather_of_saved_inputs() -> None:
    none, cut = (collectives.tensor_parallel_bytes(4, 3, 10, 8, 2, sequence) for sequence in ("none", "tensor"))
    assert none == 3 * 4 * (10 * 8 * 2) * 3 / 4
    assert cut - none == 3 * collectives.all_gather_bytes(4, 10 * 8 * 2)
    assert collectives.tensor_parallel_bytes(1, 3, 10, 8, 2, "tensor") == 0


def plain(depth: str) -> ModelShape:
    return ModelShape.of_decoder(DecoderConfig.from_data({"vocab_size": 64, "d_model": 64, "n_layers": 3, "depth": depth}))


def test_a_prefill_sends_as_much_cut_or_whole() -> None:
    assert collectives.tensor_parallel_forward_bytes(4, 3, 10, 8, 2) == 3 * 2 * (10 * 8 * 2) * 3 / 4
    numbers, seconds = coefficients(plain("residual")), {}
    for sequence in ("none", "tensor"):
        layout = ParallelLayout.from_data({"gpus": 2, "tensor": 2, "sequence": sequence})
        setting = Setting(read_device("h100"), layout, batch=4, tokens=512)
        seconds[sequence] = setting.prefill(numbers, 1, 512)["link_seconds"]
    assert seconds["none"] == seconds["tensor"] > 0


def test_a_rank_generates_with_its_share_of_the_heads_and_whole_depth_parameters() -> None:
    numbers = coefficients(plain("muddformer"))
    one, two = (
        Setting(read_device("h100"), ParallelLayout(gpus=n, tensor=n), batch=4, tokens=512).generation_bytes(numbers, 3, 512)
        for n in (1, 2)
    )
    params = parameter_counts(numbers)
    assert one == params["all"] * 2 + 3 * cache_bytes_of(numbers, 512, 1)
    norms = sum(sub["norms"] for sub in numbers["sublayers"]) * numbers["norm_params"] + numbers["norm_params"]
    assert 2 * two - one == pytest.approx((params["depth"] + norms) * 2)


def test_gathering_weights_overlaps_with_every_microbatch() -> None:
    model = {"weights_bytes": 2, "gradients_bytes": 4}
    link = {"bytes_per_second": 1000.0, "latency_seconds": 0.0}
    run = {"data": 2, "microbatches": 5, "sharding": "weights"}
    # Gathered 1 s, gathered again and reduced 3 s, of which 0.5 s and 1 s are hidden.
    assert exposed_data_seconds(model, run, 1000, 0.5, 1.0, link) == 5 * (0.5 + 2.0)
    assert exposed_data_seconds(model, run | {"sharding": "none"}, 1000, 0.5, 1.0, link) == 4 - 1.0


def test_gradients_over_data_ranks() -> None:
    whole, optimizer, weights = (
        collectives.data_parallel_bytes(4, 1000, 4, 2, 3, sharding) for sharding in ("none", "optimizer", "weights")
    )
    assert (whole, optimizer) == (6000, 3000 + 1500)
    assert weights == 3 * (1500 + 1500 + 3000)


def test_mixing_parameters_cost_an_all_reduce_where_a_rank_sees_its_part_of_the_tokens_only() -> None:
    assert collectives.mixing_gradient_bytes(4, 100, 4, "tensor") == 600
    assert collectives.mixing_gradient_bytes(4, 100, 4, "none") == 0


def test_prefill_holds_what_the_paper_says() -> None:
    # 8 block sums of 7168 numbers in two bytes, for 128k = 2^17 tokens; the embedding would be a ninth source.
    sources, tokens = 8 * 7168 * 2, 2**17
    held = [collectives.stored_bytes(sources, tokens, *how) / 1e9 for how in ((0, 1, "none"), (0, 8, "tensor"))]
    assert held == [pytest.approx(15.03, abs=0.01), pytest.approx(1.88, abs=0.01)]
    assert collectives.stored_bytes(sources, tokens, 2**14, 8, "tensor") / 1e9 == pytest.approx(0.235, abs=0.001)
    assert collectives.stored_bytes(sources, tokens, 0, 8, "none") / 1e9 == held[0]
    assert collectives.stored_bytes(9 * 7168 * 2, tokens, 0, 1, "none") / 1e9 == pytest.approx(16.91, abs=0.01)
    assert collectives.stored_tokens(10, 0, 4, "tensor") == 3 and collectives.stored_tokens(10, 64, 1, "none") == 10
