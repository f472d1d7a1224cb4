"""Predictions side by side, one process a core."""

from __future__ import annotations

import gc
import multiprocessing
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import islice
from typing import Any, TypeVar

from cutex.bench.progress import progress
from cutex.cores import cores

T = TypeVar("T")
Job = Callable[[], T]

_jobs: Sequence[Job[Any]] = ()  # of the forked processes, which take them over with all records


def results(what: str, jobs: Sequence[Job[T]]) -> list[T]:
    """The results of `jobs`, in their order, with progress; `what` says what they do. Each job runs
    in one of as many processes as this one may use cores. Raises what a job raises, and
    BrokenProcessPool if a process ends."""
    global _jobs
    count = min(len(jobs), cores())
    if count < 2:
        with progress(what, len(jobs)) as step:
            return [_stepped(job, step) for job in jobs]
    _jobs = jobs
    gc.freeze()  # NOTE: else each process would look through all records, and so copy them
    try:
        context = multiprocessing.get_context("fork")
        with ProcessPoolExecutor(count, context, _in_process) as pool:
            waiting = [pool.submit(_one, number) for number in range(len(jobs))]
            try:
                with progress(what, len(jobs)) as step:
                    for done in as_completed(waiting):
                        done.result()
                        step()
            finally:
                pool.shutdown(cancel_futures=True)
            return [one.result() for one in waiting]
    finally:
        gc.unfreeze()
        _jobs = ()


def in_groups(what: str, groups: Sequence[Sequence[Job[Any]]]) -> list[list[Any]]:
    """`results` of several groups of jobs, by group."""
    found = iter(results(what, [job for group in groups for job in group]))
    return [list(islice(found, len(group))) for group in groups]


def _stepped(job: Job[T], step: Callable[[], None]) -> T:
    found = job()
    step()
    return found


def _in_process() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process ends this one


def _one(number: int) -> Any:
    return _jobs[number]()
