"""The cores that this process may keep busy."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

_GROUPS = Path("/proc/self/cgroup")  # lines of hierarchy:controllers:path
_MOUNT = Path("/sys/fs/cgroup")


def cores() -> int:
    """The CPUs that this process may run on, or fewer whole ones, but at least one, where a quota
    of its cgroup gives it less of their time, as a container's `--cpus` does."""
    return max(1, int(min(len(os.sched_getaffinity(0)), *_quotas(_GROUPS, _MOUNT))))


def _quotas(groups: Path, mount: Path) -> Iterator[float]:
    """The limits in CPUs of the cgroups that this process is in, and of those around them.

    Inside a container a path may be the host's, of which only the mount's root is there.
    """
    yield float("inf")
    with suppress(OSError):
        for line in groups.read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            inner = PurePosixPath(path.lstrip("/"))
            for group in (inner, *inner.parents):
                with suppress(OSError, ValueError, ZeroDivisionError):
                    yield _quota(mount / controllers / group, unified=not controllers)


def _quota(folder: Path, unified: bool) -> float:
    """The CPUs' time that a cgroup gets; infinite without a limit. Raises OSError where its files
    are not there, ValueError where they hold something else."""
    if unified:
        quota, period = (folder / "cpu.max").read_text(encoding="utf-8").split()
        return float("inf") if quota == "max" else int(quota) / int(period)
    files = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    limit, each = (int((folder / file).read_text(encoding="utf-8")) for file in files)
    return limit / each if limit > 0 else float("inf")
