"""The choice of a reader of the page, and the numbers of each method for it.

A `choice` holds `device` and `layers` (numbers in the lists of the page), `tokens`, `window`, `batch`, `microbatches`,
`pipeline`, `virtual`, `tensor`, `data`, `prompts` (sequences that generate at once), and the words `sequence`, `schedule`,
`forwarding`, `recompute`, `sharding` and `transfers`, all as `planner.setting.Setting` has them.

`tables` hold the `shared` numbers, the different `rows` (sublayers without their depth operations) and `depths` (depth
operations) once each, and `packs`. A pack holds `ends`, `leaves`, `n_layers`, and for every sublayer [block, row, depth,
family]. A sublayer whose window a reader sets belongs to one of the `families`: its rows at each of the `windows`; the family
of others is -1. `tensor` holds, for each method, the numbers of tensor ranks that can share its heads.
"""

from typing import Any

from twoaxis.planner.formulas.counts import cache_bytes_of, parameter_counts, state_bytes
from twoaxis.planner.formulas.training_step import forward_pass, prefill_state_bytes, training_step

Data = dict[str, Any]


def gpus_of(choice: Data) -> int:
    """Devices in all."""
    return choice["data"] * choice["pipeline"] * choice["tensor"]


def run_of(choice: Data) -> Data:
    """The `run` of `formulas.training_step`."""
    return {
        "batch": choice["batch"] // (choice["data"] * choice["microbatches"]),
        "tokens": choice["tokens"],
        "microbatches": choice["microbatches"],
        "pipeline": choice["pipeline"],
        "virtual": choice["virtual"],
        "schedule": "interleaved" if choice["virtual"] > 1 else choice["schedule"],
        "transfers": choice["transfers"],
        "forwarding": choice["forwarding"],
        "data": choice["data"],
        "sharding": choice["sharding"],
        "recompute": choice["recompute"],
        "tensor": choice["tensor"],
        "sequence": sequence_of(choice),
        "engine": "fused",
    }


def sequence_of(choice: Data) -> str:
    """Whether tensor-parallel ranks share the tokens between matrices; "none" for a single rank."""
    return choice["sequence"] if choice["tensor"] > 1 else "none"


def work_of_prompts(choice: Data, tokens: int, context: int, sequence: str) -> Data:
    """The `work` of `formulas.roofline` for the sequences that generate."""
    return {
        "batch": choice["prompts"],
        "tokens": tokens,
        "context": context,
        "tensor": choice["tensor"],
        "sequence": sequence,
        "engine": "fused",
    }


def reach_of(device: Data, devices: int) -> int:
    """The number of the first link that connects so many devices in the list of the device; -1 where none does."""
    for index in range(len(device["links"])):
        most = device["links"][index][0]
        if most == 0 or devices <= most:
            return index
    return -1


def link_of(device: Data, devices: int) -> Data:
    """The link that connects so many devices."""
    if devices == 1:
        return {"bytes_per_second": 1.0, "pair_bytes_per_second": 1.0, "latency_seconds": 0.0}
    return device["links"][reach_of(device, devices)][1]


def links_of(device: Data, choice: Data) -> Data:
    """The link of each group of ranks; tensor ranks are adjacent, then pipeline ranks, then replicas."""
    return {
        "tensor": link_of(device, choice["tensor"]),
        "pipeline": link_of(device, choice["tensor"] * choice["pipeline"]),
        "data": link_of(device, gpus_of(choice)),
    }


def refusal(choice: Data, device: Data, n_layers: int) -> str:
    """Why a choice cannot run, with a remedy; "" if it can."""
    parts = choice["data"] * choice["microbatches"]
    if choice["batch"] % parts > 0:
        return "A batch of " + str(choice["batch"]) + " does not divide by replicas x microbatches = " + str(parts) + "."
    if choice["virtual"] > 1 and choice["pipeline"] == 1:
        return "Several stages on each rank need more than one pipeline rank."
    if choice["virtual"] > 1 and choice["schedule"] == "gpipe":
        return "GPipe runs one stage on each rank; choose 1F1B, or one stage."
    if choice["virtual"] > 1 and choice["microbatches"] % choice["pipeline"] > 0:
        return "With several stages on each rank, microbatches have to be a multiple of the pipeline ranks."
    if choice["pipeline"] * choice["virtual"] > n_layers:
        return "There are more stages than the " + str(n_layers) + " blocks of the model; choose fewer."
    if sequence_of(choice) == "tensor" and choice["tokens"] % choice["tensor"] > 0:
        return "The tokens do not divide by the tensor ranks that share them."
    if gpus_of(choice) > 1 and reach_of(device, gpus_of(choice)) < 0:
        return "No link in the file of this device connects " + str(gpus_of(choice)) + " of them; choose fewer."
    return ""


def unpacked(tables: Data, pack: Data, window: int) -> Data:
    """The coefficients of one model, as `planner.coefficients` gives them, with this window.

    Args:
        tables: of the page.
        pack: the model.
        window: of the sublayers whose window can be set, one of the `windows`.
    """
    model = copied(tables["shared"])
    model["n_layers"] = pack["n_layers"]
    model["ends"] = pack["ends"]
    model["leaves"] = pack["leaves"]
    model["sublayers"] = []
    for entry in pack["sublayers"]:
        row = entry[1]
        if entry[3] >= 0:
            row = tables["families"][entry[3]][place_of(tables["windows"], window)]
        sublayer = copied(tables["rows"][row])
        sublayer["block"] = entry[0]
        sublayer["depth"] = tables["depths"][entry[2]]
        model["sublayers"].append(sublayer)
    return model


def copied(table: Data) -> Data:
    """A shallow copy of a table."""
    found = {}
    for name in table:
        found[name] = table[name]
    return found


def place_of(values: list, value: float) -> int:
    """The index of a value in a list; -1 if it is not there.

    Example:
        >>> place_of([4, 8, 16], 8), place_of([4, 8, 16], 9)
        (1, -1)
    """
    for index in range(len(values)):
        if values[index] == value:
            return index
    return -1


def model_of(tables: Data, choice: Data, method: int, phase: str) -> Data:
    """The coefficients of a method in "training" or in "generation"."""
    packs = tables["models"][choice["layers"]][method]
    return unpacked(tables, tables["packs"][packs[0 if phase == "training" else 1]], choice["window"])


def step_of(tables: Data, choice: Data, method: int) -> Data:
    """A training step of a method."""
    device = tables["devices"][choice["device"]]
    return training_step(
        model_of(tables, choice, method, "training"), run_of(choice), device["rates"], links_of(device, choice)
    )


def states_of(model: Data) -> list[float]:
    """Bytes per token of the depth state at every boundary."""
    return [state_bytes(model, boundary) for boundary in range(len(model["sublayers"]) + 1)]


def method_row(tables: Data, choice: Data, method: int) -> Data:
    """The numbers of one method.

    Returns:
        `step_seconds` of training, with `depth_seconds` and `exposed_seconds` of communication in it, `tokens_per_second`;
        `memory_bytes` of the fullest device; `sent_bytes` of a microbatch over the busiest stage boundary; `params`;
        `token_seconds` of one step of generation after `tokens`, with `token_depth_seconds` in it; `cache_bytes` of one
        sequence; `prompt_seconds` and `prompt_state_bytes` while prompts of `tokens` are read; `states` at every boundary.
    """
    device = tables["devices"][choice["device"]]
    links = links_of(device, choice)
    model = model_of(tables, choice, method, "training")
    step = training_step(model, run_of(choice), device["rates"], links)
    memory = 0
    for held_bytes in step["memory_bytes"]:
        memory = max(memory, held_bytes)
    sent = 0
    for hop in step["sent_bytes"]:
        sent = max(sent, hop)
    generating = model_of(tables, choice, method, "generation")
    token = forward_pass(generating, work_of_prompts(choice, 1, choice["tokens"], "none"), device["rates"], links["tensor"])
    prompt = work_of_prompts(choice, choice["tokens"], 0, sequence_of(choice))
    read = forward_pass(model, prompt, device["rates"], links["tensor"])
    return {
        "method": method,
        "step_seconds": step["step_seconds"],
        "tokens_per_second": step["tokens_per_second"],
        "depth_seconds": step["depth_seconds"],
        "exposed_seconds": step["exposed_seconds"],
        "bubble": step["bubble"],
        "memory_bytes": memory,
        "sent_bytes": sent,
        "params": parameter_counts(model)["all"],
        "token_seconds": token["seconds"],
        "token_depth_seconds": token["depth_seconds"],
        "cache_bytes": cache_bytes_of(generating, choice["tokens"], 1),
        "prompt_seconds": read["seconds"],
        "prompt_state_bytes": prefill_state_bytes(model, prompt, 0),
        "states": states_of(model),
    }


def methods_of(tables: Data, choice: Data) -> list[int]:
    """The methods that fit the model at this depth and whose heads the tensor ranks can share; the control is the first."""
    fitting = tables["models"][choice["layers"]]
    ranks = choice["tensor"]
    return [m for m in range(len(fitting)) if len(fitting[m]) > 0 and place_of(tables["tensor"][m], ranks) >= 0]


def sorted_by(rows: list, key: str) -> list:
    """Rows from the smallest to the largest value; equal ones stay in order."""
    found = []
    for row in rows:
        at = len(found)
        while at > 0 and found[at - 1][key] > row[key]:
            at = at - 1
        found = [found[i] if i < at else row if i == at else found[i - 1] for i in range(len(found) + 1)]
    return found
