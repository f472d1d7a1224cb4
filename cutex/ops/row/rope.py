"""`cutex.rope`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cutex.arch import kernels_of
from cutex.kernels.row import choose_rope
from cutex.ops.number import check_flag
from cutex.ops.overlap import overlaps_itself, share_memory
from cutex.ops.plain import check_strided
from cutex.ops.row.launches import Calls, Launch, Run
from cutex.ops.row.operators import define, needs_nothing
from cutex.ops.row.rows import VECTOR, arch_of, check, dtype_of, empty_rows, sms_of
from cutex.ops.written import check_writable, written

if TYPE_CHECKING:
    from cutex.kernels.row.rope import RopeConfig
    from cutex.kernels.row.rope_by_tickets import RopeTicketsConfig

_is_compiling = torch.compiler.is_dynamo_compiling
POSITIONS = (torch.int32, torch.int64)
PACKED = torch.contiguous_format
MOST = 2**31  # vectors of a launch


def rope(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    positions: Tensor | None = None,
    offset: int = 0,
    inplace: bool = False,
) -> Tensor:
    """Rotary position embedding, like flash_attn's apply_rotary_emb: each pair (a, b) of a head
    becomes (a cos - b sin, b cos + a sin).

    x: (B, T, H, D) or (T, H, D), bfloat16, float16 or float32, any strides except in the last
        dimension; computed in float32.
    cos, sin: (S, R), any of these dtypes, the same for both. The first 2 R of D elements are
        rotated, the others are copied.
    interleaved: pairs are neighbours (GPT-J); otherwise a is among the first R elements and b among
        the next R (NeoX, Llama).
    positions: (T,) or (B, T), int32 or int64, the row of cos and sin for each token, in [0, S); by
        default tokens count from `offset`.
    inplace: write to x, which then must not require a gradient.

    Returns y, like x. Differentiable once in x. Raises TypeError or ValueError, in one sentence
    that names the argument, for arguments that are not supported.

    Source: Su et al., RoFormer, 2021.
    """
    options = interleaved, offset, 1.0, inplace
    if not _is_compiling() and type(offset) is int and type(interleaved) is type(inplace) is bool:
        found = _turned.again(options, x, cos, sin, positions)
        if found is not None:
            return found
    _check(x, cos, sin, positions, offset)
    check_flag("interleaved", interleaved)
    check_flag("inplace", inplace)
    if not inplace:
        return ROPE(x, cos, sin, positions, bool(interleaved), offset, 1.0)
    if torch.is_grad_enabled() and x.requires_grad:
        raise ValueError("inplace=True: x wants a gradient, for which its values are kept")
    if overlaps_itself(x):
        raise ValueError(
            f"inplace=True: x of shape {tuple(x.shape)} has strides {x.stride()}, by which its "
            "elements overlap"
        )
    check_writable("x", x)
    _check_apart(x, cos, sin, positions)
    if needs_nothing(x, cos, sin, positions) and x.stride(-1) == 1:
        return _turned(options, x, cos, sin, positions)
    return x.copy_(ROPE(x, cos, sin, positions, bool(interleaved), offset, 1.0))


def _check(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, offset: int) -> None:
    check("x", x)
    if x.dim() not in (3, 4):
        raise ValueError(f"x must be (B, T, H, D) or (T, H, D), got {x.dim()} dimensions")
    for name, table in (("cos", cos), ("sin", sin)):
        check(name, table, x)
        if table.dim() != 2 or 2 * table.shape[1] > x.shape[-1]:
            raise ValueError(
                f"{name} must be (S, R) with R at most half of x's {x.shape[-1]} elements, got "
                f"shape {tuple(table.shape)}"
            )
        if table.requires_grad:
            raise ValueError(f"{name} wants a gradient, which rope does not have")
    if cos.shape != sin.shape or cos.dtype != sin.dtype:
        raise ValueError(
            f"cos is {cos.dtype} {tuple(cos.shape)}, but sin is {sin.dtype} {tuple(sin.shape)}: "
            "they must be alike"
        )
    if isinstance(offset, bool) or not isinstance(offset, int):
        raise TypeError(f"offset must be an int, got {type(offset).__name__}")
    tokens = x.shape[-3]
    if positions is None:
        if tokens and not 0 <= offset <= cos.shape[0] - tokens:
            raise ValueError(f"offset={offset}: cos has {cos.shape[0]} rows, x {tokens} tokens")
        return
    if not isinstance(positions, Tensor) or positions.dtype not in POSITIONS:
        got = positions.dtype if isinstance(positions, Tensor) else type(positions).__name__
        raise TypeError(f"positions must be a tensor of int32 or int64, got {got}")
    check_strided("positions", positions)
    shapes = [(tokens,), *([tuple(x.shape[:2])] if x.dim() == 4 else [])]
    if tuple(positions.shape) not in shapes or positions.device != x.device:
        raise ValueError(
            f"positions must have shape {' or '.join(map(str, shapes))} on {x.device}, got "
            f"{tuple(positions.shape)} on {positions.device}"
        )
    if offset:
        raise ValueError(f"offset={offset}: positions are given, which have it in them")


def _check_apart(x: Tensor, *read: Tensor | None) -> None:
    if any(y is not None and share_memory(x, y) for y in read):
        raise ValueError("inplace=True: x shares memory with cos, sin or positions")


def _heads(x: Tensor) -> Tensor:
    """x as (B, T, H, D), contiguous in D."""
    x = x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
    return x if x.dim() == 4 else x[None]


def _plan(
    options: tuple[bool, int, float, bool], x: Tensor, cos: Tensor, sin: Tensor,
    positions: Tensor | None,
) -> Run:  # fmt: skip
    from cutex.kernels.row.rope import Rope
    from cutex.kernels.row.rope_by_tickets import RopeByTickets

    _, offset, sign, in_place = options
    arch = arch_of(x.device, "cutex.rope")
    if not x.numel() or not cos.shape[1]:
        return (lambda x, *_: x) if in_place else (lambda x, *_: x.clone(memory_format=PACKED))
    launch = Launch(x.device)
    heads = [launch.passes("x", x, _heads)]
    tables = [launch.passes(n, t, Tensor.contiguous) for n, t in (("cos", cos), ("sin", sin))]
    if positions is not None:
        shape = heads[0].shape[:2]
        launch.passes("positions", positions, lambda p: p.expand(shape))
    if not in_place:
        heads.append(launch.makes("y", x.shape, x.dtype, 4))
    order = ("x", "cos", "sin") if in_place else ("x", "y", "cos", "sin")
    returns = () if in_place else ("y",)
    by = _by_tickets(options, heads, tables, arch) if positions is None else None
    if by is not None:
        several, tokens = by
        launch.keeps("drawn", 1)
        groups = min(x.numel() // several.elements, several.resident * sms_of(x.device, arch))
        scalars = offset, sign, tokens, max(1, groups)
        run = launch.run((RopeByTickets, several, arch), (*order, "drawn"), scalars, returns)
    else:
        config = _config(options, heads, tables, positions)
        most = MOST * config.width
        if x.numel() >= most:
            raise ValueError(f"x has {x.numel()} elements: at most {most} turn at once")
        given = ("positions",) if config.positions else ()
        run = launch.run((Rope, config, arch), (*order, *given), (offset, sign), returns)
    if not in_place:
        return run

    def turn(x: Tensor, *rest: Tensor) -> Tensor:
        _check_apart(x, *rest)
        check_writable("x", x)
        written(x)
        run(x, *rest)
        return x

    return turn


def _config(
    options: tuple[bool, int, float, bool], heads: list[Tensor], tables: list[Tensor],
    positions: Tensor | None,
) -> RopeConfig:  # fmt: skip
    """The config of a launch, with the widest vectors that lie in one half, and what their places
    are multiples of."""
    from cutex.kernels.row.rope import RopeConfig

    interleaved, _, _, in_place = options
    size, table_size = heads[0].element_size(), tables[0].element_size()
    turned = tables[0].shape[1]
    unit = 2 * turned if interleaved else turned
    width = min(VECTOR // size, unit & -unit)
    places = width * size
    for x in heads:
        places |= x.data_ptr()
        for n, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
            places |= stride * size if n > 1 else 0
    rows = turned * table_size | VECTOR | (width // (1 + interleaved)) * table_size
    for t in tables:
        rows |= t.data_ptr()
    return RopeConfig(
        interleaved, dtype_of(tables[0]), "" if positions is None else dtype_of(positions),
        in_place, width, places & -places, rows & -rows,
        choose_rope.heads_of_thread(heads[0].numel(), heads[0].shape[2], interleaved),
    )  # fmt: skip


def _by_tickets(
    options: tuple[bool, int, float, bool], heads: list[Tensor], tables: list[Tensor], arch: str
) -> tuple[RopeTicketsConfig, int] | None:
    """The config of a launch by bulk copies, and the tokens of a chunk; None for other kernels."""
    from cutex.kernels.row.rope_by_tickets import RopeTicketsConfig

    interleaved, _, _, in_place = options
    x, cos = heads[0], tables[0]
    if not all(t.is_contiguous() and t.data_ptr() % VECTOR == 0 for t in (*heads, *tables)):
        return None
    sizes = x.element_size(), cos.element_size()
    found = choose_rope.chunks(tuple(x.shape), cos.shape[1], *sizes, kernels_of(arch))
    if found is None:
        return None
    vectors = cos.shape[1] * sizes[0] // VECTOR * (1 + interleaved)
    room = found.elements, found.angles, in_place, choose_rope.CHUNK_THREADS, found.slots
    config = RopeTicketsConfig(interleaved, dtype_of(cos), vectors, *room, choose_rope.CHUNK_CTAS)
    return config, found.tokens


_turned = Calls(_plan)


def _run(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool, offset: int,
    sign: float,
) -> Tensor:  # fmt: skip
    return _turned((interleaved, offset, sign, False), x, cos, sin, positions)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, cos, sin, positions, *ctx.options = inputs
    ctx.save_for_backward(cos, sin, positions)


def _backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    cos, sin, positions = ctx.saved_tensors
    interleaved, offset, sign = ctx.options
    dx = ROPE(dy, cos, sin, positions, interleaved, offset, -sign)
    return (dx, *[None] * 6)


ROPE = define(
    "rope",
    "(Tensor x, Tensor cos, Tensor sin, Tensor? positions, bool interleaved, int offset, "
    "float sign) -> Tensor",
    _run,
    lambda x, *_: empty_rows(x),
    _setup,
    _backward,
)
