from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cutex.bench import timing
from cutex.bench.timing import (
    ROTATE_L2,
    copies_to_rotate,
    interleave,
    launches_per_sample,
    quantile,
    summarise,
)
from cutex.results import gbs, tflops

positive = st.floats(0.1, 1e6)


@given(st.lists(positive, min_size=1, max_size=60), st.sampled_from([0.0, 0.2, 0.5, 0.8, 1.0]))
def test_quantiles_are_those_of_numpy(samples, q):
    assert quantile(samples, q) == pytest.approx(np.quantile(samples, q))


@given(st.integers(1 << 18, 1 << 33), st.integers(1, 1 << 28))
def test_cold_operands_fill_the_l2_three_times_and_never_repeat_at_once(operand_bytes, l2):
    copies = copies_to_rotate(operand_bytes, l2, "cold")
    assert copies * operand_bytes >= ROTATE_L2 * l2
    assert copies >= 2
    assert copies == 2 or (copies - 1) * operand_bytes < ROTATE_L2 * l2


def test_operands_too_small_to_fill_the_l2_are_refused_when_cold():
    with pytest.raises(ValueError, match="needs operands of at least 46080 bytes"):
        copies_to_rotate(1024, 60 << 20, "cold")


def test_hot_operands_are_the_same_each_time():
    assert copies_to_rotate(1, 1 << 26, "hot") == 1


@given(positive, st.integers(1, 2000))
def test_a_sample_takes_every_copy_equally_often(launch_us, copies):
    launches = launches_per_sample(launch_us, copies)
    assert launches >= copies
    assert launches % copies == 0


def test_a_sample_of_a_short_kernel_is_long_enough_to_time():
    assert launches_per_sample(30.0, 2) * 30 == pytest.approx(timing.SAMPLE_US, rel=0.05)


@pytest.mark.slow
@given(st.lists(st.text(), min_size=1, max_size=6, unique=True), st.integers(1, 20), st.integers())
def test_every_round_runs_each_variant_once(names, rounds, seed):
    orders = list(interleave(names, rounds, seed))
    assert len(orders) == rounds
    assert all(Counter(order) == Counter(names) for order in orders)
    assert orders == list(interleave(names, rounds, seed))


def test_variants_do_not_keep_their_order():
    orders = {tuple(order) for order in interleave(["a", "b", "c"], 50)}
    assert len(orders) == 6


def test_a_summary_holds_median_p20_p80_and_n():
    t = summarise([5.0, 1.0, 2.0, 3.0, 4.0], 8, "hot", 3.5)
    assert (t.median_us, t.p20_us, t.p80_us, t.n) == pytest.approx((3.0, 1.8, 4.2, 5))
    assert (t.launches, t.cache_state, t.launch_us) == (8, "hot", 3.5)


def test_rates_have_their_units():
    assert tflops(10**12, 1e6) == pytest.approx(1.0)
    assert gbs(10**9, 1e6) == pytest.approx(1.0)


def test_each_variant_gets_its_own_samples_without_the_fillers(fake_gpu):
    def variant(name: str, us: float):
        return lambda a, b, c: fake_gpu.launch(name, us)

    variants = {"fast": variant("fast", 100.0), "slow": variant("slow", 700.0)}
    a = torch.zeros(1)
    measured = timing.time_variants(variants, [(a, a, a)] * 3, "cold")
    assert measured.timings["fast"].median_us == pytest.approx(100.0)
    assert measured.timings["slow"].median_us == pytest.approx(700.0)
    assert measured.timings["fast"].n == timing.ROUNDS
    assert measured.timings["fast"].launches == 51
    assert measured.timings["slow"].launches == 6
    assert measured.gpu_before == measured.gpu_after == {"clock_mhz": 1980.0}
    replays = [name for name in fake_gpu.log if name != "sleep"]
    assert Counter(replays)["fast"] >= timing.ROUNDS
    fake_gpu.log.clear()
    measured.replay["slow"]()
    assert fake_gpu.log == ["slow"]


def test_a_variant_of_seconds_is_timed_in_few_rounds_and_called_few_times(fake_gpu):
    calls = Counter()

    def variant(name: str, us: float):
        return lambda a: (calls.update([name]), fake_gpu.launch(name, us))

    variants = {"naive": variant("naive", 2.4e6), "fast": variant("fast", 1000.0)}
    measured = timing.time_variants(variants, [(torch.zeros(1),)], "hot")
    assert measured.timings["naive"].n == measured.timings["fast"].n == timing.ROUNDS == 5
    long = timing.Sampling(rounds=50, warm_up_seconds=0.0)
    measured = timing.time_variants(variants, [(torch.zeros(1),)], "hot", sampling=long)
    assert measured.timings["naive"].n == timing.LEAST_ROUNDS
    assert measured.timings["naive"].median_us == pytest.approx(2.4e6)
    assert calls["naive"] < 20 < calls["fast"]  # in two timings, captures and estimates included


@given(st.floats(1e-3, 10.0), st.integers(timing.LEAST_ROUNDS, 100))
def test_rounds_end_in_time_unless_they_are_few(seconds, most):
    rounds = timing.rounds_in(seconds, most)
    assert timing.LEAST_ROUNDS <= rounds <= most
    assert rounds == timing.LEAST_ROUNDS or rounds * seconds <= timing.MAX_SECONDS


def test_a_variant_that_fails_is_named_and_costs_the_others_nothing(fake_gpu):
    def broken(a):
        if fake_gpu.capturing is not None:
            raise RuntimeError("not in a graph")
        fake_gpu.launch("broken", 50.0)

    variants = {"broken": broken, "ours": lambda a: fake_gpu.launch("ours", 100.0)}
    operands = [(torch.zeros(1),)]
    with pytest.raises(RuntimeError, match="not in a graph"):
        timing.time_variants(variants, operands, "hot")
    said = []
    measured = timing.time_variants(
        variants, operands, "hot", dropped=lambda name, error: said.append((name, str(error)))
    )
    assert said == [("broken", "not in a graph")]
    assert list(measured.timings) == ["ours"]
    assert measured.timings["ours"].median_us == pytest.approx(100.0)


@pytest.mark.gpu
def test_the_gradient_of_a_peer_is_captured_though_its_forward_ran_before():
    from cutex.peers.attention_sizes import by_autograd

    x = torch.randn(4, 4096, 64, device="cuda", requires_grad=True)
    launch = by_autograd(lambda q, k, v: torch.sin(q) * k * v)
    tensors = [(x.detach().clone(), x.detach(), x.detach(), None, x.detach()) for _ in range(2)]
    measured = timing.time_variants({"peer": launch}, tensors, "hot")
    assert measured.timings["peer"].median_us > 1


@pytest.mark.gpu
def test_after_a_capture_that_failed_torch_draws_and_captures_again():
    x = torch.ones(1 << 20, device="cuda")
    variants = {"broken": lambda x: x.sum().item(), "whole": lambda x: x.mul_(1)}
    said = []
    measured = timing.time_variants(
        variants, [(x,)], "hot", dropped=lambda name, error: said.append((name, str(error)))
    )
    ((name, message),) = said
    assert name == "broken" and "captur" in message
    assert list(measured.timings) == ["whole"]
    assert torch.randn(8, device="cuda").isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cudnn_backward", "flash_backward"])
def test_a_backend_of_torch_gives_gradients(name):
    from cutex.peers import torch_attention
    from cutex.problem.attention.backward import BackwardProblem

    problem = BackwardProblem(2, 256, 256, 4, 2, 64, 64, causal=True)
    launch, _ = getattr(torch_attention, name)(problem)
    tensors = (*problem.inputs("cuda"), *problem.outputs("cuda"))
    found = launch(*tensors)
    check = problem.check(*problem.inputs("cuda"), *found)
    assert check.ok, check.message


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(8, 8), (8, 2)])
def test_cudnn_attends_to_caches_and_to_shared_heads(heads):
    from cutex.problem.attention import AttentionProblem
    from cutex.problem.attention.decode import DecodeProblem

    for kind, queries, causal in ((AttentionProblem, 256, True), (DecodeProblem, 1, False)):
        problem = kind(2, queries, 256, *heads, 128, 128, causal=causal)
        launch, _ = problem.peers["cudnn"].load(problem)
        found = launch(*problem.inputs("cuda"), *problem.outputs("cuda"))
        check = problem.check(*problem.inputs("cuda"), *found)
        assert check.ok, check.message


@pytest.mark.gpu
def test_a_variant_is_as_fast_as_itself():
    a, b = (torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    c = torch.empty_like(a)
    one, other = (lambda a, b, c: torch.mm(a, b.T, out=c) for _ in range(2))
    measured = timing.time_variants({"one": one, "other": other}, [(a, b, c)], "hot")
    times = [t.median_us for t in measured.timings.values()]
    assert times[0] == pytest.approx(times[1], rel=0.02)
    assert 5 < times[0] < 200
