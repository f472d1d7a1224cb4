"""A stage of a ladder, of any operator, and the functions that find one.

The package of an operator's kernels (cutex.problem.OPS) has its `LADDERS`; a stage that chooses its
config for each problem calls `choose`, a module there. Importing this loads neither torch nor the
DSL.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Generic,
    NamedTuple,
    Protocol,
    Self,
    TypeAlias,
    TypeVar,
)

from cutex.arch import RELATIVES, Arch, arch, instructions_of, kernels_of
from cutex.problem import operator
from cutex.problem.protocol import Problem

if TYPE_CHECKING:
    from cutex.compile import Kernel


class Config(Protocol):
    """A kernel's config, with its tiling: a frozen dataclass, all of it part of the compile key."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def why_not(self, problem: Any, arch: Arch) -> str | None:
        """The reason why this config cannot run `problem` (or, for None, any problem) on `arch`, or
        None."""


class Ways(NamedTuple):
    """The ways between which data choose for each step of a kernel, by the functions of its source
    that are a step's, or an event's: the ends of their names."""

    steps: Mapping[str, tuple[str, ...]]
    events: Mapping[str, tuple[str, ...]]  # rare ones in a step
    tried: str = ""  # the way of steps that may be in vain, and then are taken again in another
    held: tuple[str, ...] = ()  # what those of them do that are not


P_contra = TypeVar("P_contra", bound=Problem, contravariant=True)
C_co = TypeVar("C_co", bound=Config, covariant=True)


@dataclass(frozen=True)
class Stage(Generic[P_contra, C_co]):
    """A stage of a ladder: one idea more than the stage below.

    Each operator has a subclass, for its problem and its config.
    """

    op: ClassVar[str]
    by_arch: ClassVar[bool] = True  # whether the kernels of each arch are in a folder of their own

    number: int
    arch: str
    title: str
    idea: str
    default: C_co
    chooses: bool = False  # chooses a config per problem (`choose` beside LADDERS), or by timing

    @property
    def module(self) -> str:
        where = package(self.op, self.arch) if self.by_arch else operator(self.op).kernels
        return f"{where}.stage{self.number}"

    def config(self) -> C_co:
        return self.default

    def config_from_row(self, row: dict[str, Any]) -> C_co:
        """The config in a row of a ledger or a cache; TypeError or ValueError if it holds none."""
        return type(self.default)(**row)

    def kernel(self, config: Config | None = None) -> Kernel:
        """The kernel object, ready for cutex.compile.compile. Imports the DSL."""
        if why := self.why_no_kernel():
            raise ValueError(why)
        cls = getattr(import_module(self.module), self.class_name)
        return cls(config or self.default)

    @property
    def class_name(self) -> str:
        return f"Stage{self.number}"

    @property
    def ways(self) -> Ways | None:
        """Those between which data choose in this stage's kernel; None: they choose nothing, or it
        is not known."""
        return None

    def why_no_kernel(self) -> str | None:
        """The reason why `module` has no kernel, or None. It is read, and not imported, which needs
        the DSL."""
        if type(self).kernel is not Stage.kernel:
            return None  # it finds its class by itself
        place, _, name = self.module.rpartition(".")
        what = f"stage {self.number} of {self.arch} ({self.title})"
        try:
            spec = find_spec(self.module)
        except ModuleNotFoundError:
            spec = None
        if spec is None or spec.origin is None:
            return f"{what} is in the ladder, but {place.replace('.', '/')}/{name}.py is not there"
        try:
            tree = ast.parse(Path(spec.origin).read_bytes())
        except SyntaxError as error:
            return f"{what}: {spec.origin}:{error.lineno} is no Python: {error.msg}"
        if self.class_name in _defined(tree):
            return None
        there = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
        return (
            f"{what}: {spec.origin} has no class {self.class_name}, "
            f"but {' and '.join(there) or 'none at all'}"
        )

    def with_config(self, config: Any) -> Self:
        """The same stage with `config`, a C_co, as its default."""
        return replace(self, default=config)

    def fitted(self, problem: P_contra) -> Self:
        """The stage with the parts of its config that depend on `problem`, such as the head dim."""
        return self

    # ---- configs for each problem

    @property
    def chooser(self) -> str:
        """The module that ranks configs."""
        return f"{operator(self.op).kernels}.choose"

    def choose(self, problem: P_contra) -> C_co:
        """The config that the model ranks first."""
        return import_module(self.chooser).choose(problem, arch(self.arch))

    def shortlist(self, problem: P_contra, count: int) -> list[C_co]:
        """The `count` configs that are most worth timing."""
        return import_module(self.chooser).shortlist(problem, arch(self.arch), count)


AnyStage: TypeAlias = Stage[Any, Config]  # of any operator
S = TypeVar("S", bound=AnyStage)


@dataclass(frozen=True)
class Ladders(Generic[S]):
    """All stages of an operator, on every arch."""

    title: str  # the operator's
    rungs: tuple[S, ...]
    relatives: bool = False  # whether it also runs on archs that run another's kernels

    @property
    def archs(self) -> list[str]:
        """The archs that have a ladder of their own."""
        return _in_order(s.arch for s in self.rungs)

    @property
    def runs_on(self) -> list[str]:
        """The archs that can run the stages: `archs` and, with `relatives`, those that run the
        kernels of one of these."""
        also = [a for a in RELATIVES if kernels_of(a) in self.archs] if self.relatives else []
        return _in_order([*self.archs, *also])

    def stages(self, arch: str) -> list[S]:
        """The ladder of `arch`, from stage 0 up; ValueError if there is none."""
        own = kernels_of(arch) if self.relatives else arch
        ladder = sorted((s for s in self.rungs if s.arch == own), key=lambda s: s.number)
        if arch != own:
            ladder = [replace(s, arch=arch) for s in ladder]
        if not ladder:
            known = ", ".join(self.runs_on)
            raise ValueError(
                f"arch {arch!r} has no {self.title} ladder, there are ladders for {known}"
            )
        return ladder

    def stage(self, arch: str, number: int) -> S:
        """Stage `number` of `arch`; ValueError if there is none."""
        ladder = self.stages(arch)
        for s in ladder:
            if s.number == number:
                return s
        raise ValueError(
            f"stage {number} is not in the ladder of {arch}, which has {_numbers(ladder)}"
        )


def _defined(tree: ast.Module) -> set[str]:
    """The names that a module defines or imports at its top level."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign):
            names |= {x.id for target in node.targets for x in ast.walk(target)
                      if isinstance(x, ast.Name)}  # fmt: skip
    return names


def on_each(archs: Iterable[str], *rungs: S) -> tuple[S, ...]:
    """`rungs` on each of `archs`, for an operator whose kernels run on all of them."""
    return tuple(replace(rung, arch=name) for name in archs for rung in rungs)


def _numbers(ladder: list[S]) -> str:
    """The numbers of the stages of one arch, such as "0 to 9", or "0" of a ladder of one."""
    first, last = ladder[0].number, ladder[-1].number
    return f"{first} to {last}" if first < last else f"{first}"


def _in_order(archs: Iterable[str]) -> list[str]:
    return sorted(set(archs), key=lambda name: arch(name).capability)


def package(op: str, arch: str) -> str:
    """The package of an operator's kernels on `arch`, such as cutex.kernels.gemm.sm90."""
    return f"{operator(op).kernels}.{instructions_of(arch).rstrip('a').replace('_', '')}"


def ladders(op: str) -> Ladders[AnyStage]:
    """The ladders of an operator."""
    return import_module(operator(op).kernels).LADDERS


def stages(op: str, arch: str) -> list[AnyStage]:
    """The ladder of an operator on `arch`, from stage 0 up; ValueError if there is none."""
    return ladders(op).stages(arch)


def stage(op: str, arch: str, number: int) -> AnyStage:
    """One stage of an operator; ValueError if there is none."""
    return ladders(op).stage(arch, number)
