"""The key of a compiled kernel, and the sources that it covers, beside those that a fresh process
imports."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import shutil
import subprocess
import sys
import textwrap
import time
import types
from collections.abc import Callable, Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import cutlass
import pytest
import torch

from cutex.arch import ARCHS
from cutex.compile import sources
from cutex.compile.sources import closure, modules_of, sources_digest
from cutex.kernels.gemm import stage
from cutex.problem.stage import stages

# Prints the modules with Python sources of their own that tracing a kernel has loaded
TRACED = """
import json, sys, sysconfig
from pathlib import Path
from cutex.compile import compile
{body}
compile(kernel, "bf16", kernel.arch, cache=False)
installed = {{"site-packages", "dist-packages"}}
standard = Path(sysconfig.get_path("stdlib"))
loaded = {{}}
for name, module in sorted(sys.modules.items()):
    file = Path(getattr(module, "__file__", None) or "")
    if file.suffix == ".py" and file.is_absolute() and not installed & set(file.parts):
        if not file.is_relative_to(standard):
            loaded[name] = str(file)
print(json.dumps([type(kernel).__module__, loaded]))
"""
KERNELS = {
    **{
        f"{name} stage {number}": f"""
            from cutex.kernels.gemm import stage
            kernel = stage("{name}", {number}).kernel()
            """
        for name in ARCHS
        for number in (0, 5, 9)
    },
    **{
        f"{name} attention": f"""
            from cutex.kernels.attention.forward import stage
            kernel = stage("{name}", 9).kernel()
            """
        for name in ARCHS
    },
    **{
        f"{name} general": f"""
            from cutex.device.epilogue.epilogue_ops import Activation, Bias
            from cutex.kernels.gemm.signature import GeneralConfig
            from cutex.kernels.gemm.{folder}.general import General
            from cutex.kernels.gemm import stage
            ops = Bias(), Activation("gelu")
            kernel = General(GeneralConfig(stage("{name}", 9).config(), ops=ops))
            """
        for name, folder in (("sm_90a", "sm90"), ("sm_100a", "sm100"))
    },
    "probe": """
        from cutex.kernels.probes.sm100 import ClcReply
        kernel = ClcReply()
        """,
    "a user's own": """
        from mine.stages import Mine
        from cutex.kernels.gemm import stage
        kernel = Mine(stage("sm_90a", 0).config())
        """,
}


@pytest.fixture
def users(tmp_path: Path) -> Path:
    """A user's folder with a stage, which imports a helper by way of another module."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text("")
    (tmp_path / "mine" / "stages.py").write_text(
        textwrap.dedent("""
            from __future__ import annotations

            from cutex.kernels.gemm.sm90.stage0 import Stage0
            from .rows import (
                height,  # of a tile (in rows)
            )

            class Mine(Stage0):
                number = 77

                @property
                def num_threads(self):
                    import factors
                    return height(self.config) // 64 * factors.WARPGROUP
            """)
    )
    (tmp_path / "mine" / "rows.py").write_text("def height(config): return config.tile_m\n")
    (tmp_path / "factors.py").write_text("WARPGROUP = 128\n")
    return tmp_path


# A Python that has imported torch and the DSL, which no key covers; each program that it is given
# runs in a fork of it, so that it imports what is cutex's or a user's anew
FORKING = """
import json, os, sys, traceback
import cutlass, torch
for line in sys.stdin:
    program = json.loads(line)
    if (process := os.fork()) == 0:
        for number in (1, 2):
            os.dup2(os.open(program["out"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)
        os.environ.update(program["env"])
        sys.path[:0] = program["path"]
        failed = False
        try:
            exec(compile(program["code"], "<string>", "exec"), {"__name__": "__main__"})
        except BaseException:
            traceback.print_exc()
            failed = True
        sys.stdout.flush()
        os._exit(failed)  # at once: to take torch and the DSL down takes as long as a program
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
os._exit(0)
"""


@pytest.fixture(scope="module")
def forking() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", FORKING],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        yield process
        process.stdin.close()


@pytest.fixture
def python(forking, tmp_path) -> Callable[..., str]:
    """Run a program with folders before all others on its path; return its output."""
    env = {name: os.environ[name] for name in ("CUTEX_CACHE",) if name in os.environ}

    def run(code: str, *path: Path, **more: str) -> str:
        out = tmp_path / "printed"
        out.unlink(missing_ok=True)
        program = {
            "code": code, "path": [*map(str, path)], "env": {**env, **more}, "out": str(out)
        }  # fmt: skip
        print(json.dumps(program), file=forking.stdin, flush=True)
        assert forking.stdout.readline() == "0\n", out.read_text()
        return out.read_text()

    return run


# stage 5 inherits from stage 0, and a user's kernel is found as ours are: those alone in CI
QUICK = ("sm_100a stage 5", "a user's own")


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(body, id=name, marks=() if name in QUICK else pytest.mark.slow)
        for name, body in KERNELS.items()
    ],
)
def test_every_module_that_tracing_a_kernel_loads_is_in_its_key(
    body, python, root, users, monkeypatch
):
    code = TRACED.format(body=textwrap.dedent(body))
    module, loaded = json.loads(python(code, root, users).splitlines()[-1])
    assert f"{root}/cutex/device/pipeline.py" in loaded.values()
    monkeypatch.syspath_prepend(users)
    known = {source.module: str(source.file) for source in closure([module])}
    unknown = dict(loaded.items() - known.items())
    if unknown:  # versions stand for what is installed, wherever it is
        installed = packages_distributions().keys() - {"cutex"} | sources.DEPENDENCIES
        unknown = {x for x in unknown if x.partition(".")[0] not in installed}
    assert not unknown
    if module.startswith("mine"):
        assert {"mine", "mine.stages", "mine.rows", "factors"} <= known.keys()


def test_the_keys_of_all_kernels_know_the_device_layer_whole_and_no_layer_above(root):
    files = [p for p in (root / "kernels").rglob("*.py") if p.stem != "__init__"]
    modules = [".".join(("cutex", *p.relative_to(root).with_suffix("").parts)) for p in files]
    known = {source.file.resolve() for source in closure(modules)}
    for folder in ("cutex/device", "schedulers"):
        layer = {p.resolve() for p in (root / folder).rglob("*.py")}
        assert len(layer) > 5 and layer <= known
    assert (root / "cutex" / "arch.py").resolve() in known
    above = {"bench", "cloud", "ops", "report", "results", "sim"}
    assert not [file for file in known if above & set(file.relative_to(root).parts)]


@pytest.mark.parametrize("op", ["attention", "attention_backward", "attention_decode"])
@pytest.mark.parametrize("name", ARCHS)
def test_a_change_of_choice_compiles_no_kernel_of_attention_anew(name, op):
    """A config says what was chosen, whatever chose it."""
    modules = {stage.module for stage in stages(op, name)}
    known = {source.module for source in closure(modules)}
    assert modules < known
    assert not [x for x in known if x.rpartition(".")[2] == "choose"]


KEY = """
from cutex.compile import compile
from mine.stages import Mine
from cutex.kernels.gemm import stage
c = compile(Mine(stage("sm_90a", 0).config()), "bf16", "sm_90a")
print(c.key, c.from_cache)
"""


def test_an_edit_to_what_a_users_stage_imports_compiles_it_anew(python, root, users, tmp_path):
    key_of = lambda: python(KEY, root, users, CUTEX_CACHE=str(tmp_path / "cache")).split()
    first, from_cache = key_of()
    assert from_cache == "False"
    with (users / "factors.py").open("a") as file:
        file.write("# edited\n")
    key, from_cache = key_of()
    assert key != first and from_cache == "False"
    assert key_of() == [key, "True"]


@pytest.mark.sweep(6)
@pytest.mark.parametrize("name", ["profile", "code", "wave", "mailbox"])  # torch loads none
def test_a_users_module_named_like_one_of_python_is_the_users(python, root, tmp_path, name):
    """Python itself has such modules; where the file is decides."""
    (tmp_path / "acts.py").write_text(f"from {name} import act\n")
    package = tmp_path / name
    for path in (tmp_path / f"{name}.py", package / "__init__.py"):
        path.parent.mkdir(exist_ok=True)
        digests = []
        for factor in (2, 3):
            path.write_text(f"def act(x):\n    return {factor} * x\n")
            code = "from cutex.compile.sources import *; print(sources_digest(['acts']));"
            code += "print(*[s.file for s in closure(['acts'])])"
            digest, *files = python(code, root, tmp_path).split()
            assert str(path) in files
            digests.append(digest)
        assert digests[0] != digests[1]


WAYS_TO_IMPORT = {
    "relative": "from .helper import f",
    "no space": "from.helper import(f)",
    "star": "from .helper import*",
    "goes on": "from mine.helper \\\n    import f",
    "goes on with \\r\\n": "from mine.helper \\\r\n    import f",
    "old line ends": "x = 1\rfrom .helper import f\r",
    "form feed": "\f\nif True:\n    \ffrom .helper import f",
    "by name": "import importlib\nh = importlib.import_module('mine.helper')",
    "by a relative name": "from importlib import *\nh = import_module('.helper', __package__)",
    "built in": "h = __import__('mine.helper').helper",
    "by the package": "from . import f",
    "of a module": "import mine\nmine.f",
    "inside a class": "class A: from .helper import f as g",
}


@pytest.mark.parametrize("way", WAYS_TO_IMPORT)
def test_a_helper_counts_however_it_is_imported(way, tmp_path, monkeypatch):
    mine = tmp_path / "mine"
    mine.mkdir()
    of_package = "from .helper import f\n" if way in ("by the package", "of a module") else ""
    (mine / "__init__.py").write_text(of_package)
    (mine / "kernel.py").write_bytes(WAYS_TO_IMPORT[way].encode())
    (mine / "helper.py").write_text("f = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    sources._search.cache_clear()
    assert "mine.helper" in {source.module for source in closure(["mine.kernel"])}
    sources._search.cache_clear()


def test_folders_without_an_init_are_packages(tmp_path, monkeypatch):
    inner = tmp_path / "spaced" / "inner"
    inner.mkdir(parents=True)
    (tmp_path / "spaced" / "kernel.py").write_text("from spaced.inner.helper import f\n")
    (inner / "helper.py").write_text("from ..other import g\n")
    (tmp_path / "spaced" / "other.py").write_text("g = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = {source.module for source in closure(["spaced.kernel"])}
    assert found == {"spaced.kernel", "spaced.inner.helper", "spaced.other"}


def test_an_edit_while_a_process_runs_leaves_its_keys_to_itself(tmp_path, monkeypatch):
    """Whether Python has the old text or the new one, nothing says; other processes have the
    new."""
    file = tmp_path / "mine_alone.py"
    monkeypatch.syspath_prepend(tmp_path)

    def digest(text: str, began: float, process: str) -> str:
        if not file.exists() or file.read_text() != text:
            file.write_text(text)
        monkeypatch.setattr(sources, "_BEGAN", began)
        monkeypatch.setattr(sources, "_HERE", process)
        sources._digests.clear()
        return sources_digest(["mine_alone"])

    old, edited, last = "A = 1\n", "A = 2\n", "A = 2\nB = 3\n"
    long_ago, later = 0.0, time.time() + 3600
    assert digest(old, later, "a") == digest(old, later, "b")
    first = digest(edited, later, "a")
    assert digest(old, later, "a") != first
    assert digest(edited, long_ago, "a") == digest(edited, long_ago, "a") != first
    assert digest(edited, long_ago, "a") != digest(edited, long_ago, "b")
    assert digest(last, long_ago, "a") != digest(last, later, "a")
    assert digest(edited, later, "a") == first
    before = sources_digest(["mine_alone"])
    file.write_text(last)  # with nothing else forgotten
    assert sources_digest(["mine_alone"]) != before


def test_the_start_of_this_process_is_known():
    with (Path("/proc") / "uptime").open() as file:
        booted = time.time() - float(file.read().split()[0])
    assert booted < sources._BEGAN < time.time()
    assert time.time() - sources._BEGAN > time.process_time() / 64


def test_an_installed_package_that_is_upgraded_counts(tmp_path, monkeypatch):
    (tmp_path / "mine_too.py").write_text("from of_others import tile\n")
    site = tmp_path / "site-packages"
    record = site / "of_others-1.0.dist-info" / "RECORD"
    record.parent.mkdir(parents=True)
    (site / "of_others").mkdir()
    for folder in (tmp_path, site):
        monkeypatch.syspath_prepend(folder)
    digests = []
    for tile in (64, 64, 128):
        text = f"tile = {tile}\n".encode()
        (site / "of_others" / "__init__.py").write_bytes(text)
        digest = hashlib.sha256(text).hexdigest()
        record.write_text(f"of_others/__init__.py,sha256={digest},{len(text)}\n")
        monkeypatch.setattr(sources, "_BEGAN", time.time() + 3600)
        sources._recorded.cache_clear()
        sources._digests.clear()
        digests.append(sources_digest(["mine_too"]))
    assert digests[0] == digests[1] != digests[2]


def test_a_peer_that_is_installed_or_upgraded_compiles_no_kernel_anew(tmp_path, monkeypatch):
    """quack, which the GEMM's Problem compares with, is not traced."""
    kernel = stage("sm_90a", 1).kernel()
    modules = modules_of(kernel, kernel.config)
    assert "cutex.peers.quack" in {source.module for source in closure(modules)}
    site = tmp_path / "site-packages"
    (site / "quack").mkdir(parents=True)
    (site / "quack" / "__init__.py").write_text("tile = 64\n")
    record = site / "quack-1.0.dist-info" / "RECORD"
    record.parent.mkdir()
    record.write_text("quack/__init__.py,sha256=0,10\n")
    monkeypatch.syspath_prepend(site)
    sources._search.cache_clear()
    sources._is_installed.cache_clear()
    assert sources._is_installed("quack")
    assert not any(source.module.startswith("quack") for source in closure(modules))


def test_pythons_own_modules_are_not_read(python, root, tmp_path):
    (tmp_path / "acts.py").write_text("import profile, code, token, queue, json.decoder, os, sys\n")
    code = (
        "from cutex.compile.sources import closure; print(*[s.module for s in closure(['acts'])])"
    )
    assert python(code, root, tmp_path).split() == ["acts"]


def test_a_key_does_not_depend_on_where_the_files_are(python, root, tmp_path):
    copy = tmp_path / "copy"
    code = (
        "from cutex.compile.sources import sources_digest as d;"
        "print(d(['cutex.kernels.gemm.sm90.stage9']))"
    )
    shutil.copytree(root / "cutex", copy / "cutex")
    assert python(code, root) == python(code, copy)


def test_a_kernel_from_the_cache_names_the_files_at_hand(python, root, users, tmp_path):
    """Another copy of the same sources compiled it; column numbers, stacks and roles are read from
    the files here."""
    code = (
        KEY
        + """
from cutex.sim.ptx.parse import parse
files = {
    place.file
    for program in parse(c.ptx).values()
    for instruction in program.code
    if instruction.source
    for place in (instruction.source, *instruction.source.stack)
}
print(*sorted(files), sep="\\n")
"""
    )
    here, there = tmp_path / "a", tmp_path / "b c"
    for copy in (here, there):
        shutil.copytree(root / "cutex", copy / "cutex")
        shutil.copytree(users / "mine", copy / "mine")
        shutil.copy(users / "factors.py", copy)
    named = {}
    for copy in (here, there):
        first, *files = python(code, copy, CUTEX_CACHE=str(tmp_path / "cache")).splitlines()
        named[copy] = {Path(file).relative_to(copy) for file in files}  # ValueError if it is not
    assert first.endswith("True")
    assert named[here] == named[there] and len(named[here]) > 3


def test_what_has_no_file_is_never_taken_from_a_cache(monkeypatch):
    monkeypatch.setitem(sys.modules, "a_notebook", types.ModuleType("a_notebook"))
    assert sources_digest(["a_notebook"]) != sources_digest(["a_notebook"])
    module = stage("sm_90a", 0).module
    assert sources_digest([module]) == sources_digest([module])


def test_what_a_version_stands_for_is_not_read():
    held = torch.zeros(1), cutlass.BFloat16, {"a": pytest}
    found = {source.module.partition(".")[0] for source in closure(modules_of(held))}
    assert not found & {"torch", "cutlass", "numpy", "types", "builtins"}


def test_functions_and_what_they_close_over_are_part_of_a_config(users, monkeypatch):
    monkeypatch.syspath_prepend(users)
    rows = importlib.import_module("mine.rows")

    def activation(x, by=rows.height):
        return by(x)

    def closes(over):
        return lambda x: over(x)

    for config in (activation, closes(rows.height), (1, [{"f": rows.height}])):
        assert "mine.rows" in modules_of(config)
        assert "mine.rows" in {source.module for source in closure(modules_of(config))}


@pytest.mark.slow
def test_the_search_is_cheap(python, root):
    code = """
import time
from cutex.kernels.gemm import stage
from cutex.compile import compile, sources
kernel = stage("sm_90a", 9).kernel()
took = []
for _ in range(5):
    for cached in (sources._read_file, sources._search, sources._is_installed):
        cached.cache_clear()
    sources._digests.clear()
    start = time.process_time()
    sources.sources_digest([type(kernel).__module__])
    took.append(time.process_time() - start)
print(min(took))
"""
    assert float(python(code, root)) < 0.05
