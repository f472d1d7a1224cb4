"""printf in a kernel, against C's printf of the same text, lane by lane."""

from __future__ import annotations

import ctypes

import cutlass
import cutlass.cute.testing
import numpy as np
import pytest
import torch
from cutlass import cute
from hypothesis import given, settings
from hypothesis import strategies as st
from ptx_kernel import simulate_ptx

from cutex.sim import SimError, UnknownInstruction, simulate
from cutex.sim.isa.calls import printed


@cute.kernel
def tell_kernel(x: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    if thread % 16 == 3:
        big = thread.to(cutlass.Int64) * 10_000_000_000
        cute.printf("lane {} has {} or {}", thread, x[thread], big)
    if thread == 40:
        cute.printf("100%%, %5.1f|%-4d|%x", x[1], thread, thread)


@cute.jit
def tell(x: cute.Tensor):
    tell_kernel(x).launch(grid=[1, 1, 1], block=[48, 1, 1])


def test_each_lane_prints_its_values(capsys):
    simulate(tell, torch.arange(48) / 4)
    said = [line for line in capsys.readouterr().out.splitlines() if line]
    assert said == [
        "lane 3 has 0.750000 or 30000000000",
        "lane 19 has 4.750000 or 190000000000",
        "lane 35 has 8.750000 or 350000000000",
        "100%,   0.2|40  |28",
    ]


@cute.kernel
def checked_kernel(x: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    cute.testing.assert_(x[thread] > 0.0, "all are positive")
    x[thread] = x[thread] + 1.0


@cute.jit
def checked(x: cute.Tensor):
    checked_kernel(x).launch(grid=[1, 1, 1], block=[32, 1, 1])


def test_an_assertion_that_fails_says_what_and_where(capsys):
    compiled = cute.compile[
        cute.GPUArch("sm_100a"),
        cute.EnableTVMFFI(True),
        cute.KeepPTX(True),
        cute.EnableAssertions(True),
    ]
    x = cute.runtime.make_fake_tensor(cutlass.Float32, (32,), (1,))
    kernel = compiled(checked, x)
    good = torch.arange(32.0) + 1
    simulate(kernel, good)
    assert good[0] == 2 and not capsys.readouterr().out
    bad = torch.ones(32)
    bad[7] = -1
    with pytest.raises(SimError, match="lane 7 executes trap"):
        simulate(kernel, bad)
    assert "Assertion Error: all are positive" in capsys.readouterr().out


# -- the text --------------------------------------------------------------------------------------


class Given:
    """Arguments from a list."""

    def __init__(self, values: list) -> None:
        self.values = values

    def take(self, kind):
        return kind(self.values.pop(0))

    def text(self) -> ctypes.c_char_p:
        return ctypes.c_char_p(self.values.pop(0))


def c_printf(spec: bytes, *values) -> str:
    text = ctypes.create_string_buffer(1024)
    ctypes.CDLL(None).snprintf(text, ctypes.c_size_t(1024), spec, *values)
    return text.value.decode()


FLAGS = st.sets(st.sampled_from("-+ #0")).map(lambda s: "".join(sorted(s)))
WIDTHS = st.sampled_from(["", "1", "7", "20"])
PRECISIONS = st.sampled_from(["", ".", ".0", ".3", ".9"])


@settings(max_examples=200, deadline=None)
@given(FLAGS, WIDTHS, PRECISIONS, st.sampled_from("diuoxXc"), st.integers(-(2**63), 2**63 - 1),
       st.sampled_from(["", "l", "ll", "h", "hh", "z"]))  # fmt: skip
def test_integers_are_those_of_c(flags, width, precision, kind, value, length):
    length = "" if kind == "c" else length
    value = value % 95 + 32 if kind == "c" else value  # the visible output
    spec = f"%{flags}{width}{precision}{length}{kind}".encode()
    wide = length in ("l", "ll", "z")
    want = c_printf(spec, (ctypes.c_int64 if wide else ctypes.c_int32)(value))
    assert printed(b"<" + spec + b">", Given([value])) == f"<{want}>"


@settings(max_examples=200, deadline=None)
@given(FLAGS, WIDTHS, PRECISIONS, st.sampled_from("fFeEgGaA"), st.floats(width=32))
def test_floats_are_those_of_c(flags, width, precision, kind, value):
    spec = f"%{flags}{width}{precision}{kind}".encode()
    assert printed(spec, Given([value])) == c_printf(spec, ctypes.c_double(value))


def test_width_and_precision_may_be_arguments_and_text_is_text():
    assert printed(b"[%*.*f|%-6s|%3s|%%|%d]", Given([8, 2, 3.14159, b"ab", b"long", -5])) == (
        "[    3.14|ab    |long|%|-5]"
    )


def test_what_is_no_conversion_stays():
    assert printed(b"%y and %k, 50%", Given([])) == "%y and %k, 50%"


# -- calls -----------------------------------------------------------------------------------------

CALL = """{ .param .b64 a; .param .b64 b; .param .b32 r;
    st.param.b64 [a], 0; st.param.b64 [b], 0; call.uni (r), NAME, (a, b);
    ld.param.b32 %r0, [r]; }"""


def test_other_functions_are_not_defined():
    head = ".extern .func (.param .b32 r) malloc2 (.param .b64 a, .param .b64 b);"
    with pytest.raises(UnknownInstruction, match="a call of malloc2"):
        simulate_ptx(CALL.replace("NAME", "malloc2"), {}, head=head)


def test_the_call_returns_how_many_arguments_it_printed(capsys):
    out = np.zeros(32, np.uint32)
    head = """.extern .func (.param .b32 r) vprintf (.param .b64 a, .param .b64 b);
    .global .align 1 .b8 text[7] = {37, 100, 32, 37, 100, 10, 0};"""
    body = """.local .align 8 .b8 frame[8]; .reg .b64 at, words;
    mov.b64 at, frame; cvta.local.u64 at, at; mov.b64 words, text; cvta.global.u64 words, words;
    setp.lt.u32 %p0, %i, 2; @!%p0 bra PAST;
    st.local.b32 [frame], %i; st.local.b32 [frame+4], 7;
    { .param .b64 a; .param .b64 b; .param .b32 r;
    st.param.b64 [a], words; st.param.b64 [b], at; call.uni (r), vprintf, (a, b);
    ld.param.b32 %r0, [r]; } st.global.b32 [%out_i], %r0; PAST:"""
    simulate_ptx(body, {"out": out}, head=head)
    assert capsys.readouterr().out == "0 7\n1 7\n"
    assert out.tolist() == [2, 2] + [0] * 30
