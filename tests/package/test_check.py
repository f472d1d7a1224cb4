"""python -m cutex.check: every order in one command, again when the file is saved."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import pytest

from cutex.bench import check
from cutex.command import INTERRUPTED
from cutex.orders import ORDERS
from cutex.sim.__main__ import main as sim

KERNEL = """
import torch
from cutlass import cute
from cutlass.cute.runtime import from_dlpack

@cute.kernel
def kernel(a: cute.Tensor):
    t, _, _ = cute.arch.thread_idx()
    a[t SHIFT] = a[t]

@cute.jit
def launch(a: cute.Tensor):
    kernel(a).launch(grid=(1, 1, 1), block=(32, 1, 1))

launch(from_dlpack(torch.ones(32, device="cuda")))
"""


def test_every_order_is_run_with_every_seed():
    asked = check.orders(2)
    assert {order for order, _ in asked} == set(ORDERS)
    assert ("random", 1) in asked and ("fifo", 1) not in asked
    assert len(asked) == len(set(asked)) == 2 + 2 * (len(ORDERS) - 2)


@pytest.mark.slow
def test_what_all_orders_find_is_told_once(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(check, "ORDERS", ("fifo", "random"))
    script = tmp_path / "mine.py"
    script.write_text(KERNEL.replace("SHIFT", "+ 64"))
    assert check.main(["--seeds", "1", "--arch", "sm_90a", str(script)]) == 1
    told = capsys.readouterr()
    assert told.out.count("bad address:") == 1
    assert "a[t + 64] = a[t]" in told.out
    assert "in order fifo, random:0" in told.out
    assert "2 orders, 1 report" in told.out


def test_a_right_kernel_has_nothing_found(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(check, "ORDERS", ("fifo",))
    script = tmp_path / "mine.py"
    script.write_text(KERNEL.replace("SHIFT", ""))
    assert check.main(["--seeds", "1", "--arch", "sm_90a", str(script)]) == 0
    assert "1 order, nothing found" in capsys.readouterr().out


TRANSPOSED = """
import cutlass
import torch
from cutlass import Float32, cute
from cutlass.cute.runtime import from_dlpack
from cutlass.memory import SmemAllocator

@cute.kernel
def kernel(a: cute.Tensor):
    t, _, _ = cute.arch.thread_idx()
    s = SmemAllocator().allocate_tensor(Float32, cute.make_layout((32, 32), stride=(STRIDE, 1)))
    for i in cutlass.range(32, unroll=1):
        s[i, t] = a[i, t]
    cute.arch.sync_threads()
    for i in cutlass.range(32, unroll=1):
        a[i, t] = s[t, i]

@cute.jit
def launch(a: cute.Tensor):
    kernel(a).launch(grid=(1, 1, 1), block=(32, 1, 1))

launch(from_dlpack(torch.randn(32, 32, device="cuda")))
"""


@pytest.mark.slow
@pytest.mark.parametrize("stride", [32, 33])
def test_resources_and_bank_conflicts_are_told(stride, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(check, "ORDERS", ("fifo",))
    script = tmp_path / "mine.py"
    script.write_text(TRANSPOSED.replace("STRIDE", str(stride)))
    assert check.main(["--seeds", "1", "--arch", "sm_90a", str(script)]) == 0
    told = capsys.readouterr().out
    assert re.search(
        r": 32 threads, \d+ registers, 0 bytes spilled, \d+ bytes of smem, 32 CTAs", told
    )
    line = 1 + TRANSPOSED.splitlines().index("        a[i, t] = s[t, i]")
    found = (
        f"mine.py:{line}:19: bank conflicts, ld.shared.b32 takes 32 times the wavefronts that it "
    )
    assert (found + "needs (1024 instead of 32)" in told) == (stride == 32)
    assert ("no bank conflicts" in told) == (stride == 33)


ARGUMENTS = """
import os
import signal
import subprocess
import sys
import sys

print("order", sys.argv[1:], os.getcwd(), flush=True)
os._exit(7) if "die" in sys.argv else sys.exit(3)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("argument", "code"), [("die", 7), ("live", 3)])
def test_each_order_is_a_process_with_the_arguments_of_the_script(
    argument, code, tmp_path, capsys, monkeypatch
):
    """A run may end in any way; the next one still runs. The libraries are imported once, before
    all."""
    monkeypatch.setattr(check, "ORDERS", ("fifo", "eager"))
    script = tmp_path / "mine.py"
    script.write_text(KERNEL.replace("SHIFT", "") + ARGUMENTS)
    assert check.main([str(script), argument, "--seeds", "9"]) == 1
    told = capsys.readouterr()
    assert f"exit code {code}" in told.out and f"['{argument}', '--seeds', '9']" in told.out
    assert os.getcwd() in told.out and "in order fifo, eager" in told.out


def test_the_end_of_what_runs_the_orders_is_told(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(check.sys, "executable", "/bin/false")
    script = tmp_path / "mine.py"
    script.write_text("")
    assert check.main([str(script)]) == 1
    assert "14 orders, 1 report" in capsys.readouterr().out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=lambda s: s.name)
def test_what_is_killed_leaves_no_run_behind(number):
    text = (
        "from cutex.bench.check import _group\n"
        "with _group(['sleep', '600']) as runs:\n"
        "    print(runs.pid, flush=True)\n"
        "    runs.wait()\n"
    )
    # NOTE: what runs under nohup ignores SIGHUP, and so do its children
    process = subprocess.Popen(
        [sys.executable, "-c", text], stdout=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
    )  # fmt: skip
    with process:
        runs = int(process.stdout.readline())
        process.send_signal(number)
        assert process.wait(60) == 128 + number
    with pytest.raises(ProcessLookupError):
        os.kill(runs, 0)


@pytest.mark.slow
def test_a_script_that_fails_by_itself_is_told_once(tmp_path, capsys):
    """Before it has launched anything, no order can change how it ends."""
    script = tmp_path / "mine.py"
    script.write_text("raise SystemExit('wrong result')")
    assert check.main([str(script)]) == 1
    told = capsys.readouterr().out
    assert "exit code 1\nwrong result" in told and "1 order, 1 report" in told


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = (", "mine.py:1 is no Python: '(' was never closed"),
        ("print('no kernel')", "mine.py launches no kernel, so there is nothing to check"),
    ],
)
def test_what_cannot_be_checked_is_not_called_right(text, says, tmp_path, capsys):
    script = tmp_path / "mine.py"
    script.write_text(text)
    assert check.main([str(script)]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    (sentence,) = told.err.splitlines()
    assert sentence.startswith("cutex: ") and sentence.endswith(says)


@pytest.mark.parametrize(
    ("argv", "says"),
    [(["nowhere.py"], "nowhere.py is not a file"), (["--seeds", "0", __file__], "--seeds 0")],
)
def test_bad_input_is_one_sentence(argv, says, capsys):
    assert check.main(argv) == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert says in sentence


def test_a_saved_file_is_checked_again(tmp_path, capsys, monkeypatch):
    script = tmp_path / "mine.py"
    script.write_text("first")
    checked, saves = [], iter(range(1, 9))

    def look(args):
        checked.append(script.read_text())
        if len(checked) == 3:
            raise KeyboardInterrupt
        return 0

    def somebody_saves(_):
        now = next(saves)
        script.write_text(f"save {now}")
        os.utime(script, ns=(now, now))

    monkeypatch.setattr(check, "check", look)
    monkeypatch.setattr(check.time, "sleep", somebody_saves)
    assert check.main(["--watch", str(script)]) == INTERRUPTED
    assert checked == ["first", "save 1", "save 2"]
    assert capsys.readouterr().err.count("watching") == 2


def test_what_is_saved_during_a_run_is_checked_after_it(tmp_path, monkeypatch):
    script = tmp_path / "mine.py"
    script.write_text("first")
    checked = []

    def look(args):
        checked.append(script.read_text())
        if len(checked) == 1:
            script.write_text("saved meanwhile")
            os.utime(script, ns=(0, 1))
        return 0

    def nobody_saves(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(check, "check", look)
    monkeypatch.setattr(check.time, "sleep", nobody_saves)
    assert check.main(["--watch", str(script)]) == INTERRUPTED
    assert checked == ["first", "saved meanwhile"]


@pytest.mark.parametrize(
    ("text", "options", "says"),
    [
        ("def (:\n", [], "mine.py:1 is no Python: invalid syntax"),
        ("\0", [], "is no Python"),
        (
            "",
            ["--time", "--trace", "/nowhere/t.json"],
            "--trace /nowhere/t.json: No such file or directory",
        ),
    ],
)
def test_what_the_simulator_cannot_run_is_one_sentence(text, options, says, tmp_path, capsys):
    script = tmp_path / "mine.py"
    script.write_text(text)
    assert sim([*options, str(script)]) == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert says in sentence


TWO = """
import os
import torch
from cutlass import cute
from cutlass.cute.runtime import from_dlpack

print("compiled by", os.getpid())

@cute.kernel
def first(a: cute.Tensor):
    t, _, _ = cute.arch.thread_idx()
    a[t] = a[t] + 1

@cute.kernel
def second(a: cute.Tensor, s: cute.Tensor):
    t, _, _ = cute.arch.thread_idx()
    a[t] = a[t] * s[t]

@cute.jit
def launch_first(a: cute.Tensor):
    first(a).launch(grid=(1, 1, 1), block=(32, 1, 1))

@cute.jit
def launch_second(a: cute.Tensor, s: cute.Tensor):
    second(a, s).launch(grid=(1, 1, 1), block=(32, 1, 1))

x, s = torch.randn(32, device="cuda"), torch.randn(1 << 20, device="cuda")
before = x.clone()
launch_first(from_dlpack(x))
launch_second(from_dlpack(x), from_dlpack(s))
assert torch.allclose(x, (before + 1) * s[:32])
print("right", os.getpid())
raise SystemExit(3)
"""


@pytest.mark.slow
def test_imports_and_the_first_compile_are_shared_and_later_kernels_compile(
    tmp_path, capsys, monkeypatch
):
    """Each order goes on from the first launch with the script's own state."""
    monkeypatch.setattr(check, "ORDERS", ("fifo", "eager", "random"))
    seen = []
    reports = check.Run.reports.fget
    monkeypatch.setattr(
        check.Run, "reports", property(lambda r: (seen.append(r.output), reports(r))[1])
    )
    script = tmp_path / "mine.py"
    script.write_text(TWO)
    assert check.main(["--seeds", "2", "--arch", "sm_90a", str(script)]) == 1
    outputs = dict.fromkeys(seen)
    assert len(outputs) == 4
    assert len({re.search(r"compiled by (\d+)", o)[1] for o in outputs}) == 1
    assert len({re.search(r"right (\d+)", o)[1] for o in outputs}) == 4
    assert "exit code 3" in capsys.readouterr().out


ADVISED = KERNEL.replace(
    "    a[t SHIFT] = a[t]",
    "    s = SmemAllocator().allocate_tensor("
    "cutlass.Float32, cute.make_layout(32))\n    s[t] = a[t]\n    a[t] = s[t ^ 1]",
).replace("import torch", "import cutlass\nimport torch\nfrom cutlass.memory import SmemAllocator")


@pytest.mark.slow
def test_advisories_are_told_behind_findings_and_fail_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(check, "ORDERS", ("fifo", "eager"))
    script = tmp_path / "mine.py"
    script.write_text(ADVISED)
    assert check.main(["--arch", "sm_90a", str(script)]) == 0
    told = capsys.readouterr()
    assert told.out.count(": advisory, ") == 1 and "in order fifo, eager" in told.out
    assert "2 orders, nothing found, 1 advisory" in told.out
    assert "copies and MMAs complete as late as the program allows" in told.err


@pytest.mark.slow
def test_what_an_order_adds_is_told(tmp_path, capsys, monkeypatch):
    """elect.sync may return any lane, so only the order that does finds what relies on lane 0."""
    monkeypatch.setattr(check, "ORDERS", ("fifo", "elected"))
    script = tmp_path / "mine.py"
    relies = "    with cute.arch.elect_one():\n        a[t * 4096] = a[t]"
    script.write_text(KERNEL.replace("    a[t SHIFT] = a[t]", relies))
    assert check.main(["--seeds", "1", "--arch", "sm_90a", str(script)]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert "nothing found" in lines[0] and "1 found, 1 new" in lines[1]
