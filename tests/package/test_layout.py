from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

LINKS = ("kernels", "schedulers")


def sh(*args: str | Path, cwd: Path, **env: str) -> str:
    ran = subprocess.run(
        [str(a) for a in args],
        cwd=cwd,
        env={**{k: v for k, v in os.environ.items() if k != "PYTHONPATH"}, **env},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.fixture
def clone(root, tmp_path) -> Path:
    if not (root / ".git").exists():
        pytest.skip("not a git clone, so it cannot be cloned")
    sh("git", "clone", "-q", root, tmp_path / "clone", cwd=root)
    return tmp_path / "clone"


@pytest.fixture
def bare_python(tmp_path) -> Path:
    """The Python of a new, empty environment."""
    venv.create(tmp_path / "venv", with_pip=False)
    return tmp_path / "venv" / "bin" / "python"


def pip(*args: str | Path, into: Path, cwd: Path) -> None:
    """Install into another environment, with this one's pip and setuptools and no index."""
    sh(
        *(sys.executable, "-m", "pip", "--python", into, *args),
        *("-q", "--no-index", "--no-deps", "--no-build-isolation"),
        cwd=cwd,
        PYTHONPATH=sysconfig.get_path("purelib"),
    )


def check_ladder(python: Path, cwd: Path) -> None:
    """Assert that the package works in `cwd` under its own name, and leaves the name `kernels`
    free."""
    assert "sm_90a" in sh(python, "-m", "cutex.gemm", "--stage", "list", cwd=cwd)
    where = sh(python, "-c", "import cutex.kernels.gemm as m; print(m.__file__)", cwd=cwd).strip()
    assert Path(where).parts[-4:] == ("cutex", "kernels", "gemm", "__init__.py")


@pytest.mark.parametrize("name", LINKS)
def test_a_link_is_relative_and_its_folder_is_no_package(root, name):
    assert (root / "cutex" / name).readlink() == Path("..") / name
    assert (root / name).is_dir()
    assert not (root / name / "__init__.py").exists()


def test_nothing_imports_a_linked_folder_by_its_own_name(root):
    bad = re.compile(rf"^\s*(from|import) ({'|'.join(LINKS)})\b", re.MULTILINE)
    sources = [p for folder in ("cutex", "tests", *LINKS) for p in (root / folder).rglob("*.py")]
    assert len(sources) > 20
    assert [p for p in sources if bad.search(p.read_text())] == []


def test_no_module_is_a_drawer(root):
    drawers = {"utils", "helpers", "common", "misc", "tmp"}
    assert [p for p in (root / "cutex").rglob("*.py") if p.stem in drawers] == []


def test_it_works_in_a_bare_clone(clone, bare_python):
    check_ladder(bare_python, clone)


@pytest.mark.slow
def test_it_works_from_an_editable_install(clone, bare_python, tmp_path):
    pip("install", "-e", clone, into=bare_python, cwd=tmp_path)
    check_ladder(bare_python, tmp_path)
    (clone / "kernels" / "new.py").write_text("x = 1")
    sh(bare_python, "-c", "import cutex.kernels.new", cwd=tmp_path)


def test_it_works_from_a_wheel(clone, bare_python, tmp_path):
    sources = [
        path
        for path in sh("git", "ls-files", cwd=clone).split()
        if path.startswith(("cutex/", *(f"{name}/" for name in LINKS)))
        and path not in {f"cutex/{name}" for name in LINKS}
    ]
    sh(
        *(sys.executable, "-m", "pip", "wheel", "-q", "--no-index", "--no-deps"),
        *("--no-build-isolation", "-w", tmp_path, clone),
        cwd=tmp_path,
    )
    (wheel,) = tmp_path.glob("cutex_workbench-*.whl")
    packed = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    assert packed == {p if p.startswith("cutex/") else f"cutex/{p}" for p in sources}
    assert "cutex/py.typed" in packed
    assert any(name.endswith(".c") for name in packed)
    pip("install", "--no-compile", wheel, into=bare_python, cwd=tmp_path)
    check_ladder(bare_python, tmp_path)
    (installed,) = bare_python.parents[1].glob("lib/python*/site-packages")
    check_simulation(installed, tmp_path)


def check_simulation(installed: Path, cwd: Path) -> None:
    """Assert that a kernel compiles and runs in the simulator from the installed wheel, with its C
    sources; torch and the DSL are those of this Python."""
    out = sh(
        *(sys.executable, "-m", "cutex.gemm", "--arch", "sm_90a", "--stage", "0"),
        *("--device", "sim", "--mnk", "64,64,64", "--out", cwd / "results"),
        cwd=cwd,
        PYTHONPATH=str(installed),
        CUTEX_CACHE=str(cwd / "cache"),
    )
    assert "64x64x64" in out and "WRONG" not in out
    code = "import cutex.kernels.gemm as m; print(m.__file__)"
    where = sh(sys.executable, "-c", code, cwd=cwd, PYTHONPATH=str(installed)).strip()
    assert Path(where).is_relative_to(installed)
