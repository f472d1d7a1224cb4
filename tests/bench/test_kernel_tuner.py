"""`cutex.tune` of a kernel: its choice, what it leaves out, what it keeps, what it refuses."""

from __future__ import annotations

import cutlass
import pytest
import torch
from cutlass import cute

import cutex
from cutex.arch import local_arch
from cutex.bench import kernel_tuner

THREADS = 64
ROUNDS = (1, 64)  # of the same sum: the first is the faster one


@cute.kernel
def _sum(mA: cute.Tensor, mC: cute.Tensor, rounds: cutlass.Constexpr, part: cutlass.Constexpr):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    gA, gC = (cute.zipped_divide(m, (part,)) for m in (mA, mC))  # (Part, Parts)
    at = block * THREADS + thread
    if at < cute.size(gC, mode=[1]):
        total = gA[None, at].load()
        for _ in cutlass.range(rounds - 1, unroll=1):
            total = total + gA[None, at].load()
        gC[None, at] = total


@cute.jit
def add_up(
    mA: cute.Tensor, mC: cute.Tensor, rounds: cutlass.Constexpr, part: cutlass.Constexpr = 4
):
    blocks = cute.ceil_div(cute.size(mC), part * THREADS)
    _sum(mA, mC, rounds, part).launch(grid=[blocks, 1, 1], block=[THREADS, 1, 1])


@pytest.fixture
def tensors(tmp_path, monkeypatch) -> list[torch.Tensor]:
    monkeypatch.setenv("CUTEX_CACHE", str(tmp_path))
    device = "cpu" if local_arch() is None else "cuda"
    a = torch.randint(-9, 9, (1 << (12 if device == "cpu" else 22),), device=device).float()
    return [a, torch.full_like(a, torch.nan)]


def right(a: torch.Tensor, c: torch.Tensor) -> bool:
    return torch.equal(c, a)


def test_the_faster_variant_is_chosen_launched_and_remembered(tensors, monkeypatch):
    tuned = cutex.tune(add_up, *tensors, over={"rounds": ROUNDS})
    assert tuned.choice == {"rounds": 1}
    fast, slow = tuned.variants
    assert slow.values == {"rounds": 64} and slow.us > 1.2 * fast.us
    tensors[1].fill_(torch.nan)
    tuned(*tensors)
    assert right(*tensors)

    def nothing(*_):
        raise AssertionError("timed again")

    for timer in (kernel_tuner._OnGpu, kernel_tuner._ByClock):
        monkeypatch.setattr(timer, "time", nothing)
    again = cutex.tune(add_up, *tensors, over={"rounds": ROUNDS})
    assert again.choice == tuned.choice and again.variants == tuned.variants
    with pytest.raises(AssertionError, match="timed again"):
        cutex.tune(add_up, tensors[0][64:], tensors[1][64:], over={"rounds": ROUNDS})


@pytest.mark.slow
def test_a_wrong_variant_is_left_out_however_fast(tensors):
    many = lambda a, c: torch.equal(c, 64 * a)
    tuned = cutex.tune(add_up, *tensors, over={"rounds": ROUNDS}, check=many)
    assert tuned.choice == {"rounds": 64}
    assert tuned.variants[-1].us is None and tuned.variants[-1].why == "wrong"
    assert "wrong" in str(tuned) and str(tuned).splitlines()[0].split() == ["rounds", "us"]


def test_a_variant_that_does_not_compile_is_left_out(tensors):
    tuned = cutex.tune(add_up, *tensors, 1, over={"part": [0, 4]}, check=right)
    assert tuned.choice == {"part": 4} and tuned.variants[-1].us is None
    with pytest.raises(ValueError, match=r"no variant of add_up runs: part=0: "):
        cutex.tune(add_up, *tensors, 1, over={"part": [0]})


@pytest.mark.parametrize(
    ("over", "rest", "said"),
    [
        ({"tile": [1]}, (), "over names tile, add_up takes mA, mC, rounds, part"),
        ({"rounds": []}, (), "over has no value for rounds"),
        ({}, (), "over is empty"),
        ({"rounds": 4}, (), "over has 4 for rounds: it must be a list of values"),
        ({"rounds": "44"}, (), "over has '44' for rounds: it must be a list"),
        ([("rounds", [4])], (), "over must be a dict of lists of values, got list"),
        ({"part": [4]}, (), "add_up takes mA, mC, rounds besides part, and got 2 arguments"),
        ({"rounds": [1]}, (4, 4), "add_up takes mA, mC, part besides rounds, and got 4 arguments"),
    ],
)
def test_bad_input_gets_a_sentence(tensors, over, rest, said):
    with pytest.raises((TypeError, ValueError), match=f"^{said}"):
        cutex.tune(add_up, *tensors, *rest, over=over)


def test_an_error_of_the_check_is_the_users(tensors):
    with pytest.raises(KeyError):
        cutex.tune(add_up, *tensors, over={"rounds": [1]}, check=lambda a, c: {}["missing"])


@pytest.mark.gpu
def test_a_gpu_of_the_clock_is_refused_for_tensors_on_one(tensors):
    with pytest.raises(ValueError, match=r"^gpu='b200' is for tensors on the CPU"):
        cutex.tune(add_up, *tensors, over={"rounds": [1]}, gpu="b200")


def test_an_unknown_gpu_gets_a_sentence(tensors):
    if tensors[0].is_cpu:
        with pytest.raises(ValueError, match="there are constants for"):
            cutex.tune(add_up, *tensors, over={"rounds": [1]}, gpu="b2000")


def test_other_misuse_gets_a_sentence(tensors):
    with pytest.raises(TypeError, match="takes over, the values to choose among"):
        cutex.tune(add_up, *tensors)
    with pytest.raises(TypeError, match="takes no seconds"):
        cutex.tune(add_up, *tensors, over={"rounds": [1]}, seconds=3)
    with pytest.raises(TypeError, match=r"^check must be a function"):
        cutex.tune(add_up, *tensors, over={"rounds": [1]}, check=3)
    with pytest.raises(ValueError, match="needs tensors"):
        cutex.tune(add_up, over={"rounds": [1], "mA": [1], "mC": [2]})
