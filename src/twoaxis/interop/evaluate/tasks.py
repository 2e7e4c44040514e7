"""Tasks of lm-eval from the files of a folder, run offline in this process, and their generation options."""

import contextlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from twoaxis.core.errors import ConfigError, DataError, TwoAxisError, nearest, problem
from twoaxis.data import Tokenizer
from twoaxis.data.tokenizer import Progress
from twoaxis.model import Decoder, Sampling
from twoaxis.model.likelihood import BATCH_SIZE

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager


MISSING = "lm-eval is not installed: must be there for tasks; pip install 'twoaxis[evaluate]'"

FEWSHOT_SEED = 1234
"""The seed of few-shot examples in lm-eval."""

BOOTSTRAP_DRAWS = 1000
"""For the standard error of metrics without a formula for it."""

OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
"""Environment variables of which one set to 0 allows downloads."""

MAX_NEW_TOKENS = 256
"""The default of a task; at most half of the model's max_seq_len."""

LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Keys for the most new tokens; the first one given counts."""

KNOWN = ("until", *LENGTHS, "do_sample", "temperature", "top_k", "top_p", "seed")


class TaskFolder(NamedTuple):
    """The requested tasks, groups or tags, and lm-eval's index of their folder alone."""

    names: tuple[str, ...]
    folder: Path
    manager: "TaskManager"


class Continuation(NamedTuple):
    """The options in the `generation_kwargs` of a task.

    Attributes:
        until: the text ends before the first of these, as in `StopStringMatcher`, and before special tokens that they name.
        max_new_tokens: the most new tokens.
        sampling: greedy by default.
    """

    until: tuple[str, ...]
    max_new_tokens: int
    sampling: Sampling

    @staticmethod
    def read(kwargs: Mapping[str, Any], max_seq_len: int) -> "Continuation":
        """Reads the keyword arguments of a request.

        Raises:
            ConfigError: an unknown one, or more new tokens than max_seq_len.

        Example:
            >>> Continuation.read({"until": ["."], "max_gen_toks": 4, "do_sample": False}, 64)
            Continuation(until=('.',), max_new_tokens=4, sampling=Sampling(temperature=0.0, top_k=None, top_p=1.0, seed=0))
        """
        for name in kwargs:
            if name not in KNOWN:
                raise ConfigError(f"generation_kwargs: has no {name!r}; {nearest(name, KNOWN)}")
        # Null counts as absent.
        kwargs = {name: value for name, value in kwargs.items() if value is not None}
        until = kwargs.get("until") or ()
        until = (until,) if isinstance(until, str) else tuple(until)
        given = [int(kwargs[name]) for name in LENGTHS if name in kwargs]
        new_tokens = given[0] if given else min(MAX_NEW_TOKENS, max_seq_len // 2)
        if not 0 <= new_tokens < max_seq_len:
            allowed = f"in 0..{max_seq_len - 1}, to leave room for a context in max_seq_len={max_seq_len}"
            raise ConfigError(problem("max_gen_toks", new_tokens, allowed, "lower it in the generation_kwargs of the task"))
        sampled = kwargs.get("do_sample")
        temperature = 0.0 if sampled is False else kwargs.get("temperature", 1.0 if sampled else 0.0)
        options = {name: kwargs[name] for name in ("top_k", "top_p", "seed") if name in kwargs}
        sampling = Sampling.from_data({"temperature": temperature, **options})
        return Continuation(tuple(text for text in until if text), new_tokens, sampling)


def open_tasks(names: Sequence[str], folder: Path) -> TaskFolder:
    """Finds tasks in the files of a folder (**/*.yaml), without loading them; the tasks of lm-eval itself are excluded.

    Raises:
        ConfigError: lm-eval, the folder or a task is missing, a file is not YAML, a temperature is null, or data have a URL.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError(MISSING)
    if not folder.is_dir():
        raise ConfigError(problem("include", str(folder), "a folder with task files", "name the folder of your *.yaml"))
    _check_yaml(folder)
    from lm_eval.tasks import TaskManager

    # Absolute, since tasks are loaded from inside the folder.
    manager = TaskManager(include_path=[str(folder.absolute())], include_defaults=False)
    known = manager.all_tasks
    if not known:
        raise ConfigError(f"folder {folder}: holds no task; must hold a *.yaml with the key task; name another with --include")
    for name in names:
        if name not in known:
            listed = f"task {name!r}: must be one of {', '.join(known)}, which are in {folder}"
            remedy = nearest(name, known)
            raise ConfigError(f"{listed}; {remedy if remedy.startswith('did') else 'write a file for it, or name one of them'}")
    for config in _configurations(manager, names):
        generation = config.get("generation_kwargs") or {}
        # lm-eval converts it to float.
        if "temperature" in generation and generation["temperature"] is None:
            got = f"task {config.get('task')}: generation_kwargs.temperature is null"
            raise ConfigError(f"{got}: must be a number; leave it out for greedy generation")
        address = None if _allowed_online() else next(_addresses(config), None)
        if address:
            raise ConfigError(f"task {config.get('task')}: reads {address}: must read local files; {_remedy(folder)}")
    return TaskFolder(tuple(dict.fromkeys(names)), folder, manager)


def run_tasks(
    model: Decoder,
    tokenizer: Tokenizer,
    tasks: TaskFolder,
    limit: int | None = None,
    batch_size: int = BATCH_SIZE,
    note: Callable[[str], None] | None = None,
    progress: Progress | None = None,
    ends: frozenset[int] = frozenset(),
) -> dict[str, Any]:
    """Evaluates a model on tasks; relative paths in a task are relative to its folder.

    Args:
        model: the decoder, in evaluation mode.
        tokenizer: of the model.
        tasks: from `open_tasks`.
        limit: examples of each task; None takes all.
        batch_size: sequences at once.
        note: receives warnings, one line each.
        progress: progress callback, optional.
        ends: tokens that end generated text, in addition to the end of a document.

    Returns:
        JSON-ready data: the version of lm-eval, and for each task its metrics, version and number of examples.

    Raises:
        DataError: data or a file of a task that cannot be used.
        ConfigError: a task with options that the model does not support.
    """
    import lm_eval
    from lm_eval.evaluator import evaluate

    from twoaxis.interop.evaluate.language_model import DecoderLM

    adapter = DecoderLM(model, tokenizer, batch_size, note, progress, ends)
    # lm-eval prints progress; standard output is for results.
    with offline(), contextlib.redirect_stdout(sys.stderr), _one_process():
        with _one_line_errors(tasks), contextlib.chdir(tasks.folder):
            loaded = tasks.manager.load(list(tasks.names))
            for task in loaded["tasks"].values():
                if task.get_config("num_fewshot") is None:
                    task.set_config(key="num_fewshot", value=0)
                task.set_fewshot_seed(seed=FEWSHOT_SEED)
        with _one_line_errors(tasks):
            found: Any = evaluate(adapter, loaded, limit=limit, bootstrap_iters=BOOTSTRAP_DRAWS, log_samples=False)
    return {"lm_eval": lm_eval.__version__, "tasks": {name: _result(found, name) for name in found["results"]}}


@contextlib.contextmanager
def offline() -> Iterator[None]:
    """Sets `datasets` and `huggingface_hub` offline, unless the environment allows downloads."""
    from datasets import config
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE, config.HF_HUB_OFFLINE
    if not _allowed_online():
        # The libraries read the environment only when they are imported.
        constants.HF_HUB_OFFLINE = config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, config.HF_HUB_OFFLINE = before


def _allowed_online() -> bool:
    return any(os.environ.get(name, "").lower() in ("0", "no", "off", "false") for name in OFFLINE)


def _remedy(folder: Path) -> str:
    return f"name files in dataset_kwargs.data_files, relative to {folder}, or set HF_HUB_OFFLINE=0 to allow downloads"


@contextlib.contextmanager
def _one_process() -> Iterator[None]:
    # lm-eval would fork a process per core for bootstrap samples.
    given = os.environ.get("DISABLE_MULTIPROC")
    os.environ["DISABLE_MULTIPROC"] = "1"
    try:
        yield
    finally:
        if given is None:
            del os.environ["DISABLE_MULTIPROC"]
        else:
            os.environ["DISABLE_MULTIPROC"] = given


@contextlib.contextmanager
def _one_line_errors(tasks: TaskFolder) -> Iterator[None]:
    """Raises errors of lm-eval and datasets as a DataError of one line."""
    try:
        yield
    except TwoAxisError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split()) or repr(error)
        raise DataError(f"tasks {', '.join(tasks.names)}: cannot be run ({reason}); {_remedy(tasks.folder)}") from error


def _check_yaml(folder: Path) -> None:
    # lm-eval silently skips files that it cannot read.
    import yaml

    for path in sorted(folder.glob("**/*.yaml")):
        try:
            yaml.compose(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as error:
            reason = " ".join(str(error).split())
            raise ConfigError(f"task file {path}: is not YAML ({reason}); repair the file, or move it away") from None


def _configurations(manager: "TaskManager", names: Sequence[Any], within: tuple[str, ...] = ()) -> Iterator[dict[str, Any]]:
    """The configurations of tasks, groups and tags, members included; `within` are the groups around them."""
    for one in names:
        if one in within:
            raise ConfigError(
                f"task {one!r}: is a member of itself ({' > '.join((*within, one))}); remove it from one of its groups"
            )
        around = (*within, one) if isinstance(one, str) else within
        entry = manager.task_index.get(one) if isinstance(one, str) else None
        config = one if isinstance(one, dict) else (entry.cfg if entry else None) or {}
        yield config
        members = config.get("task")
        yield from _configurations(manager, members if isinstance(members, list) else [], around)
        if entry and not config:
            yield from _configurations(manager, sorted(entry.tags), around)


def _addresses(config: dict[str, Any]) -> Iterator[str]:
    """The URLs in the data of a configuration."""
    left: list[Any] = [config.get("dataset_path"), config.get("dataset_kwargs")]
    while left:
        one = left.pop()
        if isinstance(one, str) and "://" in one:
            yield one
        left += one.values() if isinstance(one, dict) else one if isinstance(one, list) else []


def _result(found: Any, name: str) -> dict[str, Any]:
    metrics = {}
    for key, value in found["results"][name].items():
        metric, comma, _ = key.partition(",")
        if comma and not isinstance(value, str) and not metric.endswith("_stderr"):
            error = found["results"][name].get(key.replace(metric, f"{metric}_stderr", 1))
            metrics[key] = {"value": _plain(value), "stderr": None if isinstance(error, str) else _plain(error)}
    samples = found["n-samples"].get(name, {}).get("effective")
    return {"version": found["versions"].get(name), "examples": samples, "metrics": metrics}


def _plain(value: Any) -> Any:
    """A metric, of any type, as JSON-ready data."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    # An array of one number is a number, and other arrays are iterable.
    with contextlib.suppress(TypeError, ValueError, RuntimeError):
        return float(value)
    return [_plain(one) for one in value] if isinstance(value, Iterable) else str(value)
