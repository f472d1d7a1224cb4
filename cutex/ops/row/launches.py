"""Launches of row kernels: what a call decides once, and what each call like it repeats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from cutex.kernels.row.choose import TooLong
from cutex.ops.device import SEVERAL_GPUS, current, launcher, on_device
from cutex.ops.occupancy import PORTABLE, clusters_at_once
from cutex.ops.plain import empty_of, untraced, view
from cutex.ops.plans import PlanCache
from cutex.ops.row.rows import VECTOR, as_rows, dtype_of, sms_of
from cutex.ops.row.written import Written
from cutex.ops.workspace import flags_of, scratch_of

if TYPE_CHECKING:
    from cutex.compile import Compiled

WORD = 4  # bytes
SCRATCH = 1 << 14  # bytes of a result that nobody is given, which a stream's launches may share
Run = Callable[..., Any]  # launches on tensors, and returns the results


class MemoryLayout(NamedTuple):
    """How a tensor's memory, from its first element on, is passed or returned."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @staticmethod
    def of(x: Tensor) -> MemoryLayout:
        return MemoryLayout(tuple(x.shape), x.stride())


class Fresh(NamedTuple):
    """A contiguous tensor that each launch allocates, in the layout in which it is passed."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class Launch:
    """A launch while it is being decided: its operands by name, how each given one is passed, and
    what is allocated. `run` turns it into a function that does only that."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # None: as it is given
        self.passed: list[MemoryLayout | Callable[[Tensor], Tensor] | None] = []
        self.fresh: dict[str, Fresh] = {}
        self.layouts: dict[str, MemoryLayout] = {}  # in which fresh ones are returned
        # find zeroed words that launches leave zeroed
        self.kept: dict[str, Callable[[], Tensor]] = {}
        # of the first launch: the given ones, those allocated, those kept
        self.operands: dict[str, Tensor] = {}

    def rows(self, **given: Tensor | None) -> list[Tensor]:
        """Pass tensors as rows (M, N), and return these."""
        return [self.passes(name, x, as_rows) for name, x in given.items() if x is not None]

    def flat(self, **given: Tensor | None) -> list[Tensor]:
        """Pass tensors as contiguous ones of one dimension, and return these."""
        return [self.passes(name, x, _flat) for name, x in given.items() if x is not None]

    def makes(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, rank: int | None = None
    ) -> Tensor:
        """Allocate a tensor of this shape, passed with `rank` dimensions, by default all: the last
        ones, and all others as one. Returns that of the first launch."""
        first = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        last = shape[len(shape) + 1 - (rank or 1) :]
        passed = first if rank in (None, first.dim()) else first.view(-1, *last)
        self.fresh[name] = Fresh(tuple(passed.shape), passed.stride(), dtype)
        self.layouts[name] = MemoryLayout.of(first)
        self.operands[name] = passed
        return passed

    def keeps(self, name: str, words: int) -> None:
        """Pass at least so many zeroed words (int32) of the stream, which the launch leaves zeroed.
        Named last."""
        self.kept[name] = flags_of(self.device, 1 << (words - 1).bit_length())
        self.operands[name] = self.kept[name]()

    def run(
        self,
        kernel: tuple[Callable[[Any], Any], Any, str],
        order: Sequence[str],
        constants: Sequence[float | int] = (),
        returns: Sequence[str] = (),
        zeroed: Sequence[str] = (),
    ) -> Run:
        """The function of the given tensors that launches a `kernel` (kind, config and arch) on the
        operands in their `order`, then `constants`, and returns the tensors named, or the only one.
        Allocated tensors named `zeroed` are 0 before."""
        kind, config, arch = kernel
        compiled = kernel_for(kind, config, dtype_of(self.operands[order[0]]), arch)
        with current(self.device):
            arguments = [*(self.operands[name] for name in order), *constants]
            launch = on_device(self.device, launcher(compiled, arguments))
        at = {name: f"x{i}" for i, name in enumerate(self.operands)}
        given = [*at.values()][: len(self.passed)]
        written, empty = Written(), empty_of(self.device, SEVERAL_GPUS)
        for x, how in zip(given, self.passed, strict=True):
            if isinstance(how, MemoryLayout):
                written.add(f"{x} = {{}}({x}, {{}}, {{}})", view, *how)
            elif how is not None:
                written.add(f"{x} = {{}}({x})", how)
        for name, fresh in self.fresh.items():
            x, read = at[name], name in returns or name in zeroed
            if not read and name in order and self.operands[name].nbytes <= SCRATCH:
                written.add(f"{x} = {{}}()", scratch_of(self.device, x, *fresh, empty))
            elif read or name in order:
                written.add(f"{x} = {{}}({{}}, {{}}, {{}})", empty, *fresh)
        for name, find in self.kept.items():
            written.add(f"{at[name]} = {{}}()", find)
        for name in zeroed:
            written.add(f"{at[name]}.zero_()")
        written.add(f"{{}}({', '.join(at[name] for name in order)}, *{{}})", launch, constants)
        for name in returns:
            if (layout := self.layouts[name]) != self.fresh[name][:2]:
                written.add(f"{at[name]} = {{}}({at[name]}, {{}}, {{}})", view, *layout)
        return written.function(given, [at[name] for name in returns])

    def passes(self, name: str, x: Tensor, how: Callable[[Tensor], Tensor]) -> Tensor:
        """Pass a tensor as `how(tensor)`, which is returned."""
        given = how(x)
        made = self.operands[name] = _contiguous_of_one(given)
        lies, layout = MemoryLayout.of(x), MemoryLayout.of(made)
        if made.data_ptr() != x.data_ptr() or made.dtype != x.dtype:
            self.passed.append(lambda x: _contiguous_of_one(how(x)))
        else:
            self.passed.append(None if lies == layout else layout)
        return made


def _contiguous_of_one(x: Tensor) -> Tensor:
    """x with a stride of 1 in a last dimension of one element, where torch may leave any stride."""
    if x.dim() and x.shape[-1] == 1 and x.stride(-1) != 1:
        return x.as_strided(x.shape, (*x.stride()[:-1], 1))
    return x


def _flat(x: Tensor) -> Tensor:
    return x.contiguous().view(-1)


class Calls:
    """The calls of one operator: each finds its plan, by options and tensors, or has it made.

    `plan(options, *tensors)` makes the function that runs a call on the given tensors (some may be
    None).
    """

    def __init__(self, plan: Callable[..., Run]) -> None:
        self.plan, self.plans = plan, PlanCache()

    @untraced
    def again(self, options: tuple[Any, ...], *tensors: Tensor | None) -> Any:
        """The result of a call like an earlier one; None if there was none."""
        key, given = self._key(options, tensors)
        known = self.plans.find(key, *given)
        return None if known is None else known.launch(*given)

    @untraced
    def __call__(self, options: tuple[Any, ...], *tensors: Tensor | None) -> Any:
        """The result of a call whose tensors were checked."""
        found = self.again(options, *tensors)
        if found is not None:
            return found
        try:
            run = self.plan(options, *tensors)
        except TooLong:
            run = self._of_copies(options, *tensors)
        key, given = self._key(options, tensors)
        self.plans.remember(self.plans.key_of(key, *given), given, run)
        return run(*given)

    def _key(self, options: Any, tensors: tuple[Any, ...]) -> tuple[Any, Sequence[Tensor]]:
        """What a call's options and tensors are looked up by, and the tensors that there are."""
        for x in tensors:
            if x is None:
                there = [x for x in tensors if x is not None]
                return (options, *[x is None for x in tensors]), there
        return options, tensors

    def _of_copies(self, options: tuple[Any, ...], *tensors: Tensor | None) -> Run:
        """The plan for rows too long for anything but whole vectors that do not start on one, or
        not all alike: by dense copies."""
        copies = [None if x is None else _aligned(x) for x in tensors]
        try:
            run = self.plan(options, *copies)
        except TooLong as long:
            raise ValueError(str(long)) from None
        return lambda *given: run(*map(_aligned, given))


def _aligned(x: Tensor) -> Tensor:
    """x, or a copy of it, as contiguous memory that begins with a vector."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % VECTOR else x


def bulk_groups(kind: Callable[[Any], Any], config: Any, x: Tensor, arch: str) -> int:
    """The clusters or CTAs that process the rows of x (M, N) in rotation: as many as run at once;
    an even number if rows start in either half of a word, so that all rows of each are aligned
    alike, unless the kernel handles both."""
    tile = config.tile
    compiled = kernel_for(kind, config, dtype_of(x), arch)
    at_once = clusters_at_once(compiled, tile.num_threads, tile.ctas, x.device)
    if at_once is None:
        at_once = config.resident * (sms_of(x.device, arch) // tile.ctas)
    groups = min(-(-len(x) // tile.rows), at_once)
    halves = tile.rows * x.shape[1] * x.element_size() % WORD > 0
    if not halves or getattr(config, "halves", False):
        return groups
    return max(2, groups // 2 * 2)


def runs(kind: Callable[[Any], Any], config: Any, x: Tensor, arch: str) -> bool:
    """Whether x's GPU can run a kernel's clusters: not every GPU has a GPC with room for more than
    PORTABLE CTAs."""
    tile = getattr(config, "tile", config)
    ctas = getattr(config, "ctas", tile.ctas)
    if ctas <= PORTABLE:
        return True
    compiled = kernel_for(kind, config, dtype_of(x), arch)
    return clusters_at_once(compiled, tile.num_threads, ctas, x.device) != 0


@lru_cache(maxsize=4096)
def kernel_for(kind: Callable[[Any], Any], config: Any, dtype: str, arch: str) -> Compiled:
    from cutex.compile import compile

    # NOTE: a function of the user's may be such that only this process can tell it from others
    return compile(kind(config), dtype, arch, cache=getattr(config, "cacheable", True))
