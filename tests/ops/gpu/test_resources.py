"""What the kernels need on GPUs that are not here, at the block sizes of `launch`: no spills, enough programs, wide loads."""

import importlib.util
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from twoaxis.ops.gpu import launch

if importlib.util.find_spec("triton") is None:
    pytest.skip("without triton", allow_module_level=True)

REGISTERS = 2**16
"""Of a multiprocessor, of all generations since compute capability 7.0."""

SPILLED = 16
"""Bytes of stack of a thread: four registers, with which the assembler buys one more program."""

SHARED = 99 * 2**10
"""Bytes of a program on the smallest devices since 8.0."""

THREADS = 256
"""Of a multiprocessor that a kernel keeps busy at the least, each with 64 bytes of a source on their way."""


class Shape(NamedTuple):
    """A read: sources, width, heads, and what comes with it."""

    n: int
    D: int
    n_heads: int = 1
    options: str = ""
    capability: int = 90


CASES: dict[str, tuple[Shape, ...]] = {
    "depth_read_forward": (
        Shape(9, 768, 12),
        Shape(3, 2048, options="stream scale"),
        Shape(9, 4096),
        Shape(1, 4096, options="early"),
        Shape(9, 4096, 16),
        Shape(25, 7168, capability=100),
        Shape(9, 7168, options="token normalised float32"),
    ),
    "depth_read_backward": (
        Shape(9, 512, options="passed"),
        Shape(9, 768, 12),
        Shape(9, 2048, options="passed"),
        Shape(1, 4096, options="early"),
        Shape(9, 4096, options="passed statistic scale"),
        Shape(25, 4096, options="token normalised float32"),
        Shape(25, 7168, options="passed float32"),
        Shape(25, 7168, options="passed"),
        Shape(9, 4096, 16, "passed", 100),
    ),
    "inverse_rms_forward": (Shape(1, 768), Shape(1, 7168)),
    "inverse_rms_backward": (Shape(1, 768), Shape(1, 7168, options="passed row")),
    "early_read_forward": (Shape(9, 2048), Shape(9, 4096, capability=100), Shape(9, 7168)),
    "early_read_backward": (Shape(9, 768, 12), Shape(9, 4096, options="passed"), Shape(9, 7168, options="passed")),
}

TABLES = {
    "depth_read_forward": launch.read_blocks,
    "depth_read_backward": launch.read_backward_blocks,
    "inverse_rms_forward": lambda lanes, n, itemsize: launch.row_blocks(lanes),
    "inverse_rms_backward": lambda lanes, n, itemsize: launch.row_blocks(lanes),
    "early_read_forward": launch.early_blocks,
    "early_read_backward": launch.early_backward_blocks,
}


BARRIERS = {
    "depth_read_forward": 12,
    "depth_read_backward": 32,
    "inverse_rms_forward": 4,
    "inverse_rms_backward": 0,
    "early_read_forward": 24,
    "early_read_backward": 36,
    "delta_forward": 14,
    "delta_backward": 26,
    "mix_forward": 0,
    "mix_backward": 0,
    "sinkhorn_forward": 0,
    "sinkhorn_backward": 0,
}
"""At most in the code: more of them are copies of tiles through shared memory."""


class Write(NamedTuple):
    """A delta write, a mixing of streams, or Sinkhorn normalisation: channels or streams, width, and what comes with it."""

    kernel: str
    n: int
    D: int = 0
    options: str = ""
    capability: int = 90


WRITES = (
    Write("delta_forward", 4, 2048),
    Write("delta_forward", 1, 4096, capability=100),
    Write("delta_backward", 4, 768),
    Write("delta_backward", 1, 4096, capability=100),
    Write("delta_backward", 4, 7168),
    Write("mix_forward", 4, 4096, "update token"),
    Write("mix_forward", 10, 7168, "read", 100),
    Write("mix_backward", 4, 4096, "update token", 100),
    Write("mix_backward", 4, 4096, "update"),
    Write("mix_backward", 4, 4096, "update token identity"),
    Write("mix_backward", 4, 96, "update token"),
    Write("mix_backward", 4, 4096, "read token"),
    Write("sinkhorn_forward", 4, options="exp"),
    Write("sinkhorn_backward", 4, options="exp", capability=100),
    Write("sinkhorn_backward", 4, options="exp_minus_max"),
    Write("sinkhorn_backward", 3, options="softmax"),
)


def blocks_of(write: Write) -> launch.Blocks:
    if write.kernel.startswith("delta"):
        return launch.row_blocks(launch.power_of_two(write.D))
    if write.kernel.startswith("sinkhorn"):
        return launch.sinkhorn_blocks()
    return (launch.mix_blocks if write.kernel == "mix_forward" else launch.mix_backward_blocks)(write.D)


def constants_of(kernel: Any, write: Write, blocks: launch.Blocks) -> dict[str, Any]:
    each = "token" in write.options
    values = {
        "WIDTH": write.D,
        "LANES": launch.power_of_two(write.D),
        "EPS": 1e-5,
        "ERASES": True,
        "RESIDUAL_EACH": each and "identity" not in write.options,
        "WRITE_EACH": each and "update" in write.options,
        "SIZE": write.n,
        "ROUNDS": 20,
        "FIRST": 1,
        "START": write.options,
        "START_EPS": 1e-6,
        "SUM_EPS": 1e-6,
        "ROWS": blocks.rows,
        "COLUMNS": blocks.columns,
    }
    return {name: values[name] for name in kernel.arg_names if name in values}


def types_of(write: Write) -> dict[str, Any]:
    """The types of a call in bfloat16, with logits and weights in float32."""
    if write.kernel.startswith("sinkhorn"):
        return {**dict.fromkeys(("logits", "results", "grad", "sums"), "*fp32"), "n_rows": "i32"}
    rows, read = ("*bf16",) * write.n, ("*bf16",) * (1 if "read" in write.options else write.n)
    types: dict[str, Any] = dict.fromkeys(("direction", "grad_direction"), "*bf16") | {"n_rows": "i32"}
    types |= dict.fromkeys(("targets", "beta", "grad_targets", "grad_beta"), "*fp32")
    types |= {"channels": rows, "sources": rows, "grads": read, "results": read if write.kernel == "mix_forward" else rows}
    if "update" in write.options:
        types |= dict.fromkeys(("update", "grad_update"), "*bf16") | dict.fromkeys(("write", "grad_write"), "*fp32")
    return types if "identity" in write.options else types | dict.fromkeys(("residual", "grad_residual"), "*fp32")


def constants(kernel: Any, shape: Shape, blocks: launch.Blocks) -> dict[str, Any]:
    lanes, slots = launch.lanes_of(shape.D, shape.n_heads), launch.power_of_two(shape.n_heads)
    values = {
        "WIDTH": shape.D,
        "HEADS": shape.n_heads,
        "SLOTS": slots,
        "LANES": lanes // slots,
        "QUERY_EACH": "token" in shape.options,
        "NORMALISED": "normalised" in shape.options,
        "QUERIES": blocks.queries,
        "ROWS": blocks.rows,
        "GROUP": blocks.group,
        "STAGES": blocks.stages,
    }
    return {name: values[name] for name in kernel.arg_names if name in values}


def arguments(kernel: Any, shape: Shape, queries: int) -> dict[str, Any]:
    """The types of a call, by default in bfloat16."""
    narrow = "*fp32" if "float32" in shape.options else "*bf16"
    rows = (narrow,) * len(launch.padded([torch.empty(0)] * shape.n, torch.empty(0)))
    of = dict.fromkeys
    types: dict[str, Any] = {"sources": rows, "results": rows, "mixed": narrow, "grad": narrow}
    types |= of(("factors", "query", "queries", "scores", "log_totals", "grad_query", "grad_queries"), "*fp32")
    types |= of(("n_sources", "n_rows", "wanted", "given"), "i32") | of(
        ("mixtures", "grads", "grad_totals"), ("*fp32",) * queries
    )
    optional = {
        "passed": {"passed": rows},
        "stream": {"stream": narrow},
        "scale": of(("scale", "grad_scale"), "*fp32"),
        "early": of(("early_mixture", "early_total", "grad_mixture", "grad_total"), "*fp32"),
        "statistic": {"grad_factors": None},
        # Of one tensor and no tuple.
        "row": {"passed": narrow},
    }
    types |= {"grad_factors": "*fp32", "by_factor": "*fp32", "x": narrow, "eps": "fp32"}
    if "x" in kernel.arg_names:
        types["results"] = narrow
    for option in shape.options.split():
        types |= optional.get(option, {})
    return {name: types.get(name) for name in kernel.arg_names if name.islower()}


@pytest.mark.parametrize("write", WRITES, ids=str)
def test_a_write_fits(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mixing loads 8 bytes at a time where it has twenty sums in registers, and the entries of matrices lie apart."""
    from tests.ops.gpu.cubin import resources
    from twoaxis.ops.gpu import delta_kernels, sinkhorn_kernels, stream_kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = {**vars(delta_kernels), **vars(sinkhorn_kernels), **vars(stream_kernels)}[write.kernel]
    blocks = blocks_of(write)
    given = {name: kind for name, kind in types_of(write).items() if name in kernel.arg_names}
    found = resources(kernel, given, constants_of(kernel, write, blocks), blocks.warps, write.capability)
    print(write, blocks, found)
    assert found.stack == 0 and found.narrow == 0, found
    assert (found.wide > 0) == (write.kernel in ("delta_forward", "delta_backward", "mix_forward")), found
    threads = 32 * blocks.warps
    assert REGISTERS // (threads * found.registers) * threads >= THREADS, found
    assert found.barriers <= BARRIERS[write.kernel], found
    # Threads of Sinkhorn read back what they have written, which loads through shared memory could overtake.
    assert found.shared == 0 or not write.kernel.startswith("sinkhorn"), found


@pytest.mark.parametrize(("name", "shape"), [(name, shape) for name, shapes in CASES.items() for shape in shapes], ids=str)
def test_a_kernel_fits(name: str, shape: Shape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.ops.gpu.cubin import resources
    from twoaxis.ops.gpu import depth_read_kernels, norm_kernels, two_phase_kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = {**vars(depth_read_kernels), **vars(two_phase_kernels), **vars(norm_kernels)}[name]
    blocks = TABLES[name](launch.lanes_of(shape.D, shape.n_heads), shape.n, 4 if "float32" in shape.options else 2)
    given = arguments(kernel, shape, blocks.queries), constants(kernel, shape, blocks)
    found = resources(kernel, *given, blocks.warps, shape.capability)
    print(name, shape, blocks, found)
    assert found.stack <= SPILLED, found
    assert found.shared <= SHARED and found.barriers <= BARRIERS[name], found
    assert found.narrow == 0 and found.wide > 0, found
    threads = 32 * blocks.warps
    assert REGISTERS // (threads * found.registers) * threads >= THREADS, found


class NoDevice:
    """A driver of Triton for a GPU that is not here."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device


def test_operators_give_kernels_what_these_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real arguments of launches are bound, specialised and compiled, and nothing is launched."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from twoaxis.ops.gpu import delta_operator, depth_read_operator, sinkhorn_operator, stream_operator, two_phase_operator

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compiled: list[tuple[str, int]] = []
    run = JITFunction.run

    def compile_only(self: Any, *arguments: Any, warmup: bool, **named: Any) -> Any:
        found: Any = run(self, *arguments, warmup=True, **named)
        compiled.append((str(self.fn.__name__), found.asm["ptx"].count("cp.async.cg")))
        return found

    monkeypatch.setattr(JITFunction, "run", compile_only)
    monkeypatch.setattr(driver, "_active", NoDevice())
    sources = [torch.zeros(1, 8, 512, dtype=torch.bfloat16) for _ in range(3)]
    query, factors, scale = torch.zeros(512), torch.ones(3, 1, 8), torch.ones(1)
    _, scores, totals = depth_read_operator._read(query, sources, factors, [], sources[0], scale, 2, False)
    saved = query, sources, factors, [], scale, scores, totals, sources[:2], 0b11, 0b111, True, False, 2
    depth_read_operator._read_backward(sources[0], *saved)
    queries = torch.zeros(2, 512)
    mixtures, scores, totals = two_phase_operator._early(queries, sources, factors, 1)
    two_phase_operator._early_backward(mixtures, totals, queries, sources, factors, scores, totals, [], 0, 0b111, False, 1)
    early = [mixtures[0], totals[0]]
    _, scores, totals = depth_read_operator._read(query, sources[:1], factors[:1], early, None, None, 1, False)
    saved = query, sources[:1], factors[:1], early, None, scores, totals, [], 0, 0b1, False, False, 1
    depth_read_operator._read_backward(sources[0], *saved)
    compiled_reads = len(compiled)
    small = torch.zeros(2, 1, 8), torch.zeros(1, 8)
    delta_operator._write(sources[:2], sources[2], *small, 1e-5, True)
    delta_operator._write_backward(sources[:2], sources[:2], sources[2], *small, 1e-5, True)
    residual, write = torch.zeros(2, 2, 1, 8), torch.zeros(1, 2)
    stream_operator._mix(sources[:2], sources[2], residual, write)
    stream_operator._mix_backward(sources[:2], sources[:2], sources[2], residual, write, True, True)
    stream_operator._mix_backward(sources[:1], sources[:2], None, residual[:, :1], None, False, False)
    sinkhorn_operator._sinkhorn(residual, 2, 1, "softmax", 0.0, 1e-6)
    sinkhorn_operator._sinkhorn_backward(residual, residual, 2, 1, "exp", 0.0, 0.0)
    one, two = ["depth_read_forward", "depth_read_backward"], ["early_read_forward", "early_read_backward"]
    writes = ["delta_forward", "delta_backward", "mix_forward", *["mix_backward"] * 2, "sinkhorn_forward", "sinkhorn_backward"]
    assert [name for name, _ in compiled] == [*one, *two, *one, *writes]
    assert all(copies for _, copies in compiled[:compiled_reads]), "sources are loaded ahead, 16 bytes at a time"
