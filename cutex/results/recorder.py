"""Recording the results of a run so that no disk error loses a measurement."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from cutex.results import append, ledger
from cutex.results.result import Result


def try_folder(folder: Path) -> None:
    """Check that results can be written to `folder`, which need not exist, without leaving a trace.

    Raises ValueError, in one sentence, if they cannot: called before anything is run or rented.
    """
    there = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
        for path in folder.glob("*.jsonl"):
            with path.open("ab"):
                pass
    except OSError as error:
        where = error.filename if isinstance(error.filename, str) else there
        raise ValueError(
            f"--out {folder} cannot keep results: {where}: {error.strerror or error}"
        ) from None


class Recorder:
    """The writer of a run's rows and files: into `folder`, or else into a rescue file.

    No failure ends the run. `troubles` has one sentence about each; content that could not be
    written goes to a file in the system's temporary folder, and is printed if that fails too.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.troubles: list[str] = []
        self.rescued: list[str] = []  # lines that are in no ledger
        self._rescue: Path | None = None

    def row(self, result: Result) -> None:
        """Append `result` to its ledger."""
        try:
            append(ledger(self.folder, result), result)
        except Exception as error:  # NOTE: any error, since the row was paid for
            self._keep(result.to_json(), f"a row was not recorded: {_reason(error)}")

    def attempt(self, what: str, write: Callable[[], object], content: object) -> None:
        """Call `write`, which puts `content` into a file in the folder; if it fails, rescue the
        content."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write()
        except Exception as error:
            self._keep(_as_json({what: content}), f"{what} was not written: {_reason(error)}")

    def foreign(self, what: object, error: Exception) -> None:
        """Keep an object that is not the row or the reply it should be."""
        self._keep(_as_json({"foreign": what}), f"a reply is not as it should be: {_reason(error)}")

    def summary(self) -> list[str]:
        """Sentences for the end of the run: each failure, and where its content is."""
        sentences = list(dict.fromkeys(self.troubles))
        if self._rescue is not None:
            sentences.append(
                f"what is in no ledger ({len(self.rescued)} lines) is in {self._rescue}; "
                f"python -m cutex.results merge {self._rescue} adds its rows"
            )
        return sentences

    def _keep(self, line: str, trouble: str) -> None:
        self.troubles.append(trouble)
        self.rescued.append(line)
        try:
            if self._rescue is None:
                fd, name = tempfile.mkstemp(prefix="cutex-rescue-", suffix=".jsonl")
                os.close(fd)
                self._rescue = Path(name)
            with self._rescue.open("a", errors="replace", encoding="utf-8") as file:
                file.write(line + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            self.troubles.append(f"nor was it rescued ({_reason(error)}), and is printed instead")
            print(line, file=sys.stdout, flush=True)


def _reason(error: Exception) -> str:
    """The reason of an exception, in one line."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}".partition("\n")[0].rstrip(": ")


def _as_json(value: object) -> str:
    """`value` as one line of JSON; values that JSON lacks are written as their repr."""
    for write in (lambda: json.dumps(value, default=repr), lambda: json.dumps(ascii(value))):
        try:
            return write()
        except (TypeError, ValueError, RecursionError):
            continue
    return json.dumps(f"{type(value).__name__}, nested too deep to be written")
