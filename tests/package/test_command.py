"""No command ends in a traceback: bad input, full disk, missing module, Ctrl-C, `| head`."""

from __future__ import annotations

import ast
import errno
import importlib
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from cutex.command import INTERRUPTED, answered
from cutex.errors import NoCache

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/x/y"), 2, "/x/y: No space left"),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), 2, "/x: Permission denied"),
        (ModuleNotFoundError("no", name="torch.nn"), 2, "torch is not installed; pip install -e"),
        (NoCache("the cache cannot be written"), 2, "the cache cannot be written"),
        (KeyboardInterrupt(), INTERRUPTED, "interrupted"),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), 0, ""),
    ],
)
def test_what_ends_a_command_is_one_sentence(error, code, says, capfd):
    @answered
    def main() -> int:
        raise error

    assert main() == code
    told = capfd.readouterr().err
    assert says in told and told.count("\n") == bool(says)


def test_ctrl_c_while_a_command_is_imported_is_one_sentence_too():
    code = "import sys; sys.argv = ['-m']; import cutex; raise KeyboardInterrupt"
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert ran.returncode in (INTERRUPTED, -signal.SIGINT)
    assert ran.stderr == "cutex: interrupted\n"


def test_every_command_ends_so():
    """All functions named main, except those that call another's, and that of cutex.sim, since a
    script's exception is the script's own."""
    files = {*ROOT.glob("cutex/**/*.py"), *ROOT.glob("kernels/**/*.py")}
    open_ended = []
    for file in sorted(files - {ROOT / "cutex/sim/__main__.py"}):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.FunctionDef) or node.name != "main":
                continue
            hands_on = ast.unparse(node.body[-1]).partition("(")[0].endswith("main")
            if "answered" not in map(ast.unparse, node.decorator_list) and not hands_on:
                open_ended.append(str(file))
    assert not open_ended


def test_a_command_of_the_clone_says_what_it_misses_elsewhere(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "cutex.clock", "--rows"], cwd=tmp_path, capture_output=True,
        text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("cutex: results/timing/") and done.stderr.count("\n") == 1


def test_a_fault_of_its_own_is_not_hidden():
    for error in (KeyError("x"), ModuleNotFoundError("no", name="cutex.nowhere")):

        @answered
        def main(error=error) -> int:
            raise error

        with pytest.raises(type(error)):
            main()


READ_BY_HEAD = [
    ["cutex.gemm", "--stage", "list"],
    ["cutex.results", "list"],
    ["cutex.roofline", "--op", "gemm", "--mnk", "8192,8192,4096", "--gpu", "b200"],
    ["cutex.gemm", "--help"],
]


@pytest.mark.parametrize("command", READ_BY_HEAD, ids=" ".join)
def test_a_reader_that_leaves_is_no_error(command):
    process = subprocess.Popen(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(100) == 0, err
    assert err == ""


REFUSED = [
    (["cutex.sim"], "the following arguments are required: script"),
    (["cutex.sim", "--order", "lifo", "x.py"], "argument --order: invalid choice: 'lifo'"),
    (["cutex.check"], "the following arguments are required: FILE.py"),
    (["cutex.results"], "the following arguments are required: list|best|compare|merge"),
    (["cutex.layout", "swizzle", "7"], "argument bytes: invalid choice: 7"),
    (["cutex.roofline", "--op", "conv"], "argument --op: invalid choice: 'conv'"),
    (["cutex.roofline", "--size", "1,2,3,64"], "the sizes are of attention: give --op attention"),
    (["cutex.clock", "--fit", "all"], "argument --fit: invalid choice: 'all'"),
    (["cutex.clock", "--predict"], "results/timing/ is not here"),
    (["cutex.bounds"], "docs/ is not here: docs/bounds.md is written in a clone of cutex"),
    (["cutex.report"], "README.md: No such file or directory"),
    (["cutex.gemm", "--stage=--"], "argument --stage: '--' is no value"),
    (["cutex.sweep", "--seconds", "nan"], "--seconds nan: a number above 0 is needed"),
    (["cutex.sweep", "--summary"], "results/sweep has no untuned row"),
]


@pytest.mark.parametrize(("command", "says"), REFUSED, ids=[" ".join(c) for c, _ in REFUSED])
def test_every_command_refuses_with_one_sentence(command, says, tmp_path, monkeypatch, capsys):
    (tmp_path / "results").mkdir()
    monkeypatch.chdir(tmp_path)
    package = (ROOT / command[0].replace(".", "/")).is_dir()
    door = importlib.import_module(f"{command[0]}.__main__" if package else command[0])
    assert door.main(command[1:]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    (sentence,) = told.err.splitlines()
    assert sentence.startswith("cutex: ") and says in sentence


def test_python_m_cutex_lists_every_command(capsys):
    from cutex.__main__ import main

    assert main([]) == 0
    lines = re.findall(
        r"^python -m cutex\.(\w+)\S*( script\.py)?  +(.+)$", capsys.readouterr().out, re.M
    )
    folder = ROOT / "cutex"
    named = {file.stem: file for file in folder.glob("[!_]*.py")}
    named |= {file.parent.name: file for file in folder.glob("*/__main__.py")}
    doors = {n for n, file in named.items() if 'if __name__ == "__main__":' in file.read_text()}
    assert {name for name, _, _ in lines} == doors
    assert all("(see --help)" not in what for _, _, what in lines)


def test_what_a_script_raises_is_told_from_its_own_line_on(tmp_path, capfd):
    from cutex.sim.__main__ import main

    script = tmp_path / "mine.py"
    script.write_text("def f():\n    raise KeyError('mine')\n\nf()\n")
    assert main([str(script)]) == 1
    told = capfd.readouterr().err
    places = re.findall(r'File ".*?(\w+\.py)", line (\d+)', told)
    assert places == [("mine.py", "4"), ("mine.py", "2")]
    assert told.splitlines()[-1].startswith("cutex: 0 launches")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--json", "mine.py"], "--json mine.py: this is the script"),
        (["--json", "link"], "--json link: this is the script"),
        (["--time", "--trace", "mine.py"], "--trace mine.py: this is the script"),
        (["--json", "earlier", "--gpu", "b200"], "--gpu goes with --time"),
    ],
)
def test_what_is_refused_overwrites_nothing(tmp_path, monkeypatch, capfd, options, says):
    from cutex.sim.__main__ import main

    monkeypatch.chdir(tmp_path)
    for name in ("mine.py", "earlier"):
        (tmp_path / name).write_text("pass")
    (tmp_path / "link").symlink_to("mine.py")
    assert main([*options, "mine.py"]) == 2
    assert capfd.readouterr().err == f"cutex: {says}\n"
    assert (tmp_path / "mine.py").read_text() == (tmp_path / "earlier").read_text() == "pass"


def test_without_modal_its_command_says_so(tmp_path):
    (tmp_path / "modal.py").write_text("raise ModuleNotFoundError('no', name='modal')")
    done = subprocess.run(
        [sys.executable, ROOT / "modal_app.py", "--help"], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("cutex: modal is not installed; pip install -e ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "command"), [("cutlass", "cutex.fit.shipping"), ("numpy", "cutex.clock")]
)
def test_a_command_whose_module_cannot_import_a_package_says_so(name, command, tmp_path):
    """There is no `main` yet that could."""
    (tmp_path / "sitecustomize.py").write_text(f"import sys; sys.modules[{name!r}] = None")
    done = subprocess.run(
        [sys.executable, "-m", command], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith(f"cutex: {name} is not installed; pip install -e ")
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_a_path_with_an_apostrophe_is_a_path(tmp_path):
    odd = tmp_path / "it's, a path"
    odd.mkdir(mode=0o700)
    ran = subprocess.run(
        [sys.executable, "-m", "cutex.gemm", "--stage", "0", "--device", "sim", "--mnk",
         "64,64,64", "--out", odd / "out"],
        cwd=odd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUTEX_CACHE": str(odd / "cache"),
             "TMPDIR": str(odd)},
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert list((odd / "out").glob("*.jsonl"))


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--seed", str(10**30)], "--seed 1000000000000000000000000000000: takes a number from 0"),
        (["--seed", "-1"], "--seed -1: takes a number from 0"),
        (["--seeds", "99999999"], "--seeds 99999999: takes a number from 1 to 10000"),
    ],
)
def test_an_absurd_seed_is_refused(argv, says, capsys):
    from cutex.gemm import main

    assert main(["--device", "sim", *argv]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("arch", ["sm_75", "sm_999", ""])
def test_simulate_names_the_archs_that_it_knows(arch):
    import torch

    from cutex import simulate

    with pytest.raises(ValueError, match=r"arch '.*' is not one of sm_90a, sm_100a"):
        simulate(lambda x: None, torch.zeros(1), arch=arch)


def test_what_is_imported_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    declared = {re.split(r"[\[<>=~! ]", d)[0].lower().replace("_", "-") for g in groups for d in g}
    provides = importlib.metadata.packages_distributions()
    missing = {}
    for file in [*(ROOT / "cutex").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            for name in names:
                top = name.partition(".")[0]
                if top in sys.stdlib_module_names or top in ("cutex", "_typeshed"):
                    continue
                from_whom = {d.lower().replace("_", "-") for d in provides.get(top, [])}
                if from_whom and not any(
                    d in declared or d.startswith("nvidia-cutlass-dsl") for d in from_whom
                ):
                    missing[name] = str(file.relative_to(ROOT))
    assert missing == {}
    assert any(d.startswith("cuda-bindings") for d in project["dependencies"])


def test_nobody_is_told_to_install_what_is_not_ours():
    """The package index has another project under the name."""
    for file in [
        *(ROOT / "cutex").rglob("*.py"),
        ROOT / "README.md",
        *(ROOT / "docs").rglob("*.md"),
    ]:
        for line in file.read_text().splitlines():
            assert not re.search(r"pip install '?cutex", line), f"{file}: {line}"


@pytest.mark.parametrize("closed", ["<&-", ">&-", "<&- >&- 2>&-"])
def test_a_closed_stream_is_no_error(closed, tmp_path):
    """A file that is opened does not take the stream's place: nothing printed goes into it."""
    (tmp_path / "x.py").write_text(
        "import sys\nfrom cutex.command import answered\n\n"
        "@answered\ndef main():\n    print('seen' + sys.stdin.read())\n"
        "    with open('kept', 'w') as file:\n        file.write('whole')\n    return 3\n\n"
        "raise SystemExit(main())\n"
    )
    done = subprocess.run(
        ["bash", "-c", f'"$0" x.py {closed}', sys.executable], cwd=tmp_path, capture_output=True,
        text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (3, "")
    assert (tmp_path / "kept").read_text() == "whole"


def test_what_a_script_leaves_with_is_told_as_python_tells_it(tmp_path, capfd):
    from cutex.sim.__main__ import main

    script = tmp_path / "mine.py"
    script.write_text("import sys\nsys.exit(['lost', 2])\n")
    assert main([str(script)]) == 1
    assert capfd.readouterr().err.startswith("['lost', 2]\n")


def test_a_script_that_goes_elsewhere_has_its_report_where_it_was_asked_for(tmp_path, monkeypatch):
    from cutex.sim.__main__ import main

    (tmp_path / "sub").mkdir()
    (tmp_path / "mine.py").write_text("import os\nos.chdir('sub')\n")
    monkeypatch.chdir(tmp_path)
    assert main(["--json", "found.json", "mine.py"]) == 0
    assert json.loads((tmp_path / "found.json").read_text())["launches"] == {}
    assert not list((tmp_path / "sub").iterdir())


# ---- what a shell, a locale and a disk can do


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["nosuch"], "'nosuch' is no command: python -m cutex lists them"),
        (["--bogus"], "'--bogus' is no command: python -m cutex lists them"),
        (["gem"], "'gem' is no command: python -m cutex lists them; did you mean python -m cutex."),
        (["gemm", "--stage", "3"], "the command is python -m cutex.gemm --stage 3"),
        (["cutex.sim", "x.py"], "the command is python -m cutex.sim x.py"),
        (["--help", "gemm"], "'--help' is no command"),
        ([""], "'' is no command"),
    ],
)
def test_python_m_cutex_with_arguments_does_not_pretend(capsys, argv, says):
    from cutex.__main__ import main

    assert main(argv) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.startswith(f"cutex: {says}") and told.err.count("\n") == 1
    assert main(["--help"]) == main(["-h"]) == 0


def in_shell(line, **env):
    return subprocess.run(
        ["bash", "-c", line.replace("python", f"{sys.executable} -m")],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), **env}, capture_output=True,
    )  # fmt: skip


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    "line",
    [
        "python cutex.gemm --help", "python cutex.layout swizzle 128 --out -",
        "python cutex.results best", "python cutex",
    ],
)  # fmt: skip
def test_a_full_disk_behind_the_output_is_one_sentence(line):
    done = in_shell(f"{line} > /dev/full")
    assert done.returncode == 2
    assert done.stderr.decode() == "cutex: No space left on device\n"


@pytest.mark.slow
def test_a_sentence_that_cannot_be_written_still_has_its_exit_code():
    assert in_shell("python cutex.gemm --stage 99 2> /dev/full").returncode == 2
    assert in_shell("python cutex.gemm --stage 99 2>&-").returncode == 2


@pytest.mark.parametrize("line", ["python cutex", "python cutex.gemm --stage list"])
def test_a_locale_that_is_ascii_alone(line):
    """Not Python's own UTF-8 mode either, which the locale C switches on."""
    done = in_shell(line, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert done.returncode == 0 and not done.stderr and done.stdout


def test_every_file_is_read_and_written_as_utf_8():
    """Whatever the locale: each call that opens a text names the encoding."""
    silent = []
    for file in sorted({*ROOT.glob("cutex/**/*.py"), *ROOT.glob("kernels/**/*.py")}):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            name, given = ast.unparse(node.func), {k.arg: k.value for k in node.keywords}
            texts = [
                x.value for x in (*node.args, given.get("mode")) if isinstance(x, ast.Constant)
            ]
            binary = any(isinstance(x, str) and len(x) < 4 and "b" in x for x in texts)
            opens = name.endswith((".read_text", ".write_text")) or (
                name.rpartition(".")[2] in ("open", "fdopen") and not binary
                and name not in ("os.open", "tarfile.open", "self.scopes.open")
            ) or (name.startswith("subprocess.") and "text" in given)  # fmt: skip
            if opens and "encoding" not in given:
                silent.append(f"{file.relative_to(ROOT)}:{node.lineno}")
    assert not silent


@pytest.mark.slow
def test_a_cache_whose_name_is_no_utf_8_is_refused():
    line = r"CUTEX_CACHE=$'/tmp/caf\xe9' python cutex.gemm --stage 0 --device sim --mnk 64,64,64"
    done = in_shell(line)
    assert done.returncode == 2
    sentence = done.stderr.decode().splitlines()[-1]
    assert sentence.startswith(r"cutex: the cache '/tmp/caf\udce9' has a name that is no UTF-8")


def test_a_file_whose_name_is_no_utf_8_is_named(tmp_path):
    done = in_shell(r"python cutex.sim $'/nowhere/caf\xe9.py'")
    assert done.returncode == 2
    assert done.stderr == b"cutex: /nowhere/caf\\udce9.py is not a file\n"


@pytest.mark.slow
def test_a_full_disk_under_the_c_compiler_is_one_sentence(tmp_path):
    """Its temporary files are in the cache, whose folder the sentence names, and not in TMPDIR."""
    compiler = tmp_path / "cc"
    compiler.write_text(
        '#!/bin/sh\ncase "$TMPDIR" in *cutex-cache/sim*) ;; *) exit 3;; esac\n'
        'echo "error writing to x.s: No space left on device" >&2; exit 1\n'
    )
    compiler.chmod(0o755)
    line = "python cutex.gemm --stage 0 --device sim --mnk 64,64,64"
    done = in_shell(line, CC=str(compiler), CUTEX_CACHE=str(tmp_path / "cutex-cache"))
    sentence = done.stderr.decode().splitlines()[-1]
    assert done.returncode == 2, done.stderr.decode()
    assert sentence.startswith("cutex: the cache ") and "No space left on device" in sentence
