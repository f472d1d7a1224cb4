"""The peers in Triton: right in Triton's interpreter, where it is installed (extra `peers`)."""

from __future__ import annotations

import argparse
from importlib.util import find_spec

import pytest

from cutex.bench import cli
from cutex.peers import in_triton
from cutex.problem.gemm import GemmProblem
from cutex.problem.softmax import SoftmaxProblem

# NOTE: the interpreter rounds to bf16 wrongly, and has no GPU to tune on
INTERPRETED = """
import torch
from torch.nn.functional import layer_norm, rms_norm
from cutex.peers.in_triton import attention, gemm, peer, rows
from cutex.problem.attention import AttentionProblem
from cutex.problem.gemm import GemmProblem
from cutex.problem.norm import NormProblem
from cutex.problem.softmax import SoftmaxProblem

for kernel in (gemm.tuned_products, gemm.products_by_tma, attention.attend):
    kernel.do_bench = lambda call, quantiles: (1.0, 1.0, 1.0)
cases = [("gemm", name, GemmProblem(200, 136, 72, "fp16"))
         for name in ("tiles", "tuned", "order", "tma")]
cases += [("attention", "forward", AttentionProblem(1, q, k, 2, 1, 64, 64, causal, dtype="fp16"))
          for q, k, causal in ((100, 130, False), (100, 130, True), (130, 100, True))]
cases += [("rows", "softmax", SoftmaxProblem(3, 777, dtype)) for dtype in ("fp16", "fp32")]
cases += [("rows", "rms_norm", NormProblem(3, 777, dtype)) for dtype in ("fp16", "fp32")]
for module, name, problem in cases:
    launch, version = peer(module, name)(problem)
    tensors = *problem.inputs(), *problem.outputs()
    launch(*tensors)
    check = problem.check(*tensors)
    assert check.ok and version.startswith("triton "), (module, name, problem, check.message)
x, w, b = torch.randn(3, 300), torch.randn(300), torch.randn(300)
assert torch.allclose(rows.norm(x, w), rms_norm(x, (300,), w, 1e-6), atol=1e-5)
wanted = layer_norm(x, (300,), w, b, 1e-6)
assert torch.allclose(rows.norm(x, w, b, centred=True), wanted, atol=1e-5)
"""


@pytest.mark.slow
def test_each_is_right_in_tritons_interpreter(python):
    pytest.importorskip("triton", reason="needs Triton: pip install -e '.[peers]'")
    ran = python("-c", INTERPRETED, TRITON_INTERPRET="1")
    assert ran.returncode == 0, ran.stderr


@pytest.mark.skipif(find_spec("triton") is not None, reason="Triton is installed")
def test_without_triton_one_sentence_says_what_to_install():
    for name, peer in GemmProblem.peers.items():
        if name.startswith("triton-"):
            with pytest.raises(ImportError, match=r"^Triton is not installed: pip install triton$"):
                peer.load(GemmProblem(8, 8, 8))
    assert callable(in_triton.peer("rows", "softmax"))  # nothing is imported before it is loaded


def compared(kind, text):
    argv = ["--device", "cuda", "--check-only", "--compare", text]
    _, args = cli.parsed(kind, argv)
    assert isinstance(args, argparse.Namespace)
    return cli._options(kind, args, "cuda").compare


def test_one_name_stands_for_all_that_begin_with_it():
    four = ("triton-tiles", "triton-tuned", "triton-order", "triton-tma")
    assert compared(GemmProblem, "triton") == four
    assert compared(GemmProblem, "triton-tma,cublas,triton") == ("triton-tma", "cublas", *four[:3])
    assert compared(GemmProblem, "quack") == ("quack",)  # a peer's own name is that peer
    assert compared(SoftmaxProblem, "triton") == ("triton",)
    with pytest.raises(ValueError, match="--compare 'trit' is not one of cublas, quack"):
        compared(GemmProblem, "trit")
