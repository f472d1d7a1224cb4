"""The cores that a process may keep busy, by its affinity and by quotas of its cgroups."""

from __future__ import annotations

import os

import pytest

from cutex import cores as module


@pytest.mark.parametrize("groups, files, expected", [
    ("0::/\n", {}, 8),
    ("0::/\n", {"cpu.max": "max 100000"}, 8),
    ("0::/\n", {"cpu.max": "250000 100000"}, 2),
    ("0::/\n", {"cpu.max": "50000 100000"}, 1),
    ("0::/\n", {"cpu.max": "nonsense"}, 8),
    ("0::/a/b\n", {"a/cpu.max": "300000 100000", "a/b/cpu.max": "max 100000"}, 3),
    ("0::/of/the/host\n", {"cpu.max": "400000 100000"}, 4),
    ("3:cpu,cpuacct:/a\n1:memory:/b\n",
     {"cpu,cpuacct/a/cpu.cfs_quota_us": "500000", "cpu,cpuacct/a/cpu.cfs_period_us": "100000"}, 5),
    ("3:cpu,cpuacct:/\n",
     {"cpu,cpuacct/cpu.cfs_quota_us": "-1", "cpu,cpuacct/cpu.cfs_period_us": "100000"}, 8),
    ("1:cpuset:/a\n", {"cpuset/a/cpu.max": "100000 100000"}, 8),
    (None, {"cpu.max": "100000 100000"}, 8),
])  # fmt: skip
def test_a_quota_counts_as_fewer_cores(groups, files, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda of: range(8))
    monkeypatch.setattr(module, "_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(module, "_MOUNT", tmp_path / "mount")
    if groups is not None:
        (tmp_path / "groups").write_text(groups)
    for name, text in files.items():
        file = tmp_path / "mount" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert module.cores() == expected
