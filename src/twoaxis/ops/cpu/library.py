"""The library of the C kernels: compiled at its first use, kept in the cache folder, and loaded.

No compiler is needed to run at all: without one, or where it fails, plain PyTorch computes the same.
"""

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from twoaxis.core.errors import ConfigError, DataError
from twoaxis.core.files import cache_folder, draft_of, remove_drafts, try_lock
from twoaxis.ops import kernels
from twoaxis.ops.precision import IN_PLAIN_FORMS, refuse_second_gradients, within_plain_forms

PARTS = 64
"""Parts of the rows, for the scratch of sums over rows."""

MOST_TENSORS = 64
"""Sources or results of one mixing."""

MOST_STREAMS = 8
"""Of a matrix that Sinkhorn normalisation takes."""

BLOCK = 16
"""Tokens that it takes together."""

# What both languages know is written once.
DEFINED = {"PARTS": PARTS, "MOST": MOST_TENSORS, "LARGEST": MOST_STREAMS, "BLOCK": BLOCK}

WAIT_SECONDS = 60
"""Seconds for which a process waits for another one that compiles."""

COMPILERS = ("cc", "gcc", "clang")
# Without errno, a square root is an instruction; strict C would round each product before its sum.
FLAGS = ("-std=c11", "-O3", "-march=native", "-fno-math-errno", "-ffp-contract=fast", "-fopenmp", "-fPIC")
# A call with other arguments than its kernel takes would crash.
FLAGS += ("-Werror=int-conversion", "-Werror=incompatible-pointer-types")
FLAGS += tuple(f"-D{name}={value}" for name, value in DEFINED.items())


_LOCK = threading.Lock()


class _Loaded(NamedTuple):
    """The library, or why there is none."""

    kernels: ctypes.CDLL | None
    reason: str


def status() -> str:
    """Says whether C kernels serve tensors on a CPU, and if not, why: `on`, or `off` with the reason."""
    if kernels.INTERPRETED:
        return "off: Triton interprets its kernels"
    if not kernels.switched_on():
        return f"off: {kernels.SWITCH}=off"
    loaded = _load()
    return "on" if loaded.kernels is not None else f"off: {loaded.reason}"


def concerned(x: Tensor) -> bool:
    """Whether such a tensor is a matter of these kernels, and not of Triton's, which also serve a CPU when interpreted."""
    return x.device.type == "cpu" and not kernels.INTERPRETED


def served(*tensors: Tensor | None) -> bool:
    """Whether the kernels compute with these tensors: float32 on a CPU, in no compiled graph, switched on."""
    if torch.compiler.is_compiling():
        return False
    return _are_taken(tensors) and _load().kernels is not None


def operator_served(*tensors: Tensor | None) -> bool:
    """Whether the kernels compute an operator of torch's library with these tensors: also in a graph that is compiled to train.

    Without gradients a compiler makes as fast a graph of the plain form, where small steps of decoding call nothing.
    """
    if not torch.compiler.is_compiling():
        return served(*tensors)
    trains = torch.is_grad_enabled() and not torch.compiler.is_exporting()
    return trains and _are_taken(tensors) and _is_loaded()


def _are_taken(tensors: Sequence[Tensor | None]) -> bool:
    """Whether kernels are switched on and take these tensors."""
    for x in tensors:
        if x is not None and not (_is_plain(x) and x.dtype == torch.float32 and x.device.type == "cpu"):
            return False
    return not kernels.INTERPRETED and kernels.switched_on() and not within_plain_forms() and not kernels.watched()


def _is_loaded() -> bool:
    """Whether there are kernels, which a compiler need not trace."""
    return _load().kernels is not None


# As `torch.compiler.assume_constant_result` marks it, which loads the compiler, and Triton.
vars(_is_loaded)["_dynamo_marked_constant"] = True


def _is_plain(x: Tensor) -> bool:
    """Of a subclass, only its own operations know where its numbers are."""
    return type(x) in (Tensor, nn.Parameter)


def call(name: str, *arguments: Tensor | Sequence[Tensor | None] | float | int | bool | None) -> None:
    """Calls a kernel with the addresses of contiguous tensors, and with the number of threads as its last argument.

    Raises:
        ConfigError: a graph of the call is asked for, which kernels do not leave; or a gradient arrives as a subclass of
            tensors.
    """
    refuse_second_gradients(f"kernel {name}", IN_PLAIN_FORMS)
    found = _load().kernels
    assert found is not None
    found[name](*map(_argument, arguments), torch.get_num_threads())


def rows(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors as kernels take them."""
    return [kernels.ready(x) for x in tensors]


def scratch(*shape: int) -> Tensor:
    """Memory for what each part of the rows sums up."""
    return torch.empty(PARTS, *shape, dtype=torch.float32, device="cpu")


def n_rows(x: Tensor) -> int:
    """The number of rows of the last axis."""
    return x.numel() // max(1, x.shape[-1])


def _argument(value: Tensor | Sequence[Tensor | None] | float | int | bool | None) -> object:
    if isinstance(value, Tensor):
        if not _is_plain(value):
            raise ConfigError(f"kernels: got a {type(value).__name__}: must be a plain tensor; set {kernels.SWITCH}=off")
        return ctypes.c_void_p(value.data_ptr())
    if isinstance(value, bool):
        return ctypes.c_int(value)
    if isinstance(value, int):
        return ctypes.c_int64(value)
    if isinstance(value, float):
        return ctypes.c_float(value)
    if value is None:
        return None
    return (ctypes.c_void_p * len(value))(*(None if one is None else _argument(one) for one in value))


def _load() -> _Loaded:
    # Operators are registered once, whichever thread comes first.
    with _LOCK:
        return _first_load()


def must_compile() -> bool:
    """Whether the next use compiles, which takes some seconds."""
    if _first_load.cache_info().currsize or kernels.INTERPRETED or not kernels.switched_on():
        return False
    try:
        return (compiler := _compiler()) is not None and not _path(compiler).exists()
    except (OSError, DataError, subprocess.CalledProcessError):
        return False


def _compiler() -> list[str] | None:
    """The command of a C compiler, with the arguments that CC may have, or None."""
    if sys.platform != "linux":
        return None
    named = os.environ.get("CC", "")
    words = [[named], *([one] for one in COMPILERS)]
    # Neither a path with spaces nor one with half a quotation is a command with arguments.
    with suppress(ValueError):
        words.insert(1, shlex.split(named))
    return next(([found, *one[1:]] for one in words if one and one[0] and (found := shutil.which(one[0]))), None)


@cache
def _first_load() -> _Loaded:
    compiler = _compiler()
    if compiler is None:
        why = "no C compiler is found; install gcc or set CC" if sys.platform == "linux" else f"not tried on {sys.platform}"
        return _Loaded(None, why)
    try:
        loaded = ctypes.CDLL(str(_built(compiler)))
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if "error" in line] or error.stderr.splitlines() or [""]
        ended = f"signal {-error.returncode}" if error.returncode < 0 else f"exit status {error.returncode}"
        return _Loaded(None, f"{shlex.join(compiler)} fails: {lines[0].strip() or ended}")
    except (OSError, DataError) as error:
        return _Loaded(None, str(error))
    from twoaxis.ops.cpu.operators import register

    register()
    return _Loaded(loaded, "")


def _built(compiler: Sequence[str]) -> Path:
    """The path of the library in the cache folder, compiled if it is not there."""
    library = _path(compiler)
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with _first_turn(library):
            if not library.exists():
                _compile(compiler, library)
    return library


@contextmanager
def _first_turn(library: Path) -> Iterator[None]:
    """Lets one of several processes compile while the others wait, for a time; later, or without locks, all compile."""
    with ExitStack() as stack:
        ends = time.monotonic() + WAIT_SECONDS
        with suppress(OSError):
            lock = stack.enter_context(open(library.with_suffix(".lock"), "wb"))
            while try_lock(lock.fileno()) == "taken" and not library.exists() and time.monotonic() < ends:
                time.sleep(0.05)
        yield


def _path(compiler: Sequence[str]) -> Path:
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=True).stdout
    made_of = [version, " ".join([*compiler[1:], *FLAGS]), _processor(), *(path.read_text() for path in _files("ch"))]
    return cache_folder() / "kernels" / f"{hashlib.sha256(chr(0).join(made_of).encode()).hexdigest()[:32]}.so"


def _files(suffixes: str) -> list[Path]:
    return sorted(Path(__file__).parent.glob(f"*.[{suffixes}]"))


def _compile(compiler: Sequence[str], library: Path) -> None:
    """Compiles all files side by side, and links them, in a folder that the next one removes if this process is killed."""
    remove_drafts(library.parent)
    with draft_of(library) as scratch:
        scratch.mkdir()
        made = {path: f"{scratch}/{path.stem}.o" for path in _files("c")}
        _run_all([*compiler, *FLAGS, "-c", str(path), "-o", to] for path, to in made.items())
        _run_all([[*compiler, *FLAGS, "-shared", *made.values(), "-o", f"{scratch}/{library.name}", "-lm"]])
        os.replace(f"{scratch}/{library.name}", library)


def _run_all(commands: Iterable[list[str]]) -> None:
    with ExitStack() as stack:
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        running = []
        for command in commands:
            running.append(stack.enter_context(subprocess.Popen(command, **pipes)))
            # After an error or an interrupt the others would go on, and write to a folder that is being removed.
            stack.callback(running[-1].terminate)
        for one in running:
            said, _ = one.communicate()
            if one.returncode:
                raise subprocess.CalledProcessError(one.returncode, one.args, stderr=said)


def _processor() -> str:
    """What `-march=native` depends on: a cache folder may be shared between machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(line for line in lines if line.startswith(("model name", "flags", "Features", "CPU")))
