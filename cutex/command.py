"""The end of every command: anything but a fault of the kernel is one sentence and an exit code."""

from __future__ import annotations

import argparse
import ast
import os
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import NoReturn, ParamSpec

from cutex.errors import BadOption, Missing

INTERRUPTED = 130  # exit code after Ctrl-C
INSTALL = "pip install -e '.[cu13]' in cutex's clone installs it"

P = ParamSpec("P")


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises BadOption, without printing the usage."""

    def error(self, message: str) -> NoReturn:
        raise BadOption(message)


def commands() -> Iterator[tuple[str, str]]:
    """Each `python -m cutex.X` and what it does, as the first line of its module says."""
    here = Path(__file__).parent
    files = {file.stem: file for file in here.glob("[!_]*.py")}
    files |= {file.parent.name: file for file in here.glob("*/__main__.py")}
    for name, file in sorted(files.items()):
        says = (ast.get_docstring(ast.parse(file.read_text())) or "").partition("\n")[0]
        command, _, what = says.partition(": ")
        if command.startswith(f"python -m cutex.{name}"):
            yield command, what.removesuffix(".").removesuffix(" (see --help)")


def refuse(sentence: str) -> int:
    """Print why a command does nothing, and return the exit code of bad input."""
    print(f"cutex: {sentence}", file=sys.stderr)
    return 2


def writable(option: str, text: str) -> Path:
    """Return the file that an option names, and make an empty one. Raises BadOption where it cannot
    be written."""
    file = Path(text)
    try:
        with file.open("a"):  # keeps the file's text until there is something to write
            pass
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
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def open_closed() -> None:
    """Open on nothing the standard streams that were closed before this process began (`>&-`): the
    next file that is opened would take the place of one, and its text be mixed with what is
    printed."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            nothing = os.open(os.devnull, os.O_RDWR)  # its number is the stream's: the lowest free
            os.set_inheritable(nothing, True)
            setattr(sys, name, os.fdopen(nothing, "r" if name == "stdin" else "w"))


def answered(main: Callable[P, int]) -> Callable[P, int]:
    """Wrap the `main` of a command: bad options, a reader that leaves (`| head`), Ctrl-C, an error
    of the disk, a lack of memory and a missing installation end it with one sentence at most, never
    with a traceback."""

    @wraps(main)
    def run(*args: P.args, **kwargs: P.kwargs) -> int:
        open_closed()
        try:
            code = main(*args, **kwargs)
            if not (sys.stdout is None or sys.stdout.closed):  # a script may do so
                sys.stdout.flush()
            return code
        except BrokenPipeError:
            print_nowhere()
            return 0
        except KeyboardInterrupt:
            print("cutex: interrupted", file=sys.stderr)
            return INTERRUPTED
        except (BadOption, Missing) as error:
            return refuse(str(error))
        except MemoryError as error:
            return refuse(f"this machine has too little memory: {error}")
        except ModuleNotFoundError as error:
            name = (error.name or "").partition(".")[0]
            if name in ("", "cutex"):
                raise
            return refuse(f"{name} is not installed; {INSTALL}")
        except OSError as error:
            if error.strerror is None:
                raise
            where = f"{error.filename}: " if error.filename else ""
            return refuse(f"{where}{error.strerror}")

    return run
