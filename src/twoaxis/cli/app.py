"""The command `twoaxis`: its verbs, and how errors end it."""

import atexit
import gc
import io
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from twoaxis import __version__
from twoaxis.cli.audit import audit
from twoaxis.cli.check import check
from twoaxis.cli.claims import claims
from twoaxis.cli.evaluate import evaluate
from twoaxis.cli.export import export, import_
from twoaxis.cli.generate import generate
from twoaxis.cli.list import list_mixers
from twoaxis.cli.output import is_first_process, say
from twoaxis.cli.plan import plan
from twoaxis.cli.report import report
from twoaxis.cli.retrofit import retrofit
from twoaxis.cli.serve import serve
from twoaxis.cli.show import show
from twoaxis.cli.study import study
from twoaxis.cli.train import train
from twoaxis.core.errors import ConfigError, TwoAxisError, nearest
from twoaxis.core.interrupt import termination_as_interrupt

NEGATIVE_FINDING, BAD_INPUT, INTERRUPTED = 1, 2, 130

# Typer does not export the base of its usage errors, and newer releases carry a click of their own.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]

GROUPS = {
    "Look up": (("list", list_mixers), ("show", show), ("claims", claims), ("plan", plan)),
    "Train and compare": (("train", train), ("study", study), ("report", report), ("audit", audit)),
    "Use a model": (("evaluate", evaluate), ("generate", generate), ("serve", serve)),
    "Exchange models": (("retrofit", retrofit), ("export", export), ("import", import_)),
    "Test mixers": (("check", check),),
}
VERBS = tuple(verb for verbs in GROUPS.values() for verb in verbs)

STATUSES = (
    ("0", "Done."),
    ("1", "A negative finding: a check fails, a claim does not hold, a run diverged, nothing fits, or models differ."),
    ("2", "Bad input or another error, in one line on standard error with a remedy."),
    ("130", "Interrupted; the same command continues a run or a study."),
)


class Grouped(TyperGroup):
    """The help of all verbs: in groups, each with its whole first sentence, and what the exit status means."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Writes the groups and the exit statuses."""
        for title, verbs in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl(
                    [(name, " ".join((verb.__doc__ or "").partition("\n\n")[0].split())) for name, verb in verbs]
                )
        with formatter.section("Exit status"):
            formatter.write_dl(STATUSES)


app = typer.Typer(
    cls=Grouped,
    help="The two axes of a Transformer: mixing along sequence position and along layer depth.\n\n"
    "Results go to standard output (--json for machines), progress to standard error. `twoaxis VERB --help` has an example.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for name, verb in VERBS:
    app.command(name)(verb)


@app.callback(invoke_without_command=True)
def options(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error instead of one line.")] = False,
) -> None:
    """Options of every verb; `main` reads --debug itself."""
    if version:
        print(__version__)
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status.

    Args:
        arguments: the words after `twoaxis`; None takes them from the process.
    """
    if arguments is None:
        # Python searches everything for garbage when it ends, twice, which takes as long as many verbs.
        atexit.register(gc.freeze)
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    _accept_all_characters()
    try:
        _check_verb(words)
        with termination_as_interrupt():
            status = app(["--debug", *words] if debug else words, prog_name="twoaxis", standalone_mode=False)
            # Not at the end of the process, where a full disk would print a traceback.
            _flush()
        # Typer turns an interrupt into an exit.
        return _interrupted() if status == INTERRUPTED else status if isinstance(status, int) else 0
    except TwoAxisError as error:
        return _fail(error, str(error), debug)
    except _UsageError as error:
        return _fail(error, _usage(error, words), debug)
    except BrokenPipeError:
        # The reader has closed the pipe, such as `head`; typer ends a verb that still prints in the same way.
        _drop_output()
        return 1
    except OSError as error:
        _drop_output()
        where = f"{error.filename}: " if error.filename else ""
        return _fail(error, f"{where}{error.strerror or error}; free space, or check the path and its permissions", debug)
    except (KeyboardInterrupt, typer.Abort):
        return _interrupted()
    except SystemExit as done:
        # How typer ends a completion.
        return done.code if isinstance(done.code, int) else 0
    except Exception as error:
        return _fail(error, "" if debug else _unforeseen(error), debug)


def _interrupted() -> int:
    say("interrupted")
    return INTERRUPTED


def _check_verb(words: Sequence[str]) -> None:
    """Raises ConfigError for an unknown verb; words that begin with a dash are options of all verbs."""
    verb, known = next((word for word in words if not word.startswith("-")), None), [name for name, _ in VERBS]
    if verb is not None and verb not in known:
        raise ConfigError(f"unknown verb {verb!r}; {nearest(verb, known)}")


def _usage(error: Any, words: Sequence[str]) -> str:
    """The message of a usage error, with where the options are listed."""
    context = getattr(error, "ctx", None)
    where = "twoaxis" if context is None else context.command_path
    if context is not None and hasattr(error, "possibilities") and hasattr(error, "option_name"):
        known = [name for one in context.command.get_params(context) for name in one.opts if name.startswith("--")]
        return f"unknown option {error.option_name!r}; {nearest(error.option_name, known)}"
    missing = getattr(error, "param", None)
    if missing is not None and not getattr(error, "message", ""):
        return f"{_missing(missing)}{_example(context)}; see `{where} --help`"
    message = getattr(error, "format_message", lambda: str(error))()
    # `--name=value` as two words.
    apart = [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]
    for name in getattr(getattr(error, "param", None), "opts", ()):
        if isinstance(error, typer.BadParameter) and name.startswith("-") and error.message and name in apart[:-1]:
            # The last value of a repeated option counts.
            value = apart[len(apart) - apart[-2::-1].index(name) - 1]
            detail = error.message.removeprefix("Value error, ").replace("Input should", "must")
            message = f"{name}={value!r}: {detail}"
    return f"{message.rstrip('.')}; see `{where} --help`"


def _missing(parameter: Any) -> str:
    """Names a missing parameter, and what it is."""
    name = parameter.opts[0] if parameter.opts[0].startswith("-") else parameter.name
    about = (getattr(parameter, "help", None) or "").rstrip(".")
    return f"{name} is missing: {about[:1].lower()}{about[1:]}" if about else f"{name} is missing"


def _example(context: Any) -> str:
    """The example in the help of a verb, as a remedy."""
    found = " ".join((getattr(context.command, "help", None) or "").split()).partition("Example: ")[2]
    return f"; try `{found}`" if found else ""


def _fail(error: Exception, message: str, debug: bool) -> int:
    if debug:
        raise error
    line = " ".join(message.split())
    if is_first_process():
        say(line)
    elif not getattr(error, "on_all_ranks", False):
        # Where the first process has met the same, the launcher ends this one meanwhile.
        time.sleep(1.0)
        say(f"rank {os.environ['RANK']}: {line}")
    return BAD_INPUT


def _unforeseen(error: Exception) -> str:
    """The message of an unexpected error, whose traceback is kept in a file, since a long run is not repeated to see it."""
    import tempfile
    import traceback

    said = f"{type(error).__name__}: {error}"
    try:
        descriptor, path = tempfile.mkstemp(prefix="twoaxis-", suffix=".txt")
        with open(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write("".join(traceback.format_exception(error)))
        where = f"its traceback is in {path}"
    except OSError:
        where = "--debug shows its traceback"
    return f"stopped by an unexpected error ({said[:300]}); {where}; please report it"


def _accept_all_characters() -> None:
    """Writes characters that the encoding of the output lacks as escapes, such as bytes of a path that are not UTF-8."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Some replacements of a terminal cannot be changed any more.
            with suppress(OSError):
                stream.reconfigure(errors="backslashreplace")


def _flush() -> None:
    # Python has no standard output if the shell has closed it.
    if sys.stdout is not None:
        sys.stdout.flush()


def _drop_output() -> None:
    """Discards unprinted output, which Python would otherwise try to print, with a traceback, at the end of the process."""
    try:
        _flush()
    except OSError:
        with suppress(OSError), open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
