"""Schedules of a pipeline and the simulation of their events, in plain numbers.

Letters: P ranks, V stages of each rank (virtual stages), C = P*V stages, M microbatches. Stage s runs on rank s % P. An action
is [kind, stage, microbatch] where kind is "forward" or "backward"; an order holds the actions of each rank.
"""


def gpipe_order(ranks: int, microbatches: int) -> list[list[list]]:
    """All forward passes, then all backward passes; one stage on each rank.

    Source: GPipe, arXiv:1811.06965, fig. 2c; backward passes in the order of the forward ones, as
            torch.distributed.pipelining.ScheduleGPipe runs them

    Example:
        >>> gpipe_order(1, 2)
        [[['forward', 0, 0], ['forward', 0, 1], ['backward', 0, 0], ['backward', 0, 1]]]
    """
    order = []
    for rank in range(ranks):
        forwards = [["forward", rank, microbatch] for microbatch in range(microbatches)]
        backwards = [["backward", rank, microbatch] for microbatch in range(microbatches)]
        order.append(joined(forwards, backwards))
    return order


def one_f_one_b_order(ranks: int, microbatches: int) -> list[list[list]]:
    """One forward and one backward pass in turn, once the first gradient can have arrived; one stage on each rank.

    Rank r runs P - 1 - r forward passes ahead, so at most P - r microbatches are in flight on it.

    Source: PipeDream, arXiv:1806.03377, section 3.2, flushed at the end of each step as in arXiv:2104.04473, section 2.2.1;
            torch.distributed.pipelining.Schedule1F1B

    Example:
        >>> one_f_one_b_order(2, 2)[0]
        [['forward', 0, 0], ['forward', 0, 1], ['backward', 0, 0], ['backward', 0, 1]]
    """
    order = []
    for rank in range(ranks):
        ahead = min(ranks - 1 - rank, microbatches)
        actions = [["forward", rank, microbatch] for microbatch in range(ahead)]
        for microbatch in range(ahead, microbatches):
            actions.append(["forward", rank, microbatch])
            actions.append(["backward", rank, microbatch - ahead])
        for microbatch in range(microbatches - ahead, microbatches):
            actions.append(["backward", rank, microbatch])
        order.append(actions)
    return order


def interleaved_order(ranks: int, virtual: int, microbatches: int) -> list[list[list]]:
    """One forward and one backward pass in turn over V stages on each rank, in rounds of P microbatches.

    Rank r runs (V - 1)*P + 2*(P - 1 - r) forward passes ahead.

    Source:   Efficient Large-Scale Language Model Training on GPU Clusters, arXiv:2104.04473, section 2.2.2
    Deviates: without P microbatches for each round, rounds are longer, as torch.distributed.pipelining.ScheduleInterleaved1F1B
              has them: M // P rounds, at least one, whose number has to divide M

    Example:
        >>> [stage for kind, stage, _ in interleaved_order(2, 2, 2)[1] if kind == "forward"]
        [1, 1, 3, 3]
    """
    each = microbatches // max(1, microbatches // ranks)
    total = virtual * microbatches
    order = []
    for rank in range(ranks):
        forwards = []
        backwards = []
        for step in range(total):
            turn = (step // each) % virtual
            microbatch = step // (each * virtual) * each + step % each
            forwards.append(["forward", turn * ranks + rank, microbatch])
            backwards.append(["backward", (virtual - 1 - turn) * ranks + rank, microbatch])
        ahead = min((virtual - 1) * each + 2 * (ranks - 1 - rank), total)
        actions = forwards[:ahead]
        for step in range(total - ahead):
            actions.append(forwards[ahead + step])
            actions.append(backwards[step])
        order.append(joined(actions, backwards[total - ahead :]))
    return order


def schedule_order(schedule: str, ranks: int, virtual: int, microbatches: int) -> list[list[list]]:
    """The order of "gpipe", "1f1b" or "interleaved"; only the last has more than one stage on a rank."""
    if schedule == "gpipe":
        return gpipe_order(ranks, microbatches)
    if schedule == "1f1b":
        return one_f_one_b_order(ranks, microbatches)
    return interleaved_order(ranks, virtual, microbatches)


def joined(first: list, second: list) -> list:
    """Concatenates two lists; `+` does not in JavaScript."""
    return [item for part in [first, second] for item in part]


def ideal_bubble(ranks: int, virtual: int, microbatches: int) -> float:
    """The share of a step in which a rank is idle with equal stages and free transfers, in any of the schedules.

    Equation: (P - 1) / (V M + P - 1)
    Source:   arXiv:2104.04473, section 2.2, where it is counted against the time without a bubble: (P - 1) / (V M)

    Example:
        >>> ideal_bubble(4, 1, 8)
        0.2727272727272727
    """
    return (ranks - 1) / (virtual * microbatches + ranks - 1)


def transfer_seconds(sent_bytes: float, bytes_per_second: float, latency_seconds: float) -> float:
    """Seconds for which one message occupies a link; 0 for no bytes.

    Equation: latency + bytes / rate
    """
    return latency_seconds + sent_bytes / bytes_per_second if sent_bytes > 0 else 0.0


def simulate(
    order: list[list[list]],
    forward_seconds: list[float],
    backward_seconds: list[float],
    activation_seconds: list[float],
    gradient_seconds: list[float],
    transfers: str,
) -> dict:
    """Simulates one step: when every action and every transfer begins and ends.

    A rank runs one action at a time, in its order. A forward pass waits for the activations of the stage before, a backward
    pass for the gradients of the stage after; those of the last stage wait for its own forward pass. A link carries one
    transfer at a time from one rank to another, in the order in which they become ready; between two stages of one rank
    nothing is sent.

    Args:
        order: the actions of each rank.
        forward_seconds: of one microbatch in each stage.
        backward_seconds: the same; with recomputation, the forward pass once more included.
        activation_seconds: for which the activations of a microbatch occupy the link after each stage but the last.
        gradient_seconds: the same for the gradients back over this boundary.
        transfers: "overlapped" with what the ranks compute, or "blocking": the sender computes nothing until it has sent.

    Returns:
        `actions` and `transfers` with their `start` and `end` in seconds, `step_seconds`, `idle_share` of each rank (the share
        of the step in which it computes nothing), their mean as `bubble`, and `unfinished`, the number of actions whose input
        never arrives; 0 for every order of this module.
    """
    ranks = len(order)
    clock = {
        "stages": len(forward_seconds),
        "seconds": {"forward": forward_seconds, "backward": backward_seconds},
        "link_seconds": {"forward": activation_seconds, "backward": gradient_seconds},
        "arrived": {"forward": _never(order, len(forward_seconds)), "backward": _never(order, len(forward_seconds))},
        "link_free": [[0.0 for _ in range(ranks)] for _ in range(ranks)],
        "rank_free": [0.0 for _ in range(ranks)],
        "actions": [],
        "transfers": [],
    }
    clock["arrived"]["forward"][0] = [0.0 for _ in clock["arrived"]["forward"][0]]
    done = [0 for _ in range(ranks)]
    moved = True
    while moved:
        moved = False
        for rank in range(ranks):
            while done[rank] < len(order[rank]) and _arrival(clock, order[rank][done[rank]]) >= 0:
                _run(clock, rank, order[rank][done[rank]], transfers)
                done[rank] += 1
                moved = True
    unfinished = 0
    for rank in range(ranks):
        unfinished += len(order[rank]) - done[rank]
    return _summary(clock, ranks, unfinished)


def _never(order: list[list[list]], stages: int) -> list[list[float]]:
    """When the input of each stage and microbatch arrives; negative while it is not known."""
    microbatches = 0
    for actions in order:
        for action in actions:
            microbatches = max(microbatches, action[2] + 1)
    return [[-1.0 for _ in range(microbatches)] for _ in range(stages)]


def _arrival(clock: dict, action: list) -> float:
    """When the input of an action arrives."""
    return clock["arrived"][action[0]][action[1]][action[2]]


def _run(clock: dict, rank: int, action: list, transfers: str) -> None:
    """Runs one action whose input has arrived, and sends its output."""
    kind = action[0]
    stage = action[1]
    microbatch = action[2]
    start = max(clock["rank_free"][rank], _arrival(clock, action))
    end = start + clock["seconds"][kind][stage]
    clock["actions"].append({"rank": rank, "kind": kind, "stage": stage, "microbatch": microbatch, "start": start, "end": end})
    clock["rank_free"][rank] = end
    if kind == "forward" and stage == clock["stages"] - 1:
        clock["arrived"]["backward"][stage][microbatch] = end
        return
    if kind == "backward" and stage == 0:
        return
    receiver = stage + 1 if kind == "forward" else stage - 1
    target = receiver % len(clock["rank_free"])
    if target == rank:
        clock["arrived"][kind][receiver][microbatch] = end
        return
    boundary = min(stage, receiver)
    begin = max(end, clock["link_free"][rank][target])
    over = begin + clock["link_seconds"][kind][boundary]
    clock["transfers"].append(
        {
            "source": rank,
            "target": target,
            "kind": kind,
            "boundary": boundary,
            "microbatch": microbatch,
            "start": begin,
            "end": over,
        }
    )
    clock["link_free"][rank][target] = over
    clock["arrived"][kind][receiver][microbatch] = over
    if transfers == "blocking":
        clock["rank_free"][rank] = over


def _summary(clock: dict, ranks: int, unfinished: int) -> dict:
    """The result of a simulation."""
    step = 0.0
    busy = [0.0 for _ in range(ranks)]
    for action in clock["actions"]:
        step = max(step, action["end"])
        busy[action["rank"]] += action["end"] - action["start"]
    idle = [1 - seconds / step if step > 0 else 0.0 for seconds in busy]
    bubble = 0.0
    for share in idle:
        bubble += share / ranks
    return {
        "actions": clock["actions"],
        "transfers": clock["transfers"],
        "step_seconds": step,
        "idle_share": idle,
        "bubble": bubble,
        "unfinished": unfinished,
    }


def exposed_seconds(
    order: list[list[list]],
    forward_seconds: list[float],
    backward_seconds: list[float],
    activation_seconds: list[float],
    gradient_seconds: list[float],
    transfers: str,
) -> float:
    """The seconds that communication adds to a step: its time minus that of the same step with free transfers.

    Example:
        >>> exposed_seconds(gpipe_order(2, 1), [1, 1], [2, 2], [0.25], [0.5], "overlapped")
        0.75
    """
    free = [0.0 for _ in activation_seconds]
    real = simulate(order, forward_seconds, backward_seconds, activation_seconds, gradient_seconds, transfers)
    ideal = simulate(order, forward_seconds, backward_seconds, free, free, transfers)
    return real["step_seconds"] - ideal["step_seconds"]


def peak_memory(
    result: dict,
    fixed_bytes: list[float],
    saved_bytes: list[float],
    activation_bytes: list[float],
    gradient_bytes: list[float],
    waiting_bytes: list[list[float]],
) -> list[float]:
    """Peak bytes of each rank during a simulated step.

    A stage holds what it saves of a microbatch from the start of its forward pass to the end of its backward pass, and what it
    receives from the start of the transfer to the end of its backward pass. Buffers of the sender are not counted.

    Args:
        result: what `simulate` has returned.
        fixed_bytes: of each rank, whatever runs on it: weights, gradients, optimizer.
        saved_bytes: saved for backward by each stage of a microbatch, besides what it has received.
        activation_bytes: of a microbatch over the boundary after each stage but the last.
        gradient_bytes: back over this boundary.
        waiting_bytes: of gradients that a rank accumulates for an earlier stage of its own: those that start to accumulate in
            the backward pass of each stage, then those that stop.

    Returns:
        Bytes of each rank.
    """
    boundary_bytes = {"forward": activation_bytes, "backward": gradient_bytes}
    peaks = []
    for rank in range(len(fixed_bytes)):
        # Transfers of one kind use one link, so they are in order of time.
        coming = {}
        for kind in ["forward", "backward"]:
            coming[kind] = [sent for sent in result["transfers"] if sent["target"] == rank and sent["kind"] == kind]
        received = {"forward": 0, "backward": 0}
        held = fixed_bytes[rank]
        peak = held
        for action in [action for action in result["actions"] if action["rank"] == rank]:
            for kind in ["forward", "backward"]:
                while received[kind] < len(coming[kind]) and _begun(coming[kind][received[kind]], action):
                    held += boundary_bytes[kind][coming[kind][received[kind]]["boundary"]]
                    received[kind] += 1
            stage = action["stage"]
            if action["kind"] == "forward":
                held += saved_bytes[stage]
            else:
                held += waiting_bytes[0][stage]
            peak = max(peak, held)
            if action["kind"] == "backward":
                held -= saved_bytes[stage] + waiting_bytes[1][stage]
                if len(fixed_bytes) > 1 and stage > 0:
                    held -= activation_bytes[stage - 1]
                if len(fixed_bytes) > 1 and stage < len(saved_bytes) - 1:
                    held -= gradient_bytes[stage]
        peaks.append(peak)
    return peaks


def _begun(transfer: dict, action: dict) -> bool:
    """Whether a transfer begins before an action ends, or no later than it begins if neither takes time."""
    return transfer["start"] < action["end"] or transfer["start"] <= action["start"]
