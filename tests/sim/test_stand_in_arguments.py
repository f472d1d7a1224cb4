"""Arguments of a script on the stand-ins: streams by address or of torch, dataclasses by field."""

from __future__ import annotations

STREAMS = """
import torch
from cuda.bindings.driver import CUstream
from cutlass import Float32, cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

@cute.kernel
def kernel(x: cute.Tensor, by: Float32):
    i, _, _ = cute.arch.thread_idx()
    x[i] = x[i] + by

@cute.jit
def run(x: cute.Tensor, stream: CUstream, by: Float32):
    kernel(x, by).launch(grid=[1, 1, 1], block=[32, 1, 1], stream=stream)

x, fake = torch.zeros(32, device="cuda"), make_fake_tensor(Float32, (32,), (1,))
stream, how = torch.cuda.current_stream().cuda_stream, "--enable-tvm-ffi"
named = cute.compile(run, fake, make_fake_stream(), 1.0, options=how)
named(x, stream, 1.0)
named(x, CUstream(stream), 2.0)
of_torch = make_fake_stream(use_tvm_ffi_env_stream=True)
cute.compile(run, fake, of_torch, 1.0, options=how)(x, 4.0)
assert (x == 7).all()
"""


def test_a_stream_may_be_given_by_its_address_or_be_that_of_torch(run_script):
    ran = run_script(STREAMS)
    assert ran.returncode == 0, ran.stderr


RECORDS = """
import dataclasses
import torch
from cutlass import Constexpr, Float32, cute
from cutlass.cute.runtime import from_dlpack

@dataclasses.dataclass(frozen=True)
class Doubled:
    @cute.jit
    def apply(self, x):
        return x * 2.0

@dataclasses.dataclass(frozen=True)
class Scaled:
    y: cute.Tensor
    by: Float32
    negative: Constexpr[bool] = False

@cute.kernel
def kernel(x: cute.Tensor, y: cute.Tensor, by: Float32, then):
    i, _, _ = cute.arch.thread_idx()
    x[i] = then.apply(y[i] * by)

@cute.jit
def run(x: cute.Tensor, how: Scaled, then):
    kernel(x, how.y, -how.by if how.negative else how.by, then).launch(grid=[1, 1, 1],
                                                                       block=[32, 1, 1])

x, y = torch.zeros(32, device="cuda"), torch.arange(32.0, device="cuda")
record = Scaled(from_dlpack(y), Float32(3.0), True)
cute.compile(run, from_dlpack(x), record, Doubled())(from_dlpack(x), record, Doubled())
assert (x == -6 * y).all()
run(from_dlpack(x), Scaled(from_dlpack(y), Float32(5.0)), Doubled())
assert (x == 10 * y).all()
"""


def test_dataclasses_are_passed_field_by_field(run_script):
    ran = run_script(RECORDS)
    assert ran.returncode == 0, ran.stderr
