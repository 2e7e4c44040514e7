"""A choice of the page as the formulas take it.

A `choice` holds `device` and `layers` (numbers in the lists of the page), `tokens`, `window`, `batch`, `microbatches`,
`pipeline`, `virtual`, `tensor`, `data`, `prompts` (sequences that generate at once), and the words `sequence`, `schedule`,
`forwarding`, `recompute`, `sharding` and `transfers`, all as `planner.setting.Setting` has them.
"""

from typing import Any

Data = dict[str, Any]


def gpus_of(choice: Data) -> int:
    """Devices in all."""
    return choice["data"] * choice["pipeline"] * choice["tensor"]


def run_of(choice: Data) -> Data:
    """What `formulas.step` calls a run."""
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
    """Whether tensor-parallel ranks share the tokens between matrices; one rank has nobody to share them with."""
    return choice["sequence"] if choice["tensor"] > 1 else "none"


def work_of_prompts(choice: Data, tokens: int, context: int, sequence: str) -> Data:
    """What `formulas.seconds` calls work, for the sequences that generate."""
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
    """What connects so many devices."""
    if devices == 1:
        return {"bytes_per_second": 1.0, "pair_bytes_per_second": 1.0, "latency_seconds": 0.0}
    return device["links"][reach_of(device, devices)][1]


def links_of(device: Data, choice: Data) -> Data:
    """What connects the ranks of each group: tensor ranks are neighbours, then come pipeline ranks, then replicas."""
    return {
        "tensor": link_of(device, choice["tensor"]),
        "pipeline": link_of(device, choice["tensor"] * choice["pipeline"]),
        "data": link_of(device, gpus_of(choice)),
    }


def refusal(choice: Data, device: Data, n_layers: int) -> str:
    """Why a choice cannot run, and what would help; nothing for one that can."""
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
        return "Nothing is known that connects " + str(gpus_of(choice)) + " of this device; choose fewer."
    return ""
