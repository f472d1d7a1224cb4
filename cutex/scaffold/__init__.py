"""The starts that `python -m cutex.new` writes: templates beside this file, which tests run."""

from __future__ import annotations

import argparse
import importlib.util
import keyword
from collections.abc import Sequence
from pathlib import Path

from cutex.command import Parser, answered
from cutex.errors import BadOption
from cutex.whole_file import write_whole

KINDS = {
    "kernel": "a @cute.jit function",
    "stage": "a stage derived from one of a ladder",
    "operator": "a Problem and a ladder of one stage",
}
TEMPLATES = Path(__file__).parent
SUFFIX = ".template"


def parser() -> argparse.ArgumentParser:
    out = Parser(
        prog="python -m cutex.new",
        description="Write a small working start with its test into the current folder.",
    )
    kinds = out.add_subparsers(dest="kind", metavar="KIND", required=True)
    for kind, what in KINDS.items():
        chosen = kinds.add_parser(kind, help=what, description=f"Write {what}, and its test.")
        chosen.add_argument("name", metavar="NAME", help="of its module, a Python identifier")
    return out


@answered
def main(argv: Sequence[str] | None = None) -> int:
    options = parser().parse_args(argv)
    for file in write(options.kind, options.name, Path()):
        print(f"wrote {file}")
    print(f"run it: python -m pytest test_{options.name}.py")
    return 0


def write(kind: str, name: str, folder: Path) -> list[Path]:
    """Write the files of a start into `folder` and return them. Raises BadOption for a name that
    cannot be a module's, or is another's, and where a file is there already."""
    if not name.isidentifier() or keyword.iskeyword(name) or name.startswith("_"):
        raise BadOption(f"{name!r} cannot be the name of a module: take letters, digits and _")
    files = {folder / place.replace("NAME", name): text for place, text in _templates(kind)}
    for file in files:
        if file.exists():
            raise BadOption(f"{file} is there already: nothing was written")
    if importlib.util.find_spec(name) is not None:
        raise BadOption(f"{name} is a module already, which the new one would hide: take another")
    title = "".join(part.capitalize() for part in name.split("_"))
    for file, text in files.items():
        file.parent.mkdir(exist_ok=True)
        write_whole(file, text.replace("NAME", name).replace("TITLE", title))
    return list(files)


def _templates(kind: str) -> list[tuple[str, str]]:
    """The places of a kind's files, below the folder that they are written to, and their texts."""
    root = TEMPLATES / kind
    found = sorted(root.rglob(f"*{SUFFIX}"))
    return [
        (str(file.relative_to(root)).removesuffix(SUFFIX), file.read_text(encoding="utf-8"))
        for file in found
    ]
