"""A training step on many devices, and a step of generation: seconds and bytes.

A `run` has `batch` sequences of `tokens` in one microbatch, `microbatches` of them, `pipeline` ranks with `virtual` stages
each, `schedule` and `transfers` as in `formulas.schedules`, `forwarding`, `data` replicas and their `sharding` as in
`formulas.collectives`, `recompute` "off" or "block", and `tensor`, `sequence` and `engine` as in `formulas.roofline`.
"""

from typing import Any

from twoaxis.planner.formulas.collectives import (
    all_gather_bytes,
    all_reduce_bytes,
    data_parallel_bytes,
    even_cuts,
    hop_bytes,
    mixing_gradient_bytes,
    reduce_scatter_bytes,
    stored_bytes,
    waiting_bytes,
)
from twoaxis.planner.formulas.counts import (
    boundary_of_block,
    ends_saved_bytes,
    forward_counts,
    largest_block_bytes,
    recomputed_bytes_of,
    saved_bytes_of,
    state_bytes,
)
from twoaxis.planner.formulas.roofline import collective_seconds, head_seconds, memory_seconds, sublayer_seconds, tokens_on_rank
from twoaxis.planner.formulas.schedules import peak_memory, schedule_order, simulate, transfer_seconds

Data = dict[str, Any]


def work_of(run: Data) -> Data:
    """The `work` of one microbatch of a training step."""
    return {
        "batch": run["batch"],
        "tokens": run["tokens"],
        "context": 0,
        "tensor": run["tensor"],
        "sequence": run["sequence"],
        "engine": run["engine"],
    }


def stage_seconds(model: Data, run: Data, rates: Data, link: Data) -> Data:
    """Seconds of one microbatch in every stage, forward and backward, and those of depth operations in both."""
    work = work_of(run)
    stages = run["pipeline"] * run["virtual"]
    edges = edges_of(model, run)
    found = {"forward": [], "backward": [], "depth": [], "link": []}
    for stage in range(stages):
        forward = 0
        backward = 0
        depth = 0
        shared = 0
        for index in range(edges[stage], edges[stage + 1]):
            part = sublayer_seconds(model, model["sublayers"][index], work, rates, link)
            forward = forward + part["forward"] + part["depth"] + part["link"]
            backward = backward + part["backward"] + part["depth_back"] + part["link_back"]
            depth = depth + part["depth"] + part["depth_back"]
            shared = shared + part["link"] + part["link_back"]
            if run["recompute"] == "block":
                backward = backward + part["forward"] + part["depth"] + part["link"]
                depth = depth + part["depth"]
        if stage == stages - 1:
            head = head_seconds(model, work, rates)
            forward = forward + head["forward"] + head["depth"]
            backward = backward + head["backward"] + head["depth_back"]
            depth = depth + head["depth"] + head["depth_back"]
        found["forward"].append(forward)
        found["backward"].append(backward)
        found["depth"].append(depth)
        found["link"].append(shared)
    return found


def edges_of(model: Data, run: Data) -> list[int]:
    """The sublayers at which the stages begin, and the end."""
    return [boundary_of_block(model, block) for block in even_cuts(model["n_layers"], run["pipeline"] * run["virtual"])]


def sent_bytes(model: Data, run: Data) -> list[float]:
    """Bytes of one microbatch over the boundary after every stage but the last."""
    tokens = tokens_on_rank(work_of(run))
    return [tokens * hop for hop in hop_bytes(model["leaves"], edges_of(model, run), run["pipeline"], run["forwarding"])]


def gradients_waiting(model: Data, run: Data) -> list[list[float]]:
    """Bytes of gradients of one microbatch that start and that stop accumulating for an earlier stage of the rank."""
    tokens = tokens_on_rank(work_of(run))
    found = waiting_bytes(model["leaves"], edges_of(model, run), run["pipeline"], run["forwarding"])
    return [[tokens * each for each in part] for part in found]


def stage_memory(model: Data, run: Data) -> Data:
    """Bytes in every stage: `fixed` for weights, gradients and optimizer, `saved` of one microbatch for its backward pass.

    Also `params`, `depth_params`, those that are whole on every tensor-parallel rank, and `matrices`, those that have no second
    moment. Parameters that the ends share with the sublayers are on every pipeline rank once, with its first stage.
    """
    stages = run["pipeline"] * run["virtual"]
    edges = edges_of(model, run)
    tokens = tokens_on_rank(work_of(run))
    matrix = model["vocab_size"] * model["d_model"]
    replicas = run["data"]
    weights = model["weights_bytes"] / (replicas if run["sharding"] == "weights" else 1)
    gradients = model["gradients_bytes"] / (replicas if run["sharding"] == "weights" else 1)
    shards = 1 if run["sharding"] == "none" else replicas
    each = weights + gradients + model["optimizer_bytes"] / shards
    fixed = []
    matrices = []
    saved = []
    params = []
    depth_params = []
    for stage in range(stages):
        first = edges[stage]
        last = edges[stage + 1]
        here = 0
        depth = 0
        own = 0
        for index in range(first, last):
            sub = model["sublayers"][index]
            own = own + sub["matrices"] / run["tensor"] + sub["depth"]["matrices"]
            here = here + sub["params"] / run["tensor"] + sub["norms"] * model["norm_params"]
            depth = depth + sub["depth"]["params"]
        if stage == 0:
            here = here + matrix / run["tensor"]
        if stage < run["pipeline"]:
            depth = depth + model["ends"]["lent"]
        if stage == stages - 1:
            own = own + model["ends"]["matrices"]
            here = here + model["norm_params"]
            depth = depth + model["ends"]["params"] - model["ends"]["lent"]
            if model["tied"] == 0 or stage > 0:
                here = here + matrix / run["tensor"]
        kept = 0
        if run["recompute"] == "block":
            kept = recomputed_bytes_of(model, first, last, tokens)
        else:
            kept = saved_bytes_of(model, first, last, tokens)
        if stage == stages - 1:
            kept = kept + ends_saved_bytes(model, tokens, run["tensor"])
        params.append(here + depth)
        depth_params.append(depth)
        matrices.append(own)
        fixed.append((here + depth) * each - own * model["moment_bytes"] / shards)
        saved.append(kept)
    return {"fixed": fixed, "saved": saved, "params": params, "depth_params": depth_params, "matrices": matrices}


def by_rank(values: list[float], ranks: int) -> list[float]:
    """Sums over the stages of each rank."""
    found = [0.0 for _ in range(ranks)]
    for stage in range(len(values)):
        found[stage % ranks] = found[stage % ranks] + values[stage]
    return found


def training_step(model: Data, run: Data, rates: Data, links: Data) -> Data:
    """One training step: seconds, and bytes on every pipeline rank.

    Args:
        model: coefficients.
        run: see the top of this module.
        rates: of the device.
        links: of the `tensor`, `pipeline` and `data` ranks.
    """
    ranks = run["pipeline"]
    seconds = stage_seconds(model, run, rates, links["tensor"])
    sent = sent_bytes(model, run)
    link = link_seconds(sent, links["pipeline"])
    memory = stage_memory(model, run)
    fixed = by_rank(memory["fixed"], ranks)
    flow = pipeline_flow(model, run, seconds, sent, link, memory["saved"], fixed)
    peaks = flow["peaks"]
    updates = update_seconds(model, run, memory, seconds, rates, links)
    if run["recompute"] == "block":
        last_index = len(model["sublayers"])
        largest = largest_block_bytes(model, 0, last_index, tokens_on_rank(work_of(run)))
        peaks = [peak + largest for peak in peaks]
    step = flow["step_seconds"] + updates["gradients"] + updates["optimizer"]
    tokens = run["batch"] * run["tokens"] * run["microbatches"] * run["data"]
    depth = 0
    for value in seconds["depth"]:
        depth = depth + value
    return {
        "step_seconds": step,
        "tokens_per_second": tokens / step,
        "pipeline_seconds": flow["step_seconds"],
        "exposed_seconds": flow["exposed_seconds"],
        "bubble": flow["bubble"],
        "gradient_seconds": updates["gradients"],
        "optimizer_seconds": updates["optimizer"],
        "depth_seconds": depth * run["microbatches"] / ranks,
        "sent_bytes": sent,
        "data_bytes": updates["data_bytes"],
        "memory_bytes": peaks,
        "flops": 3 * forward_counts(model, run["batch"], run["tokens"])["all"] * run["microbatches"] * run["data"],
        "simulation": flow["simulation"],
    }


def link_seconds(sent: list[float], link: Data) -> list[float]:
    """Seconds for which the messages over each boundary occupy the link."""
    return [transfer_seconds(b, link["pair_bytes_per_second"], link["latency_seconds"]) for b in sent]


def simulated_microbatches(ranks: int, microbatches: int) -> list[int]:
    """The two numbers of microbatches from whose simulations a step is extrapolated; a small number is simulated itself.

    After the pipeline is full, a step is periodic in the microbatches, with a period of at most the ranks. So the two numbers
    differ by a multiple of the ranks, from each other and from the number asked.
    """
    if microbatches <= 6 * ranks:
        return [microbatches, microbatches]
    more = 5 * ranks + microbatches % ranks
    return [more - 2 * ranks, more]


def extended(fewer: float, more: float, counts: list[int], microbatches: int) -> float:
    """Extrapolates linearly in the microbatches, from the values at two numbers of them.

    Example:
        >>> extended(3.0, 5.0, [1, 2], 4)
        9.0
    """
    if counts[0] == counts[1]:
        return more
    return more + (microbatches - counts[1]) * (more - fewer) / (counts[1] - counts[0])


def pipeline_flow(
    model: Data, run: Data, seconds: Data, sent: list[float], link: list[float], saved: list[float], fixed: list[float]
) -> Data:
    """Seconds of the pipeline of one step, and peak bytes of each rank; many microbatches are extrapolated from fewer.

    Args:
        model: coefficients.
        run: see the top of this module.
        seconds: of one microbatch in each stage.
        sent: bytes of one over each boundary.
        link: seconds of these messages.
        saved: bytes that each stage saves for backward of one.
        fixed: bytes of each rank for weights, gradients and optimizer.
    """
    ranks = run["pipeline"]
    counts = simulated_microbatches(ranks, run["microbatches"])
    free = [0.0 for _ in link]
    waiting = gradients_waiting(model, run)
    found = []
    for count in counts:
        order = schedule_order(run["schedule"], ranks, run["virtual"], count)
        real = simulate(order, seconds["forward"], seconds["backward"], link, link, run["transfers"])
        ideal = simulate(order, seconds["forward"], seconds["backward"], free, free, run["transfers"])
        peaks = peak_memory(real, fixed, saved, sent, sent, waiting)
        found.append({"simulation": real, "step": real["step_seconds"], "ideal": ideal["step_seconds"], "peaks": peaks})
        if counts[0] == counts[1]:
            found.append(found[0])
            break
    step = extended(found[0]["step"], found[1]["step"], counts, run["microbatches"])
    ideal_step = extended(found[0]["ideal"], found[1]["ideal"], counts, run["microbatches"])
    busy = 0
    for stage in range(len(saved)):
        busy = busy + run["microbatches"] * (seconds["forward"][stage] + seconds["backward"][stage])
    return {
        "step_seconds": step,
        "exposed_seconds": step - ideal_step,
        "bubble": 1 - busy / ranks / step,
        "peaks": [
            extended(found[0]["peaks"][rank], found[1]["peaks"][rank], counts, run["microbatches"]) for rank in range(ranks)
        ],
        "simulation": found[1]["simulation"],
    }


def estimated_step(model: Data, run: Data, rates: Data, links: Data) -> Data:
    """Estimates the seconds of a training step and the peak bytes of any rank without a simulation, for the search.

    Equation: M max(t_r) + (sum(t_r) - max(t_r) + 2 sum(messages)) / V, t_r the seconds of one microbatch on rank r; what a
              rank keeps of a microbatch times those that its schedule has in flight
    """
    ranks = run["pipeline"]
    virtual = run["virtual"]
    seconds = stage_seconds(model, run, rates, links["tensor"])
    sent = sent_bytes(model, run)
    memory = stage_memory(model, run)
    both = [seconds["forward"][stage] + seconds["backward"][stage] for stage in range(ranks * virtual)]
    slowest = 0
    whole = 0
    for value in by_rank(both, ranks):
        slowest = max(slowest, value)
        whole = whole + value
    messages = 0
    for value in link_seconds(sent, links["pipeline"]):
        messages = messages + 2 * value
    pipeline = run["microbatches"] * slowest + (whole - slowest + messages) / virtual
    if run["transfers"] == "blocking":
        pipeline = pipeline + run["microbatches"] * messages / ranks
    updates = update_seconds(model, run, memory, seconds, rates, links)
    held = [memory["saved"][stage] + (sent[stage - 1] if stage > 0 else 0) for stage in range(ranks * virtual)]
    fixed = by_rank(memory["fixed"], ranks)
    each = by_rank(held, ranks)
    largest = 0
    for rank in range(ranks):
        flying = run["microbatches"]
        if run["schedule"] == "1f1b":
            flying = min(flying, ranks - rank)
        if run["schedule"] == "interleaved":
            flying = min(flying, ((virtual - 1) * ranks + 2 * (ranks - 1 - rank) + 1) / virtual)
        largest = max(largest, fixed[rank] + flying * each[rank])
    if run["recompute"] == "block":
        largest = largest + largest_block_bytes(model, 0, len(model["sublayers"]), tokens_on_rank(work_of(run)))
    return {"step_seconds": pipeline + updates["gradients"] + updates["optimizer"], "memory_bytes": largest}


def update_seconds(model: Data, run: Data, memory: Data, seconds: Data, rates: Data, links: Data) -> Data:
    """Seconds of the slowest rank for messages of gradients and weights, and for the optimizer; bytes of these messages.

    Args:
        model: coefficients.
        run: see the top of this module.
        memory: of every stage, from `stage_memory`.
        seconds: of one microbatch in every stage, from `stage_seconds`, with which messages between replicas overlap.
        rates: of the device.
        links: between the ranks of each group.
    """
    forward = min_of(by_rank(seconds["forward"], run["pipeline"]))
    backward = min_of(by_rank(seconds["backward"], run["pipeline"]))
    params = by_rank(memory["params"], run["pipeline"])
    mixing = by_rank(memory["depth_params"], run["pipeline"])
    matrices = by_rank(memory["matrices"], run["pipeline"])
    gradients = 0
    optimizer = 0
    data_bytes = 0
    lent = all_reduce_bytes(run["pipeline"], model["ends"]["lent"] * model["gradients_bytes"])
    for rank in range(run["pipeline"]):
        here = params[rank]
        shared = mixing_gradient_bytes(run["tensor"], mixing[rank], model["gradients_bytes"], run["sequence"])
        sent = data_parallel_bytes(
            run["data"], here, model["gradients_bytes"], model["weights_bytes"], run["microbatches"], run["sharding"]
        )
        data_bytes = max(data_bytes, sent)
        exposed = exposed_data_seconds(model, run, here, forward, backward, links["data"])
        gradients = max(gradients, exposed + collective_seconds(shared, links["tensor"]))
        shards = 1 if run["sharding"] == "none" else run["data"]
        moved = here / shards * (2 * model["optimizer_bytes"] + model["gradients_bytes"] + model["weights_bytes"])
        moved = moved - 2 * matrices[rank] / shards * model["moment_bytes"]
        optimizer = max(optimizer, memory_seconds(moved, rates))
    # Every pipeline rank adds to the gradient of parameters that the ends share, which is whole after the last microbatch.
    gradients = gradients + collective_seconds(lent, links["pipeline"])
    return {"gradients": gradients, "optimizer": optimizer, "data_bytes": data_bytes}


def exposed_data_seconds(model: Data, run: Data, params: float, forward: float, backward: float, link: Data) -> float:
    """Seconds of messages between replicas in one step that do not overlap with computing.

    Gradients are reduced during the backward pass of the last microbatch. With sharded weights, every microbatch gathers them
    during its forward pass, and gathers them and reduces its gradients during its backward pass.

    Args:
        model: coefficients.
        run: see the top of this module.
        params: on this rank before sharding.
        forward: seconds of one microbatch.
        backward: the same.
        link: between the replicas.
    """
    ranks = run["data"]
    if run["sharding"] != "weights":
        sent = data_parallel_bytes(
            ranks, params, model["gradients_bytes"], model["weights_bytes"], run["microbatches"], run["sharding"]
        )
        return max(0, collective_seconds(sent, link) - backward)
    gathered = all_gather_bytes(ranks, params * model["weights_bytes"])
    reduced = reduce_scatter_bytes(ranks, params * model["gradients_bytes"])
    first = max(0, collective_seconds(gathered, link) - forward)
    second = max(0, collective_seconds(gathered + reduced, link) - backward)
    return run["microbatches"] * (first + second)


def min_of(values: list[float]) -> float:
    """The smallest of some values; `min` of a list differs in JavaScript."""
    least = values[0]
    for value in values:
        least = min(least, value)
    return least


def forward_pass(model: Data, work: Data, rates: Data, link: Data) -> Data:
    """Seconds of one forward pass on `tensor` ranks: a prefill, or one step of generation after a context."""
    total = 0
    depth = 0
    shared = 0
    for sub in model["sublayers"]:
        part = sublayer_seconds(model, sub, work, rates, link)
        total = total + part["forward"]
        depth = depth + part["depth"]
        shared = shared + part["link"]
    last = {
        "batch": work["batch"],
        "tokens": 1,
        "context": work["context"],
        "tensor": work["tensor"],
        "sequence": "none",
        "engine": work["engine"],
    }
    head = head_seconds(model, last, rates)
    return {
        "seconds": total + depth + shared + head["forward"] + head["depth"],
        "depth_seconds": depth + head["depth"],
        "link_seconds": shared,
    }


def prefill_state_bytes(model: Data, work: Data, chunk_tokens: int) -> float:
    """Peak bytes of depth state on one rank in a prefill in chunks of so many tokens; 0 means one chunk."""
    largest = 0
    for boundary in range(len(model["sublayers"]) + 1):
        largest = max(largest, state_bytes(model, boundary))
    return work["batch"] * stored_bytes(largest, work["tokens"], chunk_tokens, work["tensor"], work["sequence"])
