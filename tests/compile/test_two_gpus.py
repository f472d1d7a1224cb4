"""Public functions on the GPU of their tensors, which need not be the current one.

Each is called on cuda:1, cuda:0 and cuda:1 again while cuda:0 is current, twice on each, since the
second call uses the plan of the first; and in a process forked before CUDA has begun.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import cutex

pytestmark = pytest.mark.gpu

bf16 = torch.bfloat16
Tensors = dict[str, torch.Tensor]


def made(device: str) -> Tensors:
    """The operands of all calls, the same on each device."""
    g = torch.Generator().manual_seed(0)

    def normal(*shape: int, dtype: torch.dtype = bf16) -> torch.Tensor:
        return torch.randn(*shape, generator=g).to(device, dtype)

    def whole(*of: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(of, dtype=dtype, device=device)

    return {
        "a": normal(256, 128), "b": normal(128, 512), "bias": normal(512), "w": normal(512, 128),
        "q": normal(2, 70, 4, 64), "k": normal(2, 130, 2, 64), "v": normal(2, 130, 2, 64),
        "cu_q": whole(0, 40, 70), "cu_k": whole(0, 31, 130), "used": whole(77, 130),
        "x": normal(65, 1000), "weight": normal(1000), "shift": normal(1000),
        "target": torch.arange(65, device=device), "of_w": torch.arange(256, device=device),
        "experts": normal(4, 128, 512), "offs": whole(50, 50, 130, 256),
        "latent": normal(2, 1, 16, 576), "pages": normal(6, 64, 1, 576),
        "table": whole(0, 1, 2, 3, 4, 5).reshape(2, 3),
        "wide": normal(64, 128), "up": normal(4, 128, 256), "down": normal(4, 128, 128),
        "router": normal(64, 2, dtype=torch.float32).abs(),
        "ids": torch.arange(128, device=device).reshape(64, 2) % 4,
        "cos": normal(80, 32, dtype=torch.float32), "sin": normal(80, 32, dtype=torch.float32),
    }  # fmt: skip


def gradients(function: Callable[..., torch.Tensor], *of: torch.Tensor) -> tuple[Any, ...]:
    leaves = [x.detach().clone().requires_grad_() for x in of]
    y = function(*leaves)
    return (y.detach(), *torch.autograd.grad(y, leaves, torch.ones_like(y)))


def packed(t: Tensors) -> Any:
    return cutex.flash_attn_varlen_func(
        t["q"][0], t["k"][0], t["v"][0], t["cu_q"], t["cu_k"], 40, 99, causal=True
    )


def scaled(t: Tensors) -> Any:
    return cutex.scaled_mm(
        cutex.quantize(t["a"], "fp8_1x128"), cutex.quantize(t["w"], "fp8_128x128")
    )


CALLS: dict[str, Callable[[Tensors], Any]] = {
    "matmul": lambda t: cutex.matmul(t["a"], t["b"], bias=t["bias"]),
    "matmul's gradients": lambda t: gradients(cutex.matmul, t["a"], t["b"]),
    "matmul of odd sizes": lambda t: cutex.matmul(t["x"], t["x"][:33].T),
    "a packed weight": lambda t: cutex.matmul(t["a"], cutex.pack_w4(t["w"])),
    "grouped_mm": lambda t: cutex.grouped_mm(t["a"], t["experts"], t["offs"]),
    "moe": lambda t: cutex.moe(t["wide"], t["router"], t["ids"], t["up"], t["down"]),
    "flash_attn_func": lambda t: cutex.flash_attn_func(t["q"], t["k"], t["v"], causal=True),
    "its gradients": lambda t: gradients(cutex.flash_attn_func, t["q"], t["k"], t["v"]),
    "flash_attn_varlen_func": packed,
    "flash_attn_with_kvcache": lambda t: cutex.flash_attn_with_kvcache(
        t["q"][:, :1].contiguous(), t["k"], t["v"], cache_seqlens=t["used"], causal=True
    ),
    "flash_mla_with_kvcache": lambda t: cutex.flash_mla_with_kvcache(
        t["latent"], t["pages"], t["table"], t["used"]
    ),
    "rms_norm": lambda t: cutex.rms_norm(t["x"], t["weight"]),
    "layer_norm's gradients": lambda t: gradients(
        lambda x, w: cutex.layer_norm(x, w, t["shift"]), t["x"], t["weight"]
    ),
    "softmax": lambda t: cutex.softmax(t["x"]),
    "cross_entropy": lambda t: gradients(lambda x: cutex.cross_entropy(x, t["target"]), t["x"]),
    "linear_cross_entropy": lambda t: cutex.linear_cross_entropy(t["a"], t["w"], t["of_w"]),
    "reduce": lambda t: cutex.reduce(t["x"]),
    "scan": lambda t: cutex.scan(t["x"]),
    "histogram": lambda t: cutex.histogram(t["x"], 37, low=-3.0, high=3.0),
    "map": lambda t: cutex.map(lambda x, y: x * y, t["x"], t["weight"]),
    "rope": lambda t: cutex.rope(t["q"], t["cos"], t["sin"]),
    "quantize": lambda t: cutex.dequantize(cutex.quantize(t["a"], "mxfp8")),
    "scaled_mm": scaled,
    "fp8_linear": lambda t: gradients(cutex.fp8_linear, t["a"], t["w"]),
}


def tensors_of(found: Any) -> list[torch.Tensor]:
    return [found] if torch.is_tensor(found) else [x for x in found if torch.is_tensor(x)]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", CALLS)
def test_a_call_runs_on_the_gpu_of_its_tensors(name: str) -> None:
    """Its result is there, and that of a process whose current GPU that is."""
    call, want = CALLS[name], None
    with torch.cuda.device(0):
        for device in ("cuda:1", "cuda:0", "cuda:1"):
            tensors = made(device)
            for _ in range(2):
                found = tensors_of(call(tensors))
                assert torch.cuda.current_device() == 0
                assert {x.device for x in found} == {torch.device(device)}
                host = [x.double().cpu() for x in found]
                want = want or host
                for mine, first in zip(host, want, strict=True):
                    assert mine.isfinite().all()
                    # sums that several CTAs add by atomics may round otherwise each time
                    assert (mine - first).norm() <= 1e-3 * first.norm()
    with torch.cuda.device(1):
        tensors = made("cuda:1")
        for mine, first in zip(tensors_of(call(tensors)), want or [], strict=True):
            assert (mine.double().cpu() - first).norm() <= 1e-3 * first.norm()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_operands_of_two_gpus_are_refused() -> None:
    first, second = made("cuda:0"), made("cuda:1")
    for call in (
        lambda: cutex.matmul(first["a"], second["b"]),
        lambda: cutex.flash_attn_func(first["q"], second["k"], first["v"]),
        lambda: cutex.rms_norm(first["x"], second["weight"]),
        lambda: cutex.grouped_mm(first["a"], first["experts"], second["offs"]),
        lambda: cutex.cross_entropy(first["x"], second["target"]),
    ):
        with pytest.raises(ValueError, match=r"cuda:[01].*cuda:[01]"):
            call()


FORKING = """
import os, sys, torch, cutex
sys.path.insert(0, "tests/compile")
from test_two_gpus import CALLS, made, tensors_of
NAMES = ("matmul", "its gradients", "flash_attn_with_kvcache", "layer_norm's gradients", "reduce")

def right():
    tensors = made("cuda:0")
    return all(x.isfinite().all() for n in NAMES for x in tensors_of(CALLS[n](tensors)))

def ended(function):
    child = os.fork()
    if child == 0:
        try:
            os._exit(function())
        except BaseException as error:
            print(repr(error)[:500], file=sys.stderr, flush=True)
            os._exit(9)
    return child

def refused():  # a child cannot use CUDA that has begun: torch says so, and so do we
    for more in ({}, {"out": c}):
        try:
            cutex.matmul(a, b, **more)
        except Exception as error:  # torch's where it allocates, else the launch's own
            print(repr(error)[:300], file=sys.stderr, flush=True)
            if "initializ" not in str(error):
                return 5
        else:
            return 4
    return 0

children = [ended(lambda: 0 if right() else 3) for _ in range(2)]
assert right()
print(*(os.waitstatus_to_exitcode(os.waitpid(c, 0)[1]) for c in children), flush=True)
a, b, c = (torch.ones(256, 256, dtype=torch.bfloat16, device="cuda:0") for _ in range(3))
cutex.matmul(a, b), cutex.matmul(a, b, out=c)
torch.cuda.synchronize()
print(os.waitstatus_to_exitcode(os.waitpid(ended(refused), 0)[1]), flush=True)
assert right()  # the parent's kernels are as they were
"""


def test_processes_forked_before_cuda_has_begun(request: pytest.FixtureRequest) -> None:
    """They compile, load and launch the same kernels side by side, from one cache."""
    root = request.config.rootpath
    run = subprocess.run(
        [sys.executable, "-c", FORKING], cwd=root, capture_output=True, text=True, timeout=600
    )
    assert run.stdout.split() == ["0", "0", "0"], run.stdout + run.stderr
