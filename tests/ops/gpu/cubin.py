"""Compiles kernels for GPUs that are not here, and reads what they need: registers, stack, shared memory, width of loads."""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"

POINTERS = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32"}


class Resources(NamedTuple):
    """Of one kernel.

    Attributes:
        registers: per thread.
        stack: bytes per thread, which are registers that did not fit.
        shared: bytes per program.
        barriers: in the code.
        narrow: loads and stores of 16 bits.
        wide: loads, copies to shared memory and stores of 16 bytes.
    """

    registers: int
    stack: int
    shared: int
    barriers: int
    narrow: int
    wide: int


def resources(kernel: Any, arguments: dict[str, Any], constants: dict[str, Any], warps: int, capability: int) -> Resources:
    """Compiles a kernel for a capability as a launch would.

    Args:
        kernel: of Triton.
        arguments: by name the type of each, in Triton's words, a tuple of them, or None; pointers are taken to be aligned.
        constants: by name.
        warps: of a program.
        capability: 90 for 9.0.
    """
    signature: dict[str, Any] = {}
    values = dict(constants)
    aligned: dict[tuple[int, ...], Any] = {}
    for place, name in enumerate(kernel.arg_names):
        given = arguments.get(name)
        signature[name] = "constexpr" if given is None else given
        if given is None:
            values.setdefault(name, None)
        elif isinstance(given, tuple):
            aligned |= {(place, entry): [["tt.divisibility", 16]] for entry in range(len(given))}
        elif given.startswith("*"):
            aligned[place,] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, values, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})
    ptx = compiled.asm["ptx"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = {name: int(number) for name, number in re.findall(r"(REG|STACK):(\d+)", usage)}
    return Resources(
        found["REG"],
        found["STACK"],
        compiled.metadata.shared,
        ptx.count("bar.sync"),
        len(re.findall(r"(?:ld|st)\.global[.\w:]*\.b16", ptx)),
        len(re.findall(r"(?:ld|st)\.global[.\w:]*\.v4|cp\.async\.cg[.\w:]* \[[^,]*, *\[[^,]*, 0x10", ptx)),
    )
