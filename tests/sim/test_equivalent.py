"""Of a kernel's mutants, those are derived to be as right as it of which nothing is told, and no
other.
"""

from __future__ import annotations

import pytest
from equivalent import NOBODY_WAITS, REASONS, why
from mutants import sites
from subjects import SUBJECTS


@pytest.mark.parametrize(
    ("name", "operators"),
    [
        ("gemm sm_90a 3", ("a fence of wgmma",)),
        *(
            pytest.param(name, tuple(REASONS), marks=pytest.mark.slow)
            for name in ("gemm sm_90a 2", "gemm sm_90a 7", "gemm sm_100a 4", "gemm sm_100a 6")
        ),
    ],
)
def test_what_is_found_is_not_derived_to_be_right(name, operators):
    subject, kinds = SUBJECTS[name], set()
    for operator in operators:
        for site in sites(subject.kernel, operator):
            kind, reason = subject.outcome(site.mutant).kind, why(subject, site)
            right = "" if reason == NOBODY_WAITS else reason
            assert kind == "nothing" or not right, (operator, site.line, site.text, reason)
            kinds.add((kind, bool(reason)))
    assert {("found", False), ("nothing", True)} <= kinds
