"""Shows that a change of the code changes no number; run it as a script, before and after.

    python tests/same_numbers.py write before.json
    python tests/same_numbers.py compare before.json

Every example of every table, in a small decoder: the bits of the logits, of each gradient, of the losses of ten training steps
and of the parameters after them, and the tokens that are generated from a cache. It is no test, since no number is right for
all machines.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from twoaxis import DEPTH, FEED_FORWARD, SEQUENCE, Decoder, DecoderConfig
from twoaxis.local import LOCAL
from twoaxis.model import generate

STEPS, SIZES = 10, {"vocab_size": 23, "d_model": 16, "n_layers": 3, "max_seq_len": 32}
ATTENTION = {"kind": "attention", "n_heads": 2}


def cases() -> Iterator[tuple[str, dict[str, Any]]]:
    """The decoders, each with one example."""
    tables = {"depth": DEPTH, "sequence": SEQUENCE, "feed_forward": FEED_FORWARD, "local": LOCAL}
    for axis, table in tables.items():
        for row in table:
            for name in row.examples:
                example = row.example(name).to_data()
                block = {
                    "depth": [ATTENTION, "swiglu"],
                    "sequence": [example, "swiglu"],
                    "feed_forward": [ATTENTION, example],
                    "local": [{**ATTENTION, "input_local": example}, "swiglu"],
                }[axis]
                depth = {"depth": example} if axis == "depth" else {}
                yield f"{axis}/{row.kind}/{name}", {**SIZES, **depth, "blocks": [block]}


def bits(*tensors: Tensor) -> str:
    """The sha256 of the values of some tensors."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().clone(memory_format=torch.contiguous_format).numpy().tobytes())
    return digest.hexdigest()[:16]


def numbers(data: dict[str, Any], dtype: torch.dtype) -> dict[str, str]:
    """What a decoder computes."""
    torch.manual_seed(0)
    model = Decoder.build(DecoderConfig.from_data(data), seed=0).to(dtype)
    tokens = torch.arange(2 * 10).reshape(2, 10) * 7 % data["vocab_size"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    found, losses = {"logits": bits(model(tokens))}, []
    for step in range(STEPS):
        total, _ = model.loss(tokens[:, :-1], tokens[:, 1:])
        total.backward()
        if step == 0:
            gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
            found |= {f"gradient {name}": "none" if one is None else bits(one) for name, one in gradients.items()}
        losses.append(total.detach())
        optimizer.step()
        optimizer.zero_grad()
    found["losses"], found["parameters"] = bits(*losses), bits(*model.parameters())
    found["generated"] = str(generate(model.eval(), tokens[:, :4].tolist(), max_new_tokens=6))
    return found


def main() -> int:
    """Writes the numbers, or says which differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("write", "compare"))
    parser.add_argument("file", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    now: dict[str, dict[str, str]] = {}
    for name, data in cases():
        for dtype in (torch.float32, torch.float64):
            key = f"{name} {str(dtype).removeprefix('torch.')}"
            try:
                now[key] = numbers(data, dtype)
            # Such as a mixer that cannot generate, which is kept as it is.
            except Exception as error:
                now[key] = {"error": f"{type(error).__name__}: {error}"}
    if options.what == "write":
        options.file.write_text(json.dumps(now, indent=1))
        errors = sum("error" in one for one in now.values())
        print(f"{len(now)} decoders, {sum(map(len, now.values()))} values, {errors} errors")
        return 0
    before = json.loads(options.file.read_text())
    differing = [(name, key) for name in before for key in before[name] if now.get(name, {}).get(key) != before[name][key]]
    for name, key in differing:
        print(f"{name}: {key}: {before[name][key]} before, {now.get(name, {}).get(key)} now")
    print(f"{len(before)} decoders, {sum(map(len, before.values()))} values, {len(differing)} differ")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
