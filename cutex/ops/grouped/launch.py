"""The launches of grouped products: tensors as the kernels take them, and the kernel."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cutex.compile import ALIGN
from cutex.kernels.gemm.grouped import choose
from cutex.ops.device import (
    allocating,
    arch_of,
    current,
    launcher,
    on_device,
    other_sms,
    per_device,
)
from cutex.ops.matmul.arrange import aligned, name_of, normal, operand, result

if TYPE_CHECKING:
    from cutex.compile import Compiled
    from cutex.device.epilogue.epilogue_ops import EpilogueOp

FOLDERS = {"sm_90a": "sm90", "sm_100a": "sm100"}


# the config, arch and arguments of a call, of its options and the tensors passed
Call = Callable[[tuple[Any, ...], list[Tensor]], tuple[Any, str, list[Tensor]]]
MOST_KNOWN = 4096
BOTH = "both"  # of options: two kernels are launched, of which the device runs one
_known: dict[Hashable, Callable[..., None]] = per_device({})  # launches of calls like one before


def rows(
    x: Tensor,
    w: Tensor,
    edges: Tensor,
    out: Tensor,
    options: tuple[Any, ...],
    row_scale: Tensor | None = None,
    ragged: bool = False,
) -> None:
    """out[rows of e] = activation(x[rows of e] @ w[e] + bias[e]) * row_scale, with x (T, K), w (E,
    K, N), and out (T, N) in memory of `empty`; options: bias, activation, padded. ragged: as of
    choose.rows_tiles."""
    fused_with = [t for t in (options[0], row_scale) if t is not None]
    for kind, chosen, call in ways(x, w, options, row_scale is not None, ragged):
        again(kind, chosen, [x, w, with_padding(out), edges, *fused_with], call)


def ways(
    x: Tensor, w: Tensor, options: tuple[Any, ...], scaled: bool, ragged: bool
) -> tuple[tuple[str, tuple[Any, ...], Call], ...]:
    """The kernels that a call of `rows` launches, each as its kind, the options that identify it,
    and the function that gives its config; scaled: with row_scale. Of two the device runs one."""
    bias, activation, padded = options
    without, (count, k), n = (bias is None, not scaled), x.shape, w.shape[2]
    of_rows = activation, padded, *without, ragged
    differ = ragged or choose.surely_differ(count, w.shape[0])
    both = not differ and choose.both_pay(count, (k, n)) and not copied(x, w)
    if not (differ or both) or padded or not levels(x, count, w, activation, not all(without)):
        return (("rows", of_rows, rows_call),)
    of_level = activation, *without
    if not both:
        return (("level", of_level, level_call),)
    return ("level", (BOTH, *of_level), level_of_both), ("rows", (BOTH, *of_rows), rows_of_both)


def copied(x: Tensor, w: Tensor) -> bool:
    """Whether x (T, K) or w (E, K, N) is copied before a kernel reads it."""
    return not (aligned(x, -1) and (aligned(w, -2) or aligned(w, -1)))


def rows_of_both(options: tuple[Any, ...], passed: list[Tensor]) -> tuple[Any, str, list[Tensor]]:
    """`rows_call`, of groups that fill their tiles."""
    from cutex.kernels.gemm.grouped.trimmed_config import TrimmedConfig
    from cutex.schedulers.ragged import Only

    config, arch, tensors = rows_call(options[1:], passed)
    product, (x, w, *_) = config.product, tensors
    mean, matrix = x.shape[0] // w.shape[0], (w.shape[1], w.shape[2])
    by_k, fused = product.b.major == "column", bool(product.ops)
    full = choose.full_tiles(mean, matrix, fused, config.most_groups, by_k)
    tiles = full or product.tiles
    only = Only(tiles.tile_m * tiles.cluster_m, full=True)
    if full is None:
        return replace(config, only=only), arch, tensors
    product, most = replace(product, tiles=tiles), config.most_groups
    return TrimmedConfig(product, most, only=only), arch, tensors


def level_of_both(options: tuple[Any, ...], passed: list[Tensor]) -> tuple[Any, str, list[Tensor]]:
    """`level_call`, of groups that do not."""
    _, activation, *without = options
    config, arch, tensors = level_call((activation, *without), passed)
    of_rows, *_ = rows_of_both((BOTH, activation, False, *without, False), passed)
    return replace(config, only=replace(of_rows.only, full=False)), arch, tensors


def levels(
    x: Tensor, count: int, w: Tensor, activation: str | None, with_more: bool = False
) -> bool:
    """Whether `count` rows like those of x (T, K), in a router's groups, are multiplied by w (E, K,
    N) in tiles that are equally wide; with_more: the epilogue has a bias or scales rows."""
    if arch_for(x) != "sm_90a" or not x.shape[1] or w.stride(0) == 0:
        return False
    # NOTE: gates' columns are loaded apart from those that they gate
    apart = not with_more and aligned(w, -2) and w.shape[2] % 16 == 0
    if (activation or "").startswith("gated_") and not apart:
        return False
    return choose.levels_pay(count // w.shape[0])


def level_call(options: tuple[Any, ...], passed: list[Tensor]) -> tuple[Any, str, list[Tensor]]:
    """The config, arch and arguments of a call of `rows` in tiles that are equally wide."""
    from cutex.kernels.gemm.grouped.config import LevelConfig
    from cutex.kernels.gemm.signature import GeneralConfig, OperandLayout

    (activation, *without), (x, w, out, edges, *given) = options, passed
    x, a, _ = operand(x, -1, True)
    w, b, _ = operand(w, -2, False)
    ops, others = fused(*taken(given, without), activation=activation)
    most = choose.most_groups(edges.shape[0])
    tiles = choose.level_tiles((w.shape[1], w.shape[2]), bool(ops), most)
    product = GeneralConfig(tiles, a, b, OperandLayout(name_of(out)), ops)
    return LevelConfig(product, most), arch_for(x), [x, w, out, ends(edges), *others]


def rows_call(options: tuple[Any, ...], passed: list[Tensor]) -> tuple[Any, str, list[Tensor]]:
    """The config, arch and arguments of a call of `rows`."""
    from cutex.kernels.gemm.grouped.config import GroupedConfig
    from cutex.kernels.gemm.signature import GeneralConfig, OperandLayout

    (activation, padded, *without, ragged), (x, w, out, edges, *given) = options, passed
    arch = arch_for(x)
    if x.shape[1] == 0:  # nothing to add up: the epilogue of zeros
        x, w = x.new_zeros((x.shape[0], ALIGN)), w.new_zeros((w.shape[0], ALIGN, w.shape[2]))
    # NOTE: a group may begin at any row, and TMA at none of a side that is contiguous
    x, a, _ = operand(x, -1, True)
    w, b, _ = operand(w.contiguous() if w.stride(0) == 0 else w, -2, False)
    ops, others = fused(*taken(given, without), activation=activation)
    mean = -(-x.shape[0] // edges.shape[0])
    most = choose.most_groups(edges.shape[0])
    _, k, n = w.shape
    by_k = b.major == "column"
    groups = edges.shape[0]
    tiles = choose.rows_tiles(arch, mean, (k, n), bool(ops), most, groups, ragged, by_k, padded)
    product = GeneralConfig(tiles, a, b, OperandLayout(name_of(out)), ops)
    config = GroupedConfig(product, most, padded)
    return config, arch, [x, w, out, ends(edges), *others]


def gathered(
    x: Tensor,
    index: Tensor,
    w: Tensor,
    edges: Tensor,
    out: Tensor,
    options: tuple[Any, ...],
    row_scale: Tensor | None = None,
    ragged: bool = False,
) -> None:
    """`rows` with x[index] instead of x, index (R,) and out (R, N): gathered by the kernel where it
    can, otherwise beforehand."""
    bias, activation, padded = options
    if not gathers_in_load(x, index, w, activation, ragged):
        rows(x.index_select(0, index), w, edges, out, options, row_scale, ragged)
        return
    fused_with = [t for t in (bias, row_scale) if t is not None]
    kind = activation, padded, bias is None, row_scale is None
    again("gathered", kind, [x, w, with_padding(out), edges, index, *fused_with], gathered_call)


def gathers_in_load(
    x: Tensor, index: Tensor, w: Tensor, activation: str | None, ragged: bool
) -> bool:
    """Whether the rows x[index] are best gathered by the kernel that multiplies them by w (E, K,
    N)."""
    count = index.shape[0]
    if ragged and levels(x, count, w, activation):
        return False
    return gathers(x) and choose.gathering_pays(count // w.shape[0], w.shape[2])


def gathers(x: Tensor) -> bool:
    """Whether there is a kernel that gathers rows of x (T, K)."""
    return arch_for(x) == "sm_90a" and bool(x.shape[0]) and x.shape[1] % 64 == 0 and aligned(x, -1)


def gathered_call(options: tuple[Any, ...], passed: list[Tensor]) -> tuple[Any, str, list[Tensor]]:
    """The config, arch and arguments of a call of `gathered`."""
    from cutex.kernels.gemm.grouped.config import GatheredConfig
    from cutex.kernels.gemm.signature import GeneralConfig, OperandLayout

    (activation, padded, *without), (x, w, out, edges, index, *given) = options, passed
    w, b, _ = operand(w.contiguous() if w.stride(0) == 0 else w, -2, False)
    ops, others = fused(*taken(given, without), activation=activation)
    most, mean = choose.most_groups(edges.shape[0]), -(-index.shape[0] // edges.shape[0])
    tiles = choose.gathered_tiles(mean, (w.shape[1], w.shape[2]), bool(ops), most)
    layouts = OperandLayout(name_of(x)), b, OperandLayout(name_of(out))
    config = GatheredConfig(GeneralConfig(tiles, *layouts, ops), most, padded)
    given = [normal(x, -1), w, out, ends(edges), ends(index), *others]
    return config, arch_for(x), given


def scattered(
    x: Tensor,
    w: Tensor,
    edges: Tensor,
    out: Tensor,
    index: Tensor,
    options: tuple[Any, ...],
    row_scale: Tensor | None = None,
) -> None:
    """Row r of what `rows` computes stored to out[index[r]] or, with `add`, added to it; out (S, N)
    of any strides, index (R,). options: bias, activation, add."""
    bias, activation, add = options
    fused_with = [t for t in (bias, row_scale) if t is not None]
    kind = activation, add, bias is None, row_scale is None
    again("scattered", kind, [x, w, out, edges, index, *fused_with], scattered_call)


def scattered_call(options: tuple[Any, ...], passed: list[Tensor]) -> tuple[Any, str, list[Tensor]]:
    """The config, arch and arguments of a call of `scattered`."""
    from cutex.kernels.gemm.grouped.config import ScatteredConfig

    (activation, add, *without), (x, w, out, edges, index, *given) = options, passed
    of_rows, arch, tensors = rows_call(
        (activation, False, *without, False), [x, w, out, edges, *given]
    )
    out, layout, _ = result(out)
    if layout.major == "column":
        out, layout = passed[2], replace(layout, major="row", tma=False)
    layout = replace(layout, whole=layout.tma)
    product = replace(of_rows.product, out=layout)
    config = ScatteredConfig(product, of_rows.most_groups, add=add)
    x, w, _, edges, *others = tensors
    return config, arch, [x, w, out, edges, ends(index), *others]


def sums(x: Tensor, w: Tensor, edges: Tensor, out: Tensor, padded: bool) -> None:
    """out[e] = x[:, rows of e] @ w[rows of e], with x (M, T), w (T, N), and out (E, M, N) in memory
    of `empty`."""
    again("sums", (padded,), [x, w, with_padding(out), edges], sums_call)


def sums_call(options: tuple[Any, ...], passed: list[Tensor]) -> tuple[Any, str, list[Tensor]]:
    """The config, arch and arguments of a call of `sums`."""
    from cutex.kernels.gemm.grouped.config import SumsConfig
    from cutex.kernels.gemm.signature import GeneralConfig, OperandLayout

    (padded,), (x, w, out, edges) = options, passed
    arch = arch_for(x)
    given = x.mT
    # NOTE: a group may begin anywhere along T, which must not be the contiguous side
    (xt, a, _), (w, b, _) = operand(given, -1, True), operand(w, -1, True)
    mean = -(-x.shape[1] // edges.shape[0])
    most = choose.most_groups(edges.shape[0])
    layouts = OperandLayout(a.dtype, "column"), b, OperandLayout(name_of(out), batched=True)
    product = GeneralConfig(choose.sums_tiles(arch, mean, w.shape[1], most), *layouts)
    config = SumsConfig(product, most, padded)
    return config, arch, [x if xt is given else xt.mT, w, out, ends(edges)]


def ends(edges: Tensor) -> Tensor:
    """The ends of groups, or an index, as kernels take them.

    NOTE: torch calls a single entry contiguous whatever its stride is, which kernels do not.
    """
    return normal(edges.contiguous(), -1)


def zeros(out: Tensor, edges: Tensor, padded: bool) -> None:
    """Write zeros to the rows of out (T, N) that belong to no group."""
    from cutex.kernels.gemm.grouped.zeros import Zeros

    again(Zeros, (padded,), [out, edges], zeros_call)


def zeros_call(options: tuple[Any, ...], passed: list[Tensor]) -> tuple[Any, str, list[Tensor]]:
    """The config, arch and arguments of a call of `zeros`."""
    from cutex.kernels.gemm.grouped.zeros import ZerosConfig

    (padded,), (out, edges) = options, passed
    whole = out.stride(0) * out.element_size() % ALIGN == 0 and out.shape[1] % 8 == 0
    whole = whole and out.data_ptr() % ALIGN == 0
    return ZerosConfig(whole, padded), arch_for(out), [out, ends(edges)]


def taken(given: list[Tensor], without: list[bool]) -> list[Tensor | None]:
    """`given`, with None for each argument that a call is `without`."""
    rest = iter(given)
    return [None if absent else next(rest) for absent in without]


def fused(
    bias: Tensor | None, row_scale: Tensor | None = None, *, activation: str | None
) -> tuple[tuple[EpilogueOp, ...], list[Tensor]]:
    """The operations of the epilogue, and their arguments."""
    from cutex.device.epilogue.epilogue_ops import Activation, Bias, Gate, Scale

    ops: list[EpilogueOp] = []
    passed = []
    if bias is not None:
        bias = bias.contiguous()
        whole = bias.data_ptr() % ALIGN == 0 and bias.shape[1] * bias.element_size() % ALIGN == 0
        ops.append(Bias("column", name_of(bias), whole))
        passed.append(bias)
    if activation is not None and activation.startswith("gated_"):
        ops.append(Gate(activation.removeprefix("gated_")))
    elif activation is not None:
        ops.append(Activation(activation))
    if row_scale is not None:
        ops.append(Scale("row_scale", "row"))
        passed.append(row_scale)
    return tuple(ops), passed


def empty(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """A tensor whose memory TMA can store to: its rows are in whole units of 16 bytes."""
    unit = ALIGN // like.element_size()
    pitch = -(-shape[-1] // unit) * unit
    return like.new_empty((*shape[:-1], pitch))[..., : shape[-1]]


def with_padding(x: Tensor) -> Tensor:
    """x of `empty`, with the columns that fill up its rows."""
    unit = ALIGN // x.element_size()
    return x.as_strided((*x.shape[:-1], -(-x.shape[-1] // unit) * unit), x.stride())


def arch_for(x: Tensor, function: str = "cutex.grouped_mm") -> str:
    """The arch of a kernel for x; ValueError, in one sentence, if there is none."""
    name, argument = function.rpartition(".")[2], "x" if function == "cutex.grouped_mm" else "a"
    return arch_of(x.device, function, argument, f"torch.nn.functional.{name}")


@lru_cache(maxsize=4096)
def kernel_for(kind: Any, config: Any, dtype: str, arch: str) -> Compiled:
    """The kernel of a config; `kind` is its class, or "rows" or "sums" of this arch."""
    from cutex.compile import compile

    return compile(class_of(kind, config, arch)(config), dtype, arch)


def class_of(kind: Any, config: Any, arch: str) -> Any:
    """The class of a kernel's `kind`, or of the one that its config says."""
    if not isinstance(kind, str):
        return kind
    kind = getattr(config, "kind", kind)
    module = import_module(f"cutex.kernels.gemm.grouped.{FOLDERS[arch]}.{kind}")
    return getattr(module, f"Grouped{kind.capitalize()}")


def again(kind: Any, options: tuple[Any, ...], passed: list[Tensor], call: Call) -> None:
    """Launch a call on `passed`, at once if one like it was launched before; `call` gives its
    config, arch and arguments."""
    key = key_of(kind, options, passed)
    known = _known.get(key)
    if known is not None:
        known(*passed)
        return
    config, arch, tensors = call(options, passed)
    if sms := other_sms(arch):
        config = on_sms(config, sms)
    compiled = kernel_for(kind, config, name_of(tensors[0]), arch)
    device = tensors[0].device
    with torch.no_grad(), current(device):
        launch = launcher(compiled, tensors)
        launch(*tensors)
    if all(x is y for x, y in zip(tensors, passed, strict=True)):
        if len(_known) >= MOST_KNOWN:
            _known.clear()
        _known[key] = on_device(device, launch)


def on_sms(config: Any, num_sms: int) -> Any:
    """The config of a grouped kernel for a GPU with so many SMs; others have no persistent grid."""
    if (product := getattr(config, "product", None)) is None:
        return config
    return replace(config, product=replace(product, tiles=product.tiles.on(num_sms)))


def repeated(
    kinds: Sequence[tuple[Any, tuple[Any, ...]]], passed: list[Tensor], place: int
) -> Callable[..., Tensor] | None:
    """The launch of calls like one that `again` has launched on `passed`, of one kind and its
    options or of several, as a function of all arguments but the result (number `place`), which it
    returns; None if such calls pass tensors other than those given."""
    found = [_known.get(key_of(kind, options, passed)) for kind, options in kinds]
    known, out = [launch for launch in found if launch is not None], passed[place]
    if len(known) < len(found) or not out.is_contiguous():
        return None
    first, *rest = known

    def all_of(*given: Tensor) -> None:
        for launch in known:
            launch(*given)

    return allocating(all_of if rest else first, out, place)


def key_of(kind: Any, options: tuple[Any, ...], passed: list[Tensor]) -> Hashable:
    """What a launch is known by."""
    return kind, options, passed[0].device, *map(memory, passed)


def memory(x: Tensor) -> Hashable:
    """What a launch depends on of a tensor."""
    return x.shape, x.stride(), x.dtype, x.data_ptr() % ALIGN
