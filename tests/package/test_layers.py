"""The layers of the package, and the imports that each allows, read from its sources."""

from __future__ import annotations

import ast
import builtins
import functools
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from cutex import errors
from cutex.sim import SimError

# Each part imports only itself and parts of the lines above it. A part is a module or folder of
# cutex/; "doors" are the modules behind `python -m cutex.X`, and cutex itself, which loads lazily.
LAYERS = (
    ("assigned_names", "cores", "errors", "orders", "qualified_names", "svg", "whole_file"),
    (
        *("arch", "cache", "command", "cubin", "debug_info", "dtypes"),
        *("measured", "simulation", "tracing"),
    ),
    ("compile", "scaffold"),
    ("peers",),
    ("problem",),
    ("results",),
    ("device", "schedulers"),
    ("kernels",),
    ("sim",),
    ("analysis",),
    ("bench", "report"),
    ("ops", "cloud"),
    ("fit",),
    ("clock_errors",),
    ("doors",),
)
LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}
SIM_KNOWS = {
    *(
        "arch",
        "cache",
        "command",
        "cores",
        "cubin",
        "debug_info",
        "errors",
        "orders",
        "sim",
        "simulation",
        "svg",
        "tracing",
        "whole_file",
    )
}
# parts with files of one operator; the rest names none
OPERATORS = ("problem", "ops", "kernels", "peers", "fit", "clock_errors")


def sources(root: Path) -> dict[str, Path]:
    """Every module of the package."""
    package = root / "cutex"
    found = {}
    for folder in (package, *(p for p in package.iterdir() if p.is_symlink())):
        for file in folder.rglob("*.py"):
            parts = file.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def part(module: str) -> str:
    name = [*module.split("."), "doors"][1]
    return name if name in LEVEL else "doors"


def imports(tree: ast.Module, known: set[str], *, at_run_time: bool) -> Iterator[tuple[str, bool]]:
    """The modules of cutex that `tree` imports, and whether it does so when it is loaded."""
    for node, late, for_types in import_statements(tree):
        if at_run_time and for_types:
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            assert node.level == 0 and node.module, "imports are absolute"
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in known else node.module for name in whole]
        for name in names:
            if name.split(".")[0] == "cutex":
                yield name, not late


@functools.cache
def import_statements(
    tree: ast.Module,
) -> tuple[tuple[ast.Import | ast.ImportFrom, bool, bool], ...]:
    """The imports in `tree`, and of each whether it stands in a function and whether it is under
    TYPE_CHECKING."""
    found: list[tuple[ast.Import | ast.ImportFrom, bool, bool]] = []

    def walk(node: ast.AST, late: bool, for_types: bool) -> None:
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.append((node, late, for_types))
        late |= isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        only_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
                in_body = only_types and child in node.body  # type: ignore[attr-defined]
                walk(child, late, for_types or in_body)

    walk(tree, False, False)
    return tuple(found)


@pytest.fixture(scope="module")
def package(request) -> dict[str, Path]:
    return sources(Path(__file__).resolve().parents[2])


@pytest.fixture(scope="module")
def trees(package) -> dict[str, ast.Module]:
    return {module: ast.parse(file.read_text()) for module, file in package.items()}


def test_every_part_of_the_package_has_a_layer(package):
    doors = {m for m in package if part(m) == "doors"}
    assert {m.count(".") for m in doors} <= {0, 1}
    for module in doors - {"cutex"}:
        assert "python -m" in package[module].read_text().splitlines()[0]
        assert len(package[module].read_text().splitlines()) < 25
    assert {part(m) for m in package} == set(LEVEL)


@pytest.mark.parametrize("at_run_time", [True, False], ids=["at run time", "for types too"])
def test_imports_point_downwards(package, trees, at_run_time):
    upwards = [
        f"{module} imports {name}"
        for module, tree in trees.items()
        if module != "cutex"
        for name, _ in imports(tree, package.keys(), at_run_time=at_run_time)
        if LEVEL[part(name)] > LEVEL[part(module)]
        or (LEVEL[part(name)] == LEVEL[part(module)] and not related(module, name))
    ]
    assert upwards == []


def related(module: str, name: str) -> bool:
    """Whether two modules of one layer may import each other: device code takes work tiles, and
    schedulers are device code, too."""
    pair = {part(module), part(name)}
    return len(pair) == 1 or pair == {"device", "schedulers"}


def test_the_simulator_knows_no_kernel_and_no_bench(package, trees):
    known = {
        part(name)
        for module, tree in trees.items()
        if part(module) == "sim"
        for name, _ in imports(tree, package.keys(), at_run_time=False)
    }
    assert known <= SIM_KNOWS


def test_no_module_is_loaded_in_a_circle(package, trees):
    needs = {
        module: {name for name, at_once in imports(tree, package.keys(), at_run_time=True)
                 if at_once and name != module}
        for module, tree in trees.items()
    }  # fmt: skip
    left = dict(needs)
    while left:
        free = [module for module, names in left.items() if not names & left.keys()]
        assert free, f"circle among {sorted(left)}"
        for module in free:
            del left[module]


def circles(needs: dict[str, set[str]]) -> list[set[str]]:
    """The sets of modules that import each other, directly or not."""
    reached = {module: set(names) for module, names in needs.items()}
    for via in needs:
        for names in reached.values():
            if via in names:
                names |= reached[via]
    found = {
        frozenset(other for other in names if module in reached[other])
        for module, names in reached.items()
        if module in names
    }
    return sorted(map(set, found), key=sorted)


def test_there_is_no_circle_of_annotations_and_late_imports_either(package, trees):
    """So that each module can be read with only those before it known."""
    needs = {
        module: {
            name
            for name, _ in imports(tree, package.keys(), at_run_time=False)
            if name != module and name in package
        }
        for module, tree in trees.items()
    }
    found = [sorted(name.removeprefix("cutex.") for name in circle) for circle in circles(needs)]
    assert found == [], "a circle of imports: let one way go"


WATCHED, WATCHES = ("ptx", "isa", "machine", "scheduler"), ("hazards", "timing")


def test_what_the_simulator_runs_knows_nothing_of_who_watches(package, trees):
    """An instruction computes and tells events; checks and clocks subscribe."""
    known = [
        f"{module} imports {name}"
        for module, tree in trees.items()
        if module.startswith("cutex.sim.") and module.split(".")[2] in WATCHED
        for name, _ in imports(tree, package.keys(), at_run_time=False)
        if name.startswith("cutex.sim.") and name.split(".")[2] in WATCHES
    ]
    assert known == []


def words(file: Path) -> Iterator[str]:
    """Names and strings of a source file without comments and docstrings, and without the DSL's
    `cute.gemm`, which every operator uses."""
    text = file.read_text()
    documents = {
        node.body[0].value.lineno
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and ast.get_docstring(node, clean=False) is not None
    }
    before = ["", ""]
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        of_the_dsl, before = before == ["cute", "."], [before[1], token.string]
        if of_the_dsl:
            continue
        if token.type == tokenize.NAME or (
            token.type == tokenize.STRING and token.start[0] not in documents
        ):
            yield token.string


OF_ONE_OPERATOR = re.compile("gemm|attention|softmax|seqlen|head_dim|^mC$", re.IGNORECASE)
ROOMS = ("cutex.device.attention", "cutex.device.row")  # shared by the kernels of one operator
OTHERS = {'"FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"'}  # another library's variable


def test_shared_code_speaks_of_no_one_operator(root, package):
    spoken = {
        str(file.relative_to(root)): found
        for module, file in package.items()
        if part(module) not in (*OPERATORS, "doors") and not module.startswith(ROOMS)
        if (found := {w for w in words(file) if OF_ONE_OPERATOR.search(w)} - OTHERS)
    }
    assert spoken == {}


STAGE = re.compile(r"\.stage\d+$")


def test_no_production_kernel_imports_a_stage(package, trees):
    """A stage imports roles from production kernels or from earlier stages, never the reverse."""
    imported = [
        f"{module} imports {name}"
        for module, tree in trees.items()
        if part(module) == "kernels" and not STAGE.search(module)
        for name, _ in imports(tree, package.keys(), at_run_time=False)
        if STAGE.search(name)
    ]
    assert imported == []


# The public classes of one name in several modules outside of kernels/, where roles of several
# operators and archs have the field's names. They may only become fewer.
TWICE = (
    "Band Bar Barrier Box BoxLoads Call Calls Clock Cluster Columns Compiled Gpu Group Job "
    "Kind Launch Limit Lines Load Mask Mma Model Operator Parser Part Peer Plan Recorder Row "
    "Run Sampled Source Step Summary Wait Wgmma Work"
)


def test_two_public_classes_have_two_names(trees):
    where: dict[str, list[str]] = {}
    for module, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where.setdefault(node.name, []).append(module)
    twice = {
        name: modules
        for name, modules in where.items()
        if len([m for m in modules if part(m) != "kernels"]) > 1
    }
    listed = {*TWICE.split()}
    assert {name: twice[name] for name in twice.keys() - listed} == {}, "give it a name of its own"
    assert listed - twice.keys() == set(), "no longer: take it from TWICE"


def test_every_exception_of_its_own_has_one_root(trees):
    builtin = {name for name, x in vars(builtins).items() if isinstance(x, type)}
    roots = {
        f"{module}.{node.name}"
        for module, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for base in map(ast.unparse, node.bases)
        if base in builtin and issubclass(getattr(builtins, base), BaseException)
    }
    assert roots == {"cutex.errors.CutexError"}


def test_what_is_missing_on_this_machine_is_no_finding_about_a_kernel():
    for missing in (errors.NoCompiler, errors.NoDisassembler):
        assert issubclass(missing, errors.Missing) and not issubclass(missing, SimError)
    assert issubclass(SimError, errors.CutexError)


# The production kernels. Each is read from few files of kernels/ with traced code, beside what all
# kernels share (cutex/device, schedulers).
FEW = 6
PRODUCTION = (
    "gemm.sm80.general gemm.sm90.general gemm.sm100.general "
    "gemm.grouped.sm90.kernel gemm.grouped.sm100.kernel "
    "gemm.w4.sm90.kernel gemm.w4.sm90.decode gemm.w4.sm100.kernel "
    "gemm.scaled.fp8.sm90.kernel gemm.scaled.sm100.general "
    "gemm.unaligned.sm90.kernel gemm.unaligned.sm90.few "
    "attention.forward.sm90.forward attention.forward.sm100.forward "
    "attention.decode.sm90.decode attention.decode.sm100.decode "
    "attention.mla.sm90.mla attention.mla.sm100.mla "
    "attention.backward.sm90.backward attention.backward.sm100.backward"
)


def is_traced(tree: ast.AST) -> bool:
    """Whether a module has a function that the DSL compiles."""
    return any(
        ast.unparse(decorator).partition("(")[0] in ("cute.jit", "cute.kernel")
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        for decorator in node.decorator_list
    )


def files_read(top: str, package: dict[str, Path], trees: dict[str, ast.AST]) -> set[str]:
    """The modules of kernels/ with traced code that `top` imports, directly or not, and itself."""
    found, left = set(), {top}
    while left:
        module = left.pop()
        found.add(module)
        names = {name for name, _ in imports(trees[module], package.keys(), at_run_time=True)}
        left |= {x for x in names if x.startswith("cutex.kernels.") and x in trees} - found
    return {module for module in found if is_traced(trees[module])}


def test_a_production_kernel_is_read_from_few_files(package, trees):
    for name in PRODUCTION.split():
        read = files_read(f"cutex.kernels.{name}", package, trees)
        assert len(read) <= FEW, (name, sorted(read))


def test_what_operators_allocate_names_its_dtype():
    """Else it has that of torch.set_default_dtype, which models set to bfloat16."""
    makers = {"empty", "zeros", "ones", "full", "rand", "randn", "linspace", "empty_strided"}
    root = Path(__file__).resolve().parents[2]
    for file in sorted((root / "cutex/ops").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and ast.unparse(node.func)[:6] == "torch."):
                continue
            if ast.unparse(node.func)[6:] in makers:
                given = {keyword.arg for keyword in node.keywords}  # None: of a dictionary
                meta = "device='meta'" in ast.unparse(node)
                assert meta or given & {"dtype", None}, f"{file}:{node.lineno}"
