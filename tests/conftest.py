"""What every test can rely on: one thread, fixed seeds, shapes that are checked where mixers are tested, and no silent skip."""

import gc
import os
import random
import re
import resource
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import jaxtyping
import numpy
import pytest
import torch
from hypothesis import settings
from hypothesis.internal.conjecture import providers

from .shape_checks import check_shapes, checked_if_of_shapes

CHECKED_PACKAGES = ["core", "ops", "depth", "sequence", "feed_forward", "local", "model"]
TESTS = Path(__file__).parent.resolve()
PARITY = TESTS / "parity"
# These reach mixers through what other rooms test, where shapes are checked.
UNCHECKED = ("audit", "checkpoints", "claims", "cli", "data", "distributed", "faults", "ledger", "planner", "study", "train")
# A session of tests that compile collects nothing else.
COMPILING = (
    "conformance",
    "interop/engines/test_contract.py",
    "interop/serve/test_static_rows.py",
    "ledger/test_meter.py",
    "model/test_static_cache.py",
    "study/test_timing.py",
    "train/test_compile.py",
)
# A session of tests that interpret kernels does too: Triton reads once whether it interprets.
INTERPRETING = ("ops/gpu",)
OWN_SESSIONS = {"compile": COMPILING, "interpret": INTERPRETING}
# What would else run on its own at the end.
LONGEST = ("test_kill", "test_ray", "test_sharded", "test_faults", "test_docs", "test_published")
QUARANTINE = TESTS / "QUARANTINE.md"

# An int is a float here, as for every type checker; `Self` can only be judged with the whole class at hand.
TYPE_CHECKER = """beartype.beartype(conf=beartype.BeartypeConf(
    is_pep484_tower=True,
    hint_overrides=beartype.FrozenDict({beartype.typing.Self: beartype.typing.Any}),
))"""

torch.set_num_threads(1)

# Without a GPU, `torch.manual_seed` keeps a stack trace of each call for every kind of device.
SEED = torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed

# The same examples on every machine; `--hypothesis-profile=explore` looks for new ones.
settings.register_profile("fixed", deadline=None, derandomize=True, database=None)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile("fixed")
# Else the constants of all loaded modules were drawn too: slow to find, and different in each process.
providers._get_local_constants = lambda: providers._local_constants


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    random.seed(0)
    numpy.random.seed(0)
    SEED(0)


@pytest.fixture(scope="session", autouse=True)
def kernels() -> Path:
    """Where the kernels of a CPU are, loaded before any test looks elsewhere for them."""
    from twoaxis.core.files import cache_folder
    from twoaxis.ops.cpu import library

    library.status()
    return cache_folder() / "kernels"


@pytest.fixture
def new_cache(kernels: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder of one test, but for the kernels, which are compiled once."""
    cache = tmp_path_factory.mktemp("cache")
    (cache / "kernels").symlink_to(kernels)
    monkeypatch.setenv("TWOAXIS_CACHE", str(cache))
    return cache


@pytest.fixture
def largest_file() -> Callable[[int], AbstractContextManager[None]]:
    """Lets the system itself refuse to write files beyond a size, as a full disk would, to code in any language."""

    @contextmanager
    def limited(size: int) -> Iterator[None]:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return limited


def _own_session(config: pytest.Config) -> str | None:
    """The marker of the tests that alone run in this session, if they have one of their own."""
    return config.option.markexpr if config.option.markexpr in OWN_SESSIONS else None


def _may_hold(path: Path, marker: str) -> bool:
    return any(path.is_relative_to(TESTS / place) for place in OWN_SESSIONS[marker])


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    own = _own_session(config)
    return True if own is not None and collection_path.is_file() and not _may_hold(collection_path, own) else None


def pytest_configure(config: pytest.Config) -> None:
    """Checks shapes at run time, except in sessions in which something is compiled, which would trace the checks too."""
    config.addinivalue_line("markers", "compile: uses torch.compile, so runs only in a session of its own: -m compile.")
    config.addinivalue_line("markers", "interpret: interprets kernels, so runs only in a session of its own: -m interpret.")
    if _own_session(config) == "interpret":
        os.environ["TRITON_INTERPRET"] = "1"
    if _own_session(config) is None:
        # Has to come before the first import of these packages, hence none in this file, nor in those of folders as they load.
        if "twoaxis" in sys.modules:
            raise pytest.UsageError("tests: a conftest.py imports twoaxis before shapes are checked; import it in its fixtures")
        jaxtyping.jaxtyped = checked_if_of_shapes
        jaxtyping.install_import_hook([f"twoaxis.{name}" for name in CHECKED_PACKAGES], TYPE_CHECKER)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Gives the session a new cache folder, which its workers share, so that the user's is neither read nor written.

    Kernels in it are those of earlier sessions, whose files are named by what they are made of.
    """
    if not hasattr(session.config, "workerinput"):
        folder = tempfile.TemporaryDirectory(prefix="twoaxis-tests-", ignore_cleanup_errors=True)
        if session.config.pluginmanager.hasplugin("cacheprovider"):
            Path(folder.name, "kernels").symlink_to(session.config.cache.mkdir("kernels"))
        before = os.environ.get("TWOAXIS_CACHE")
        os.environ["TWOAXIS_CACHE"] = folder.name

        def restore() -> None:
            folder.cleanup()
            os.environ.pop("TWOAXIS_CACHE")
            if before is not None:
                os.environ["TWOAXIS_CACHE"] = before

        session.config.add_cleanup(restore)


def pytest_collection_finish() -> None:
    """Leaves what collection has made out of all later searches for garbage, and makes these rarer; it lives on."""
    gc.freeze()
    gc.set_threshold(100_000, 50, 50)
    gc.enable()


def pytest_unconfigure() -> None:
    """Leaves everything out of the search for garbage with which Python ends."""
    gc.freeze()


def pytest_report_header(config: pytest.Config) -> str:
    if _own_session(config) is not None:
        return "shapes are not checked at run time"
    return "shapes are checked where mixers are tested; tests that compile or interpret are left out: -m compile, -m interpret"


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Reads `pytest tests/parity --fixtures DIR` as folders of golden tensors; elsewhere it keeps pytest's meaning.

    The folders are in `config.option.fixture_folders`.
    """
    here = config.invocation_params.dir
    if not hasattr(config.option, "fixture_folders"):
        config.option.fixture_folders = []
    paths = {argument: (here / argument).resolve() for argument in config.args}
    holding = {argument: path for argument, path in paths.items() if any(path.glob("*.json"))}
    tests = [argument for argument, path in paths.items() if path.is_relative_to(PARITY) and argument not in holding]
    if not getattr(config.option, "showfixtures", False) or not tests:
        return
    folders = [path for argument, path in paths.items() if argument not in tests]
    for argument, path in paths.items():
        if argument not in tests and argument not in holding:
            raise pytest.UsageError(f"--fixtures {path}: must be a folder with golden tensors, *.json beside *.safetensors")
    if folders:
        config.option.showfixtures = False
        config.args[:] = tests
        config.option.fixture_folders = [str(folder) for folder in folders]


def quarantined(table: str) -> dict[str, str]:
    """Reads the rows `| test id | reason | exit condition |` of the quarantine table as {test id: reason}.

    Raises:
        pytest.UsageError: a row that lacks a cell.
    """
    rows: dict[str, str] = {}
    for line in table.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1]]
        if not cells or cells[0] in ("", "test id") or set(cells[0]) <= set("-: "):
            continue
        if len(cells) != 3 or not all(cells):
            raise pytest.UsageError(f"QUARANTINE.md: {line!r} must have a test id, a reason and an exit condition")
        rows[cells[0].strip("`").replace("\\|", "|")] = f"{cells[1]}; leaves when {cells[2]}"
    return rows


ROWS = quarantined(QUARANTINE.read_text()) if QUARANTINE.exists() else {}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks what compiles (by marker, or by `compile` in its id) and what is in quarantine; puts first what takes longest."""
    items.sort(key=lambda item: not item.path.name.startswith(LONGEST))
    for item in items:
        if "compile" in item.nodeid:
            item.add_marker("compile")
        # A reason that begins with "without" names what a machine may lack: skipped there, the test has to pass elsewhere.
        if item.nodeid in ROWS and not ROWS[item.nodeid].startswith("without "):
            item.add_marker(pytest.mark.xfail(reason=ROWS[item.nodeid], strict=True))
    stale = set(ROWS) - {item.nodeid for item in items}
    whole_files = {item.nodeid.partition("::")[0] for item in items}
    if not any("::" in argument for argument in config.args):
        for row in sorted(stale):
            file, _, test = row.partition("::")
            if test and file in whole_files:
                raise pytest.UsageError(f"QUARANTINE.md: no test is called {row}; remove the row")
    if _own_session(config) is None:
        others = {item: marker for item in items for marker in OWN_SESSIONS if item.get_closest_marker(marker)}
        for item, marker in others.items():
            if not _may_hold(item.path, marker):
                raise pytest.UsageError(
                    f"{item.nodeid}: marked {marker}: its file must be in OWN_SESSIONS of tests/conftest.py"
                )
        config.hook.pytest_deselected(items=list(others))
        items[:] = [item for item in items if item not in others]


def _refuse_silent_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    # A skip and an expected failure both report the outcome `skipped`.
    if report.outcome == "skipped" and report.nodeid not in ROWS:
        report.outcome = "failed"
        vars(report).pop("wasxfail", None)
        report.longrepr = f"{report.nodeid}: not run or expected to fail, without a row in QUARANTINE.md: {report.longrepr}"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Checks shapes only where operators, mixers and models are tested."""
    check_shapes(not item.path.is_relative_to(TESTS) or item.path.relative_to(TESTS).parts[0] not in UNCHECKED)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Iterator[None]:
    report = yield
    _refuse_silent_skip(report)
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report() -> Iterator[None]:
    report = yield
    _refuse_silent_skip(report)
    return report
