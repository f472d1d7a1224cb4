from __future__ import annotations

import pytest
import torch

from cutex.arch import ARCHS, arch, local_arch
from cutex.problem.gemm import DTYPES


@pytest.mark.parametrize("name", ARCHS)
def test_an_arch_is_found_by_its_name(name):
    assert arch(name).name == name


def test_an_unknown_arch_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match=r"'sm_75' is not one of sm_90a, sm_100a"):
        arch("sm_75")


@pytest.mark.parametrize("name", ARCHS)
def test_every_dtype_has_a_stated_peak(name):
    assert set(DTYPES) <= set(arch(name).dense_tflops)


@pytest.mark.parametrize(
    ("capability", "expected"), [((9, 0), "sm_90a"), ((10, 0), "sm_100a"), ((8, 9), None)]
)
def test_the_local_arch_is_that_of_the_gpu(monkeypatch, capability, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    found = local_arch()
    assert (found and found.name) == expected


def test_there_is_no_local_arch_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert local_arch() is None
