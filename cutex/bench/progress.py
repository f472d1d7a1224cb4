"""Progress on stderr: a spinner or a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EVERY = 5.0  # seconds between two lines


@contextmanager
def progress(what: str, steps: int = 0) -> Iterator[Callable[[], None]]:
    """Show `what` while the block runs; the block gets a function to call after each of `steps`."""
    done = [0]

    def state() -> str:
        return f"{what}, {done[0]} of {steps}" if steps else what

    if sys.stderr.isatty():
        with _on_terminal(what, steps) as advance:
            yield advance
        return
    ended, started = threading.Event(), time.monotonic()

    def lines() -> None:
        while not ended.wait(EVERY):
            print(
                f"cutex: {state()}, {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True
            )

    thread = threading.Thread(target=lines, daemon=True)
    thread.start()

    def step() -> None:
        done[0] += 1

    try:
        yield step
    finally:
        ended.set()
        thread.join()


@contextmanager
def _on_terminal(what: str, steps: int) -> Iterator[Callable[[], None]]:
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    if not steps:
        with console.status(what):
            yield lambda: None
        return
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task(what, total=steps)
        yield lambda: bar.advance(task)
