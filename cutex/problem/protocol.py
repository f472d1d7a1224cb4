"""The interface of an operator, by which it is checked, timed, tuned and reported.

bench, results, report, analysis and cloud use an operator only through its subclass of Problem; its
stages are found by its entry in OPS (cutex/problem/stage.py).
"""

from __future__ import annotations

import argparse
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

from cutex.arch import mma_kind
from cutex.problem.work import Work

if TYPE_CHECKING:
    import torch
    from _typeshed import DataclassInstance

# a function of a problem's inputs and outputs, in order; it writes the outputs, or returns a tuple
Launch = Callable[..., object]
Sizes = Mapping[str, Any]  # fields of a problem: its sizes, and options beside dtype and data

BESIDE_SIZES = ("dtype", "init", "seed")  # fields that every problem has
CLASSES = 8  # ranges from one power of two to the next whose sizes share a tuned config


@dataclass(frozen=True)
class Check:
    """The outcome of a comparison with the reference."""

    ok: bool
    max_error: float  # the largest error; nan where an output holds a NaN
    tolerance: float  # the bound on max_error
    message: str  # one sentence; names the first bad coordinate if not ok


@dataclass(frozen=True)
class PeerKernel:
    """An implementation of the same operator by others, which `--compare` times beside ours."""

    title: str  # its name in tables
    # its launch for a problem, and its version; may raise ImportError, or ValueError for a problem
    # that it does not support
    load: Callable[[Any], tuple[Launch, str]]
    setup_seconds: float = 0.0  # on a rented GPU: its own compilation and tuning
    configured: Callable[[Mapping[str, Any]], Launch] | None = None  # a launch with its own tiles


class Computation(ABC):
    """Inputs, and the check of the outputs that were computed from them."""

    dtype: str  # of the inputs

    @property
    @abstractmethod
    def flops(self) -> int:
        """The FLOPs that a rate is counted in."""

    @property
    @abstractmethod
    def bytes(self) -> int:
        """The least traffic with global memory: inputs read once, outputs written once."""

    @property
    def needs(self) -> Work:
        """The least work by unit: MMAs of the inputs' dtype, and `bytes`; to override where other
        units compute, or several kinds of MMA."""
        return Work({mma_kind(self.dtype): self.flops}, bytes={"hbm": self.bytes})

    @abstractmethod
    def inputs(self, device: str | torch.device = "cpu", copy: int = 0) -> tuple[torch.Tensor, ...]:
        """The inputs, sampled on `device` from the seed; `copy` numbers independent samples."""

    @abstractmethod
    def outputs(self, device: str | torch.device = "cpu") -> tuple[torch.Tensor, ...]:
        """The outputs, every element NaN until a kernel writes it."""

    @abstractmethod
    def check(self, *tensors: torch.Tensor, tile: tuple[int, ...] | None = None) -> Check:
        """Compare the outputs among `tensors` (inputs, then outputs) with the reference.

        `tile`, the extents of a CTA's part of the output, lets a failure name its tile.
        """


class Problem(Computation):
    """A problem of an operator: sizes, data, reference and tolerance, the same for every caller.

    A subclass is a frozen dataclass of numbers and names: its sizes first, then dtype, init and
    seed. A ledger stores its fields. It raises ValueError, in one sentence, for values that are not
    valid.
    """

    op: ClassVar[str]  # its name in OPS, ledgers and `python -m cutex.<op>`
    title: ClassVar[str]
    about: ClassVar[str]  # the ladder's computation in a phrase, for --help
    dtypes: ClassVar[tuple[str, ...]]
    inits: ClassVar[tuple[str, ...]]
    size_options: ClassVar[tuple[str, ...]]  # options that `add_options` adds, such as --mnk
    # sizes by occasion: "cuda" and "sim" are a command's defaults, one each; "sweep" and "confirm"
    # are for these operations of modal_app.py
    cases: ClassVar[Mapping[str, Sequence[Sizes]]]
    peers: ClassVar[Mapping[str, PeerKernel]]  # by name; ratios in reports are to the first
    # those that --op confirm of modal_app.py times beside the ladder; none: the first
    confirm_peers: ClassVar[tuple[str, ...]] = ()
    # operators that an option of `python -m cutex.<op>` stands for instead, by option
    variants: ClassVar[Mapping[str, str]] = {}
    data_steers: ClassVar[bool] = False  # whether a kernel's work depends on its data
    wave_tile: ClassVar[tuple[int, ...]]  # an SM's tile of the output in a large kernel's wave

    dtype: str
    init: str
    seed: int

    def check_names(self) -> None:
        """Raises ValueError for a dtype or a family of data that is none of the operator's."""
        for name, known in (("dtype", self.dtypes), ("init", self.inits)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} {getattr(self, name)!r} is not one of {', '.join(known)}")

    # ---- parts of the work

    @abstractmethod
    def grid(self, tile: Sequence[int]) -> int:
        """The number of tiles of this extent that cover the output."""

    def steps(self, tile: Sequence[int], step_flops: int) -> int:
        """The number of steps of `step_flops` FLOPs that the mainloop takes over one tile; only for
        operators with one."""
        raise NotImplementedError

    # ---- other data and sizes

    def exact(self) -> Self:
        """This problem on data for which the check is exact: small integers."""
        return type(self)(**{**self.as_dict(), "init": "int"})

    @abstractmethod
    def reduced(self) -> Self:
        """The problem that the simulator runs instead: a few tiles, the same remainders, exact
        data."""

    # ---- a stage's kernel

    def launcher(self, kernel: Launch, arguments: Sequence[str]) -> Launch:
        """A function of the inputs and outputs that launches `kernel`, whose parameters are
        `arguments`."""
        return kernel

    @abstractmethod
    def tile(self, config: Any) -> tuple[int, ...]:
        """The extents of the part of the output that a CTA of `config` computes."""

    def work(self, config: Any) -> tuple[float, float]:
        """The MMA FLOPs of a launch of `config`, and those of one CTA for one output tile, counting
        whole tiles; 0 for the latter where tiles differ."""
        return float(self.flops), 0.0

    def tile_steps(self, config: Any) -> tuple[int, ...]:
        """The steps of the main loop of each tile, in the order in which a launch of `config` hands
        them out; empty if all tiles take the same number, give or take one."""
        return ()

    def recorded(self, config: Any) -> Any:
        """The config of the kernel that the clock runs, of whose tiles a launch of `config` takes
        `tile_steps`."""
        return config

    def with_steps(self, config: Any, steps: int, tiles: int = 1) -> Self:
        """A problem for the same kernel with at least `tiles` tiles, all of which take `steps`
        steps, or fewer if they must; only for operators that have `tile_steps`."""
        raise NotImplementedError

    def tuning_class(self) -> list[Any]:
        """The values that problems that share a tuned config have in common, beside the dtype."""
        return [size_class(s) if type(s) is int else s for s in self.sizes]

    # ---- names and options

    @classmethod
    def of(
        cls, sizes: Sizes, dtype: str | None = None, init: str = "normal", seed: int = 0
    ) -> Self:
        """A problem of these sizes; without a `dtype` in theirs, if they name one, or in the
        operator's first."""
        make: Callable[..., Self] = cls
        own = {name: size for name, size in sizes.items() if name != "dtype"}
        named = dtype or sizes.get("dtype") or cls.dtypes[0]
        return make(**own, dtype=named, init=init, seed=seed)

    def as_dict(self) -> dict[str, Any]:
        """All fields by name."""
        names = [f.name for f in fields(cast("DataclassInstance", self))]
        return {name: getattr(self, name) for name in names}

    @property
    def sizes(self) -> tuple[Any, ...]:
        """The values of all fields but dtype, init and seed."""
        return tuple(v for name, v in self.as_dict().items() if name not in BESIDE_SIZES)

    @property
    def size(self) -> str:
        """The sizes as one word."""
        return self.size_name(self.as_dict())

    @classmethod
    @abstractmethod
    def size_name(cls, sizes: Sizes) -> str:
        """One word for `sizes`, which may be those of an older ledger; KeyError for others."""

    @property
    @abstractmethod
    def series(self) -> Mapping[str, int]:
        """The lines of a sweep's chart that this problem is a point of, by title, with its x
        value."""

    @classmethod
    @abstractmethod
    def add_options(cls, group: argparse._ArgumentGroup) -> None:
        """Add the options in `size_options`; an option that is not given must be None."""

    @classmethod
    @abstractmethod
    def sizes_given(cls, args: argparse.Namespace) -> list[Sizes]:
        """The sizes that `args` give; empty if they give none. ValueError for invalid sizes."""


def size_class(size: int) -> int:
    """`size` rounded up to one of CLASSES sizes between powers of two, and to a multiple of 8."""
    step = max(8, (1 << (size.bit_length() - 1)) // CLASSES)
    return -(-size // step) * step
