"""Choices by time, kernels built ahead, and the files of both."""

from __future__ import annotations

import json
import random
import re
import signal
import threading
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch

import cutex
from cutex.arch import arch
from cutex.clock_errors import unseen
from cutex.fit import costs as fit
from cutex.fit import shipping
from cutex.kernels.gemm.choose import rows_class, sizes_class
from cutex.kernels.gemm.layouts import OperandLayout
from cutex.kernels.gemm.sm90.tile_order import by_gpc
from cutex.ops import building, simulated
from cutex.ops.matmul import choices, tuner
from cutex.ops.matmul.arrange import Arranged, arrange
from cutex.ops.matmul.checks import Call
from cutex.ops.matmul.plan import (
    call_class,
    candidates,
    config_for,
    forget,
    job,
    problem_of,
)
from cutex.ops.matmul.warming import _classes


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A GPU by name only, with the simulator in its place, and an empty cache."""
    monkeypatch.setenv("CUTEX_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    monkeypatch.setattr("cutex.bench.autotune.remembered", lambda *_: None)
    forget()
    with simulated("sm_90a"):
        yield tmp_path
    forget()
    building.stop()


def call(m: int, n: int, k: int) -> Arranged:
    a, b = torch.ones(m, k, dtype=torch.bfloat16), torch.ones(n, k, dtype=torch.bfloat16)
    return arrange(Call(a, b.mT), torch.empty(m, n, dtype=torch.bfloat16), "sm_90a")


def classed(arranged: Arranged) -> choices.CallClass:
    layouts = arranged.a, arranged.b, arranged.out
    return call_class(arranged.sizes, layouts, arranged.ops, "sm_90a")


def config_of(arranged: Arranged):
    layouts = arranged.a, arranged.b, arranged.out
    return config_for(arranged.sizes, layouts, arranged.ops, "sm_90a")


def built(jobs, seconds=None) -> list[bool]:
    """The replacement of the builder processes: kernels compile in this process, when needed."""
    return [True] * len(jobs)


@pytest.mark.slow
def test_the_fastest_is_chosen_remembered_and_taken_by_later_calls(gpu, monkeypatch):
    monkeypatch.setattr(building, "build", built)
    monkeypatch.setattr(tuner, "CANDIDATES", 3)
    arranged = call(64, 128, 64)
    proposed = [c for c, _ in zip(candidates(classed(arranged)), range(3), strict=False)]
    seen = []

    def timer(launches, copies, sampling):
        seen.append(sorted(launches))
        assert len(copies) > 1 and all(len(x) == 3 for x in copies)
        return {name: {"0": 9.0, "1": 5.0, "2": 5.2}[name] for name in launches}

    chosen = tuner.choose_by_time(arranged, "sm_90a", 600.0, timer)
    assert chosen == proposed[1] != proposed[0]
    assert seen == [["0", "1", "2"], ["1", "2"]], "what was far behind is not timed again"
    assert config_of(arranged) == chosen
    again = tuner.choose_by_time(arranged, "sm_90a", 600.0, timer)
    assert again == chosen and len(seen) == 2
    (file,) = gpu.glob("choices/*.json")
    assert json.loads(file.read_text())["key"]["sizes"] == [64, 128, 64, 1]


def test_what_a_call_takes_untuned_is_timed_too(gpu, monkeypatch):
    """Also a shipped choice that the model ranks behind all that are timed."""
    monkeypatch.setattr(building, "build", built)
    monkeypatch.setattr(tuner, "CANDIDATES", 2)
    arranged = call(64, 128, 64)
    shipped = list(islice(candidates(classed(arranged)), 9))[-1]
    monkeypatch.setattr(choices, "shipped", lambda _: shipped.tiles)
    forget()
    assert config_of(arranged) == shipped
    seen = []

    def timer(launches, copies, sampling):
        seen.append(sorted(launches))
        return {name: {"0": 5.0, "1": 9.0}[name] for name in launches}

    assert tuner.choose_by_time(arranged, "sm_90a", 600.0, timer) == shipped
    assert seen == [["0", "1"]]


def test_few_of_those_that_are_compared_have_the_same_tile():
    """The model's first 16 for this gradient have four tiles; what was fastest, 64x128 in a loop,
    was none of them (docs/facts/gemm.md#tuned-tiles)."""
    layouts = OperandLayout(major="column"), OperandLayout(), OperandLayout()
    calls = call_class((640, 1664, 9178, 1), layouts, (), "sm_90a")
    untuned = next(candidates(calls))
    compared = tuner.worth_timing(calls, untuned)
    tiles = Counter(tuner.tile_and_variant(c)[0] for c in compared)
    assert compared[0] == untuned and len(set(compared)) == len(compared) == tuner.CANDIDATES
    assert len(tiles) >= 8 and max(tiles.values()) <= tuner.OF_A_TILE + 2
    assert any(
        (c.tiles.tile_m, c.tiles.tile_n, c.tiles.by_gpc) == (64, 128, True) for c in compared
    )


def test_a_choice_that_cannot_be_read_is_none(gpu, monkeypatch):
    arranged = call(64, 128, 64)
    calls = classed(arranged)
    first = next(candidates(calls))
    choices.remember(calls, first.tiles, {})
    assert choices.remembered(calls) == first.tiles
    (file,) = gpu.glob("choices/*.json")
    for text in ("", "{}", file.read_text().replace("tile_m", "tile_x")):
        file.write_text(text)
        assert choices.remembered(calls) is None


def test_without_time_to_compile_the_models_first_is_taken(gpu, monkeypatch):
    monkeypatch.setattr(building, "build", lambda jobs, seconds=None: [False] * len(jobs))
    arranged = call(64, 128, 64)
    with pytest.warns(UserWarning, match="64x128x64 is not tuned: 0 of 16 kernels"):
        chosen = tuner.choose_by_time(arranged, "sm_90a", 3.0, lambda *_: pytest.fail("timed"))
    assert chosen == next(candidates(classed(arranged)))
    assert not list(gpu.glob("choices/*.json"))


def test_what_cutex_comes_with_fits_its_problems_and_is_taken():
    """cutex/measured's choices, by the sizes and layouts in its names."""
    table = choices._shipped("sm_90a")
    assert len(table) > 50
    for name in table:
        sizes, (a, b), *narrow = name.split()
        assert narrow in ([], ["fp8"])
        m, n, k = map(int, sizes.split("x"))
        dtype, elements = ("e4m3", 2 * k) if narrow else ("bf16", k)
        layouts = (
            OperandLayout(dtype, "row" if a == "k" else "column"),
            OperandLayout(dtype, "column" if b == "k" else "row"),
            OperandLayout(),
        )
        calls = call_class((m, n, elements, 1), layouts, (), "sm_90a")
        assert calls.sizes == (m, n, k, 1), "a class, not a size within one"
        tiles = choices.shipped(calls)
        assert tiles is not None and tiles.why_not(problem_of(calls), arch("sm_90a")) is None
        placed = by_gpc(tiles, problem_of(calls), calls.target)
        assert config_for((m, n, elements, 1), layouts, (), "sm_90a").tiles == placed
        batched = replace(calls, sizes=(m, n, k, 2))
        assert choices.shipped(batched) is None


def test_what_cutex_comes_with_is_what_was_measured_best(monkeypatch):
    monkeypatch.setattr("cutex.ops.matmul.plan.other_board", lambda _: "")  # it is of an H200
    table = choices._shipped("sm_90a")
    every = list(shipping.measured())
    assert len(every) > 5 * len(table) / 2
    for calls, times in random.Random(0).sample(every, 30):
        assert shipping.better(calls, times) == choices.shipped(calls), calls.sizes


def test_tuning_takes_a_time_above_zero():
    with pytest.raises(ValueError, match="seconds"), cutex.tuning(0):
        pass


@pytest.mark.slow
def test_processes_build_what_they_are_given_and_leave_what_does_not_compile(gpu):
    arranged = call(64, 128, 64)
    first = next(candidates(classed(arranged)))
    ended = []
    jobs = [job(first, "sm_90a"), job(first, "sm_1")]
    with pytest.warns(UserWarning, match="not built ahead: .*sm1"):
        assert building.build(jobs, ended=lambda: ended.append(None)) == [True, False]
    assert len(ended) == 2
    assert len(list(gpu.glob("kernels/*/meta.json"))) == 1
    assert building.build([]) == []


@pytest.mark.slow
def test_what_nobody_waits_for_does_not_hold_up_what_comes_next(gpu):
    some = [job(c, "sm_90a") for c in islice(candidates(classed(call(64, 128, 64))), 40)]
    done = sum(building.build(some, seconds=0.0))
    assert done <= building.MOST, (
        "what was begun may have ended, the rest is left: the time is over"
    )
    assert building.build(some[-1:]) == [True]
    assert len(list(gpu.glob("kernels/*/meta.json"))) <= done + building.MOST + 1, (
        "the others were left"
    )


@pytest.mark.slow
def test_a_process_that_was_killed_is_replaced(gpu):
    first, second = islice(candidates(classed(call(64, 128, 64))), 2)
    (builder,) = building.start(1)
    assert building.start(1) == [builder]
    builder.process.kill()
    builder.process.wait()
    assert building.build([job(first, "sm_90a")]) == [True]
    (builder,) = building.start(1)
    assert builder.ready
    builder.process.send_signal(signal.SIGSTOP)
    threading.Timer(0.5, builder.process.kill).start()  # in the middle of its job
    with pytest.warns(UserWarning, match="not built ahead: the compiler ended with -9"):
        assert building.build([job(second, "sm_90a")]) == [False]
    assert building.build([job(second, "sm_90a")]) == [True]


NOISY = """
from cutex.compile import worker

answer = worker.answer
worker.answer = lambda message: (print("noise", flush=True), answer(message))[1]
worker.work()
"""


@pytest.mark.slow
def test_the_processes_do_without_torch(gpu):
    """Whose import takes twice as long as that of the compiler."""
    first = next(candidates(classed(call(64, 128, 64))))
    assert building.build([job(first, "sm_90a")]) == [True]
    (builder,) = building.start(1)
    maps = Path(f"/proc/{builder.process.pid}/maps").read_text()
    assert "_cutlass_ir" in maps and "libtorch" not in maps


def test_kernels_with_a_function_of_the_users_are_compiled_here(gpu, monkeypatch):
    """Other processes do not have it, and a lambda cannot be sent to them."""
    a, b = torch.ones(64, 64, dtype=torch.bfloat16), torch.ones(128, 64, dtype=torch.bfloat16)
    shown = Call(a, b.mT, activation=lambda x: x + 1)
    arranged = arrange(shown, torch.empty(64, 128, dtype=torch.bfloat16), "sm_90a")
    configs = list(islice(candidates(classed(arranged)), 3))
    some = [job(c, "sm_90a") for c in configs]
    monkeypatch.setattr(building, "start", lambda *_: pytest.fail("a process was started"))
    assert building.build(some[:1]) == [True]
    assert len(list(gpu.glob("kernels/*/meta.json"))) == 1
    assert building.build(some, seconds=0.0) == [False] * 3, "the time is over"
    wrong = [job(configs[0], "sm_2")]
    with pytest.warns(UserWarning, match="not built ahead: .*sm2"):
        assert building.build(wrong) == [False]


def test_a_call_with_a_users_function_is_tuned(gpu, monkeypatch):
    monkeypatch.setattr(tuner, "CANDIDATES", 2)
    a = torch.ones(64, 64, dtype=torch.bfloat16)
    shown = Call(a, a.mT, activation=lambda x: x + 1)
    arranged = arrange(shown, torch.empty(64, 64, dtype=torch.bfloat16), "sm_90a")
    _, second = islice(candidates(classed(arranged)), 2)
    timer = lambda launches, *_: {"0": 2.0, "1": 1.0}
    assert tuner.choose_by_time(arranged, "sm_90a", 60.0, timer) == second


@pytest.mark.slow
def test_prints_of_the_compiler_are_no_answers(gpu, monkeypatch):
    monkeypatch.setattr(building, "START", NOISY)
    first = next(candidates(classed(call(64, 128, 64))))
    assert building.build([job(first, "sm_90a")]) == [True]


def test_classes_of_rows_are_never_smaller_than_what_is_in_them():
    for m in range(1, 9000):
        assert m <= rows_class(m) <= m + min(63, max(15, m // 32))
        assert rows_class(rows_class(m)) == rows_class(m)


def test_the_number_of_tokens_is_rounded_wherever_it_stands():
    forward, dgrad, wgrad = (True, True), (True, False), (False, False)
    assert sizes_class((5001, 4001, 4100), forward) == (5056, 4008, 4104)
    assert sizes_class((5001, 4001, 4100), dgrad) == (5056, 4008, 4104)
    assert sizes_class((5001, 4001, 4100), wgrad) == (5008, 4008, 4608)
    for majors in (forward, wgrad):
        once = sizes_class((5001, 4001, 4100), majors)
        assert sizes_class(once, majors) == once


LAYERS_70B = ((10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672))


@pytest.mark.slow
@pytest.mark.parametrize(
    "layers",
    [LAYERS_70B[2:3], pytest.param(LAYERS_70B, marks=pytest.mark.slow)],
    ids=["the widest", "all four"],
)
def test_serving_a_70b_model_takes_few_kernels(monkeypatch, layers):
    """Kernels for every M from 1 to 8192."""
    asked = []
    monkeypatch.setattr(building, "build", lambda jobs, seconds=None: asked.extend(jobs))
    monkeypatch.setattr("cutex.ops.matmul.warming.kernel_for", lambda *_: None)
    with simulated("sm_90a"):
        count = cutex.warm_up([(range(1, 8193), n, k) for n, k in layers])
    assert count == len(asked) <= 24


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("shapes", "dtype", "error", "sentence"),
    [
        (5, torch.bfloat16, TypeError, "shapes must be an iterable of (M, N, K), got int"),
        ([(1, 2)], torch.bfloat16, TypeError, "shapes holds (1, 2): (M, N, K) of whole numbers"),
        ([(1, 2.0, 3)], torch.bfloat16, TypeError, "shapes holds (1, 2.0, 3): (M, N, K) of"),
        ([(-1, 8, 8)], torch.bfloat16, ValueError, "shapes holds (-1, 8, 8): sizes are at least 0"),
        ([(range(-2, 9), 8, 8)], torch.bfloat16, ValueError, "sizes are at least 0"),
        ([(True, 8, 8)], torch.bfloat16, TypeError, "shapes holds (True, 8, 8): (M, N, K) of"),
        ([(1, 8, 8)], "bf16", TypeError, "dtype must be a torch.dtype, got 'bf16'"),
    ],
)
def test_what_cannot_be_warmed_up_is_one_sentence(shapes, dtype, error, sentence):
    with simulated("sm_90a"), pytest.raises(error, match=re.escape(sentence)):
        cutex.warm_up(shapes, dtype)


@pytest.mark.parametrize("most", [0, -1, 1.5, "2", None])
def test_the_most_kernels_to_warm_up_are_a_number_above_zero(most):
    error = ValueError if isinstance(most, int) else TypeError
    with simulated("sm_90a"), pytest.raises(error, match=r"^most must be a whole number above 0"):
        cutex.warm_up([(64, 64, 64)], most=most)


@pytest.mark.parametrize("shape", [(0, 64, 64), (64, 0, 64), (range(1), 64, 64)])
def test_for_an_empty_result_nothing_is_warmed_up(shape):
    with simulated("sm_90a"):
        assert cutex.warm_up([shape]) == 0


def test_rows_are_counted_from_none_on(monkeypatch):
    monkeypatch.setattr("cutex.ops.matmul.warming.kernel_for", lambda *_: None)
    monkeypatch.setattr(building, "build", lambda jobs: None)
    with simulated("sm_90a"):
        assert cutex.warm_up([(range(17), 64, 64)]) == cutex.warm_up([(range(1, 17), 64, 64)]) > 0


@pytest.mark.parametrize("rows", [range(10**12), range(10**12, -1, -1)])
def test_a_range_of_rows_may_have_no_end_in_sight(rows):
    sizes = list(_classes((rows, 64, 64)))
    assert sizes[0] == (1, 64, 64)
    assert sizes[-1][0] == rows[-1] + rows[0]
    assert {rows_class(m) for m, *_ in sizes} >= {rows_class(m) for m in range(1, 8193)}


def test_what_is_added_to_a_product_of_fp8_is_bfloat16(monkeypatch):
    asked = []
    monkeypatch.setattr("cutex.ops.matmul.warming.kernel_for", lambda *_: None)
    monkeypatch.setattr(building, "build", asked.extend)
    with simulated("sm_90a"):
        cutex.warm_up([(64, 64, 64)], torch.float8_e4m3fn, bias=True, residual=True)
    config = asked[0].there.config
    assert [op.dtype for op in config.ops] == ["bf16", "bf16"]


@pytest.mark.slow
def test_after_warming_up_no_call_compiles(monkeypatch, tmp_path):
    monkeypatch.setenv("CUTEX_CACHE", str(tmp_path))
    with simulated("sm_90a"):
        shapes = [(range(1, 80), 96, 64)]
        assert cutex.warm_up(shapes) >= 1
        before = cutex.kernels_built()
        w = torch.randint(-2, 3, (96, 64)).bfloat16()
        for m in (1, 17, 79):
            x = torch.randint(-2, 3, (m, 64)).bfloat16()
            assert torch.equal(cutex.matmul(x, w.mT).float(), x.float() @ w.float().T)
        assert cutex.kernels_built() == before
        assert torch.equal(cutex.matmul(w.mT, w).float(), w.float().T @ w.float())
        assert cutex.kernels_built() == before + 1, "of another layout, which was not asked for"
    building.stop()


@pytest.mark.slow
def test_one_graph_serves_every_number_of_rows():
    graphs = []

    def backend(module, _):
        graphs.append(module)
        return module.forward

    w = torch.randint(-2, 3, (64, 64)).bfloat16()
    with simulated("sm_90a"):
        compiled = torch.compile(
            lambda x: cutex.matmul(x, w.mT), backend=backend, dynamic=True, fullgraph=True
        )
        for m in (2, 17, 64, 130):
            x = torch.randint(-2, 3, (m, 64)).bfloat16()
            assert torch.equal(compiled(x).float(), x.float() @ w.float().T)
    assert len(graphs) == 1


@pytest.mark.slow
def test_the_clocks_error_on_drawn_kernels_is_reported_by_kind(capsys):
    assert unseen.main(["--count", "1"]) == 0
    assert "| all | 1 |" in capsys.readouterr().out
    assert list(unseen.sample(1, 5)) == list(unseen.sample(1, 5)) != list(unseen.sample(2, 5))
    _, rows = fit.measured_rows()
    rows = [r for r in rows if r.get("dtype", "bf16") == "bf16"]
    timed = {(r["m"], r["n"], r["k"], us) for r in rows for us in r["us"].values()}
    assert all((*p.mnk, us) in timed for p, _, us in unseen.sample(3, 500)), (
        "of its problem's dtype"
    )
    assert unseen.main(["--count", "0"]) == 2
    assert "--count 0: from 1 to" in capsys.readouterr().err
