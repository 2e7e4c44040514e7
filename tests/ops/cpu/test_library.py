"""When C kernels serve a call, and what is said where they cannot be compiled."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from twoaxis.core.errors import ConfigError
from twoaxis.core.files import try_lock
from twoaxis.ops import kernels
from twoaxis.ops.causal_conv import causal_conv
from twoaxis.ops.cpu import library
from twoaxis.ops.delta import delta_writes
from twoaxis.ops.depth_read import depth_read, source_factor
from twoaxis.ops.gated_linear import silu_gate
from twoaxis.ops.precision import plain_forms
from twoaxis.ops.streams import mix_pieces
from twoaxis.train.environment import describe_environment

from ...fresh import run_fresh
from ..compare import normal

SAY = """import torch
from twoaxis.ops.cpu import library
print("compiles" if library.must_compile() else "has", library.status(), library.served(torch.ones(1)), sep=" | ")
"""


class Subclass(Tensor):
    """A tensor that may keep its numbers elsewhere."""


def said(**environment: str) -> str:
    """What a process of its own says of the kernels."""
    given = {**os.environ, "CC": "", **environment}
    ran = run_fresh(SAY, env=given)
    assert not ran.returncode and not ran.stderr
    return ran.stdout.strip()


def test_they_serve_float32_on_a_cpu_and_nothing_else() -> None:
    x = torch.ones(2)
    assert library.status() == "on" and library.served(x) and library.served(nn.Parameter(x))
    others = x.double(), x.bfloat16(), x.to("meta"), x.as_subclass(Subclass)
    assert not any(map(library.served, others))
    with kernels.without_kernels():
        assert library.status() == "off: TWOAXIS_KERNELS=off" and not library.served(x)
    with plain_forms():
        assert not library.served(x)
    assert library.served(x)


def test_operators_leave_what_they_do_not_serve_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, *arguments: object) -> None:
        raise AssertionError(f"{name} was called")

    monkeypatch.setattr(library, "call", refuse)
    v, q = [torch.ones(1, 2, 4) for _ in range(64)], torch.ones(4)
    factors = [torch.ones(1, 2) for _ in v]
    depth_read(v, factors, q)
    depth_read(v[:2], factors[:2], q.double())
    depth_read([x.double() for x in v[:2]], factors[:2], q)
    depth_read(v[:2], factors[:2], q, "reference")
    mix_pieces(v[:1], None, torch.ones(2, 2), None, 2)
    delta_writes(v[:1], v[0], torch.ones(1, 1, 2), torch.ones(1, 2, dtype=torch.float64), 0.1)
    with pytest.raises(AssertionError, match=r"^depth_read was called"):
        depth_read(v[:63], factors[:63], q)


def test_the_number_of_threads_changes_no_bit() -> None:
    shape, found = (4, 300, 96), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        try:
            sources = [normal(*shape, seed=seed).float().requires_grad_() for seed in range(4)]
            query = normal(96).float().requires_grad_()
            read = depth_read(sources, [source_factor(v, 1e-6) for v in sources], query)
            weights = normal(5, 2).float().requires_grad_()
            mixed = mix_pieces([read, *sources], None, weights, None, 1)
            torch.stack(mixed).sin().sum().backward()
            found.append([*(y.detach() for y in mixed), query.grad, weights.grad, *(v.grad for v in sources)])
        finally:
            torch.set_num_threads(1)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_rows_may_lie_anywhere_in_memory() -> None:
    sources = [normal(2, 5, 2 * 9, seed=seed).float()[..., ::2] for seed in range(3)]
    odd = [torch.empty(91)[1:].view(2, 5, 9).copy_(v) for v in sources]
    query, factors = normal(9).float(), [torch.ones(2, 5) for _ in sources]
    want = depth_read([v.contiguous() for v in sources], factors, query)
    assert torch.equal(depth_read(sources, factors, query), want) and torch.equal(depth_read(odd, factors, query), want)
    empty = [v[:0].requires_grad_() for v in sources]
    depth_read(empty, [r[:0] for r in factors], query).sum().backward()
    assert empty[0].grad is not None and empty[0].grad.shape == (0, 5, 9)


def test_gradients_that_are_not_in_memory_yet_are_as_any_other() -> None:
    x, w = normal(1, 6, 3).float(), normal(3, 2).float()

    def gradient(through: Callable[[Tensor], Tensor]) -> Tensor:
        own = x.clone().requires_grad_()
        through(causal_conv(own, w)).sum().backward()
        assert own.grad is not None
        return own.grad

    assert not gradient(torch.sgn).any(), "zeros without memory"
    for lazily in (Negated.apply, torch.neg):
        torch.testing.assert_close(gradient(lazily), -gradient(lambda y: y))


class Negated(torch.autograd.Function):
    """Passes on a gradient whose numbers are those of another tensor, to be read with the other sign."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return -x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return torch._neg_view(grads[0].contiguous())


def test_a_gradient_of_another_class_is_refused_and_not_read() -> None:
    x, result = torch.ones(2, 4), torch.empty(2, 2)
    with torch.no_grad(), pytest.raises(ConfigError, match="got a Subclass: must be a plain tensor; set TWOAXIS_KERNELS=off"):
        library.call("silu_gate", x.as_subclass(Subclass), result, 2, 2)


@pytest.mark.filterwarnings("ignore")
def test_what_watches_the_operations_of_pytorch_sees_them() -> None:
    x, v = normal(2, 3, 8).float(), normal(2, 3, 8).float()
    with torch.no_grad():
        traced: Any = torch.jit.trace(silu_gate, x, check_trace=False)
        with forward_ad.dual_level():
            tangent = forward_ad.unpack_dual(silu_gate(forward_ad.make_dual(x, v))).tangent
        batched = torch.func.vmap(silu_gate)(x)
    torch.testing.assert_close(traced(v), silu_gate(v))
    torch.testing.assert_close(batched, silu_gate(x))
    want = torch.func.jvp(lambda one: silu_gate(one, "reference"), (x,), (v,))[1]
    torch.testing.assert_close(tangent, want)


def test_a_run_says_whether_they_were_on() -> None:
    assert describe_environment(torch.device("cpu"), torch.float32)["kernels"] == "on"
    with kernels.without_kernels():
        assert describe_environment(torch.device("cpu"), torch.float32)["kernels"] == "off: TWOAXIS_KERNELS=off"


def test_they_are_built_once(tmp_path: Path) -> None:
    assert said(TWOAXIS_CACHE=str(tmp_path)) == "compiles | on | True"
    names = {path.suffix for path in (tmp_path / "kernels").iterdir()}
    (made,) = (tmp_path / "kernels").glob("*.so")
    assert names == {".so", ".lock"}
    before = made.stat().st_mtime_ns
    assert said(TWOAXIS_CACHE=str(tmp_path)) == "has | on | True"
    assert [file.stat().st_mtime_ns for file in (tmp_path / "kernels").glob("*.so")] == [before]


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that makes empty files, and writes down its calls beside itself, for an empty cache folder."""
    monkeypatch.setenv("TWOAXIS_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "cc"
    path.write_text(f"""#!/bin/sh
case "$*" in *--version) exit 0;; esac
echo "$@" >> {tmp_path}/calls
while [ "$1" != -o ]; do shift; done
touch $2
""")
    path.chmod(0o755)
    return path


def links(compiler: Path) -> int:
    """How many libraries it has made."""
    return sum("-shared" in call for call in compiler.with_name("calls").read_text().splitlines())


def test_of_two_that_need_them_at_once_one_builds_them(compiler: Path) -> None:
    with ThreadPoolExecutor() as pool:
        one, other = pool.map(library._built, [[str(compiler)]] * 2)
    assert one == other and one.exists() and links(compiler) == 1


def test_nobody_waits_for_ever_or_fails_for_a_lock(compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "WAIT_SECONDS", 0.1)
    lock = library._path([str(compiler)]).with_suffix(".lock")
    lock.parent.mkdir(parents=True)
    with open(lock, "wb") as held:
        assert try_lock(held.fileno()) == "held"
        library._built([str(compiler)]).unlink()
    # In place of one that another user may write alone.
    lock.unlink()
    lock.mkdir()
    assert library._built([str(compiler)]).exists() and links(compiler) == 2


@pytest.mark.parametrize(
    ("given", "arguments"),
    [("{path} -m64 '-DTWO=1 2'", ["-m64", "-DTWO=1 2"]), ("{path}", []), ("{path} '", None), ("", None)],
)
def test_cc_may_have_arguments(
    compiler: Path, monkeypatch: pytest.MonkeyPatch, given: str, arguments: list[str] | None
) -> None:
    spaced = compiler.with_name("a cc")
    compiler.rename(spaced)
    monkeypatch.setenv("CC", given.format(path=f"'{spaced}'" if arguments else spaced))
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "")
        found = library._compiler()
    assert found == (None if arguments is None else [str(spaced), *arguments])
    if arguments:
        assert found is not None and library._built(found) != library._path([str(spaced)])
        calls = spaced.with_name("calls").read_text().splitlines()
        assert all(call.startswith("-m64 -DTWO=1 2 ") for call in calls)


BUILD = """import signal
import sys
from twoaxis.ops.cpu import library
# A shell lets what it starts behind `&` ignore interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)
library._built(sys.argv[1:])
"""


def test_what_a_killed_process_has_left_is_removed_by_the_next(compiler: Path) -> None:
    killing = compiler.with_name("killing")
    killing.write_text("#!/bin/sh\n[ $1 = --version ] && echo another && exit 0\nkill -KILL $PPID\n")
    killing.chmod(0o755)
    assert run_fresh(BUILD, str(killing)).returncode
    kernels = library._built([str(compiler)]).parent
    assert {path.suffix for path in kernels.iterdir()} == {".so", ".lock"}


def test_an_interrupt_ends_all_and_leaves_nothing(compiler: Path) -> None:
    first, pids, files = compiler.with_name("first"), compiler.with_name("pids"), len(library._files("c"))
    compiler.write_text(f"""#!/bin/sh
[ $1 = --version ] && exit 0
echo $$ >> {pids}
mkdir {first} 2> /dev/null || exec sleep 60
while [ $(wc -l < {pids}) -lt {files} ]; do sleep 0.1; done
kill -INT $PPID
exec sleep 60
""")
    ran = run_fresh(BUILD, str(compiler))
    assert ran.returncode and "KeyboardInterrupt" in ran.stderr
    (kept,) = (compiler.parent / "cache" / "kernels").iterdir()
    assert kept.suffix == ".lock"
    for pid in pids.read_text().split():
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


def test_where_they_cannot_be_built_pytorch_computes_and_says_so(tmp_path: Path) -> None:
    nothing = "has | off: no C compiler is found; install gcc or set CC | False"
    assert said(PATH=str(tmp_path), TWOAXIS_CACHE=str(tmp_path)) == nothing
    fails = tmp_path / "cc"
    fails.write_text("#!/bin/sh\n[ $1 = --version ] && exit 0\necho 'error: no such option' >&2\nexit 1\n")
    fails.chmod(0o755)
    assert said(CC=str(fails), TWOAXIS_CACHE=str(tmp_path)) == f"compiles | off: {fails} fails: error: no such option | False"
    fails.write_text('#!/bin/sh\ncase "$*" in *--version) exit 0;; esac\nkill -KILL $$\n')
    killed = f"compiles | off: {fails} -m64 fails: signal 9 | False"
    assert said(CC=f"{fails} -m64", TWOAXIS_CACHE=str(tmp_path)) == killed
    assert {path.suffix for path in (tmp_path / "kernels").iterdir()} == {".lock"}
    (tmp_path / "file").touch()
    found = said(TWOAXIS_CACHE=str(tmp_path / "file"))
    assert found.startswith("compiles | off: ") and found.endswith(f"'{tmp_path}/file/kernels' | False")
