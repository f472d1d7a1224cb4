from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    "tool", [["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"]], ids=" ".join
)
def test_the_tool_has_nothing_to_say(python, tool):
    ran = python("-m", *tool)
    assert ran.returncode == 0, ran.stdout + ran.stderr
