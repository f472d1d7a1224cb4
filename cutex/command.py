"""The end of every command: anything but a fault of the kernel is one sentence and an exit code."""

from __future__ import annotations

import argparse
import ast
import atexit
import errno
import gc
import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from difflib import get_close_matches
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec

from cutex.errors import BadOption, Missing

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG}
INTERRUPTED = 130  # exit code after Ctrl-C
INSTALL = "pip install -e '.[cu13]' in cutex's clone installs it"

P = ParamSpec("P")

# NOTE: the interpreter would look for cycles among all that torch and the DSL have made, to free
# what the process's end frees: a fifth of the CPU of a short command
atexit.register(gc.freeze)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises BadOption, without printing the usage."""

    def error(self, message: str) -> NoReturn:
        raise BadOption(message)

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        # NOTE: argparse drops a value that is "--", and hands on an empty list
        if action.nargs is None and arg_strings == ["--"]:
            self.error(f"argument {'/'.join(action.option_strings)}: '--' is no value")
        return super()._get_values(action, arg_strings)

    def _print_message(self, message: str, file: SupportsWrite[str] | None = None) -> None:
        # NOTE: argparse hides that its help could not be written
        if message:
            (file or sys.stderr).write(message)
            sys.stdout.flush()


def commands() -> Iterator[tuple[str, str]]:
    """Each `python -m cutex.X` and what it does, as the first line of its module says."""
    here = Path(__file__).parent
    files = {file.stem: file for file in here.glob("[!_]*.py")}
    files |= {file.parent.name: file for file in here.glob("*/__main__.py")}
    for name, file in sorted(files.items()):
        module = ast.parse(file.read_text(encoding="utf-8"))
        says = (ast.get_docstring(module) or "").partition("\n")[0]
        command, _, what = says.partition(": ")
        if command.startswith(f"python -m cutex.{name}"):
            yield command, what.removesuffix(".").removesuffix(" (see --help)")


def instead(given: Sequence[str]) -> str:
    """What to type instead of `python -m cutex` with arguments."""
    name = given[0].removeprefix("cutex.")
    known = [command.split()[2].removeprefix("cutex.") for command, _ in commands()]
    if name in known:
        return f"the command is python -m cutex.{' '.join([name, *given[1:]])}"
    near = get_close_matches(name, known, 1)
    meant = f"; did you mean python -m cutex.{near[0]}?" if near else ""
    return f"{given[0]!r} is no command: python -m cutex lists them{meant}"


def refuse(sentence: str) -> int:
    """Print why a command does nothing, and return the exit code of bad input."""
    tell(sentence)
    return 2


def tell(sentence: str) -> None:
    """Print a sentence on stderr, if that can be written."""
    with suppress(OSError):
        print(f"cutex: {sentence}", file=sys.stderr, flush=True)


def writable(option: str, text: str) -> Path:
    """Return the file that an option names. Raises BadOption where it cannot be written, before
    there is anything to write; leaves nothing where nothing was."""
    file = Path(text)
    try:
        new = not os.path.lexists(file)
        # NOTE: for appending, which keeps the file's text until there is something to write
        with file.open("a", encoding="utf-8"):
            pass
        if new:
            file.unlink()
    except OSError as error:
        raise BadOption(f"{option} {text or repr(text)}: {error.strerror}") from None
    return file


def in_clone(file: Path) -> None:
    """Raise BadOption unless the folder of `file`, which a clone of cutex has, exists; for use
    before long work."""
    if not file.parent.is_dir():
        raise BadOption(f"{file.parent}/ is not here: {file} is written in a clone of cutex")


def print_nowhere() -> None:
    """Discard all further output, whose reader has gone."""
    os.dup2(os.open(os.devnull, os.O_RDWR), sys.stdout.fileno())


def open_closed() -> None:
    """Open /dev/null on standard streams that were closed (`>&-`), so that no later file takes a
    descriptor from 0 to 2 and is mixed with what is printed."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            nothing = os.open(os.devnull, os.O_RDWR)  # its number is the stream's: the lowest free
            os.set_inheritable(nothing, True)
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, os.fdopen(nothing, mode, encoding="utf-8"))


def print_anything() -> None:
    """Have characters that the standard streams' encoding lacks printed as escapes: those of a file
    name that is no UTF-8, or of any but ASCII in the locale C."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def of_the_disk(error: BaseException | None) -> OSError | None:
    """The error of a full or unwritable disk that `error` is, or was raised for by the DSL."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in FULL:
            return error
        error = error.__cause__ or error.__context__
    return None


def not_installed(error: ModuleNotFoundError) -> str:
    """What a command says that lacks a package; empty for a module of cutex, which is a fault."""
    name = (error.name or "").partition(".")[0]
    return f"{name} is not installed; {INSTALL}" if name not in ("", "cutex") else ""


def _tell_uncaught(kind: type[BaseException], error: BaseException, where: Any) -> None:
    """As `answered`, of a command's module that cannot import what it needs: no `main` is there
    yet to catch it."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    ours = spec is not None and spec.name.startswith("cutex.")
    if ours and isinstance(error, ModuleNotFoundError) and (says := not_installed(error)):
        refuse(says)
        sys.stderr.flush()
        os._exit(2)  # NOTE: after this hook the interpreter's own code would be 1
    _default_hook(kind, error, where)


_default_hook, sys.excepthook = sys.excepthook, _tell_uncaught


def answered(main: Callable[P, int]) -> Callable[P, int]:
    """Wrap the `main` of a command: bad options, a reader that leaves (`| head`), Ctrl-C, an error
    of the disk, a lack of memory and a missing installation end it with one sentence at most, never
    with a traceback."""

    @wraps(main)
    def run(*args: P.args, **kwargs: P.kwargs) -> int:
        open_closed()
        print_anything()
        try:
            code = main(*args, **kwargs)
            if not (sys.stdout is None or sys.stdout.closed):  # a script may do so
                sys.stdout.flush()
            return code
        except BrokenPipeError:
            print_nowhere()
            return 0
        except KeyboardInterrupt:
            tell("interrupted")
            return INTERRUPTED
        except (BadOption, Missing) as error:
            return refuse(str(error))
        except MemoryError as error:
            return refuse(f"this machine has too little memory: {error}")
        except ModuleNotFoundError as error:
            if not (says := not_installed(error)):
                raise
            return refuse(says)
        except OSError as error:
            if error.strerror is None:
                raise
            where = f"{error.filename}: " if error.filename else ""
            return refuse(f"{where}{error.strerror}")
        except Exception as error:
            cause = of_the_disk(error)
            if cause is None:
                raise
            where = f"{cause.filename}: " if cause.filename else ""
            return refuse(f"{where}{cause.strerror}")

    return run
