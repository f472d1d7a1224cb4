"""The arguments of one flash_attn call, and the checks that they must pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from cutex.compile.user_function import arguments_taken
from cutex.kernels.attention.spec import HEAD_DIMS
from cutex.ops.plain import is_plain

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
SINK_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGEST_HEAD_DIM = 256
SCORE_MOD = ("score", "batch", "head", "query", "key")  # its parameters; mask_mod lacks score
NUMBERS: Any = (Real, torch.SymFloat)  # such as a float of Python or of numpy
INTEGERS: Any = (Integral, torch.SymInt)
MAX_LENGTH = 2**30 - 1  # rows of a sequence

Window = tuple[int | None, int | None]


def pair_of(window_size: Any) -> Any:
    """window_size as a tuple, as which calls are known by it, if it is a list, or a tensor of two
    numbers, as FlashAttention's own tests have it."""
    if isinstance(window_size, Tensor):
        window_size = window_size.tolist()
    return tuple(window_size) if isinstance(window_size, list) else window_size


def sides_of(window_size: Window) -> Window:
    """A window_size with None for each open side. A negative number is a bound across the diagonal,
    as in FlashAttention-4: (None, -3) ends three keys before the query's own.

    NOTE: -1 is also FlashAttention-2's open side, which has no None: it is open beside any other
    number. Two negative numbers would leave no key between them; all FlashAttentions read them as
    open.
    """
    left, right = (None if x is None else int(x) for x in window_size)
    if left is None or right is None:
        return left, right
    if left < 0 and right < 0:
        return None, None
    return None if left == -1 else left, None if right == -1 else right


@dataclass(frozen=True)
class AttentionCall:
    """The arguments of flash_attn_func, or of flash_attn_varlen_func, which has more."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None
    softmax_scale: float | None = None
    causal: bool = False
    window_size: Window = (None, None)
    softcap: float = 0.0
    learnable_sink: Tensor | None = None
    score_mod: Callable[..., Any] | None = None
    mask_mod: Callable[..., Any] | None = None
    deterministic: bool = False  # gradients have the same bits in every run
    alibi_slopes: Tensor | None = None  # (batch, heads)

    @property
    def lengths(self) -> dict[str, Tensor]:
        """The int32 tensors that are given, by name."""
        names = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
        return {name: x for name in names if (x := getattr(self, name)) is not None}

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors that are given."""
        vectors = (x for x in (self.learnable_sink, self.alibi_slopes) if x is not None)
        return (self.q, self.k, self.v, *self.lengths.values(), *vectors)

    @property
    def batch(self) -> int:
        if self.cu_seqlens_q is not None:
            return self.cu_seqlens_q.shape[0] - 1
        return self.q.shape[0]

    @property
    def heads(self) -> tuple[int, int]:
        """The numbers of heads of q, and of k and v."""
        return self.q.shape[-2], self.k.shape[-2]

    @property
    def head_dims(self) -> tuple[int, int]:
        """The head dims of q and k, and of v."""
        return self.q.shape[-1], self.v.shape[-1]

    @property
    def out_shape(self) -> tuple[int, ...]:
        return (*self.q.shape[:-1], self.v.shape[-1])

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """The shape of LSE: (batch, heads, seqlen_q) or, for packed sequences, (heads, total_q)."""
        *batch, rows, heads, _ = self.q.shape
        return (*batch, heads, rows)

    @property
    def scale(self) -> float:
        if self.softmax_scale is None:
            return float(self.q.shape[-1] ** -0.5)
        return float(self.softmax_scale)

    @property
    def sides(self) -> Window:
        """window_size with None for each open side."""
        return sides_of(self.window_size)

    @property
    def window(self) -> Window:
        """The window without bounds that have no effect at these lengths; its right side is 0 if
        causal."""
        left, right = self.sides
        right = 0 if self.causal else right
        longest_q, longest_k = (x.shape[-3] for x in (self.q, self.k))
        # the first query of a sequence sees keys up to seqlen_k - seqlen_q + right, ...
        if right is not None and right >= longest_q - 1:
            right = None
        # ... the last one from seqlen_k - 1 - left on
        if left is not None and left >= longest_k - 1:
            left = None
        if left is not None and right is not None and left + right < 0:
            left, right = None, -longest_k  # no key is between them
        # NOTE: in the kernel's 32 bits; what hides all keys hides them at its least, too
        return (
            None if left is None else max(left, -longest_q),
            None if right is None else max(right, -longest_k),
        )


def kernel_dims(head_dim: int, head_dim_v: int) -> tuple[int, int] | None:
    """The head dims of the kernel that computes these: TMA reads its extra columns as 0 and does
    not store them. None if there is no such kernel."""
    if head_dim % 8 or head_dim_v % 8 or not (head_dim and head_dim_v):
        return None  # TMA steps by 16 bytes
    able = [x for x in HEAD_DIMS if x[0] >= head_dim and x[1] >= head_dim_v]
    return min(able, key=sum, default=None)


def check(call: AttentionCall) -> None:
    """Raise TypeError or ValueError, in one sentence that names the argument, for an unsupported
    call."""
    for name in ("q", "k", "v", *call.lengths, "learnable_sink", "alibi_slopes"):
        x = getattr(call, name)
        if x is None and name in ("learnable_sink", "alibi_slopes"):
            continue
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if x.device != call.q.device:
            raise ValueError(f"{name} is on {x.device}, but q is on {call.q.device}")
        if x.layout is not torch.strided or x.is_nested:
            layout = "a nested tensor" if x.is_nested else x.layout
            raise ValueError(f"{name} must be a strided tensor, got {layout}")
        if name in call.lengths and x.dim() != 1:
            raise ValueError(f"{name} must be a vector, got the shape {tuple(x.shape)}")
    _check_operands(call)
    _check_lengths(call)
    _check_numbers(call)
    sink = call.learnable_sink
    if sink is not None:
        if sink.dtype not in SINK_DTYPES:
            raise TypeError(
                f"learnable_sink has dtype {sink.dtype}, which is not float32, bfloat16 or float16"
            )
        if tuple(sink.shape) != (call.heads[0],):
            raise ValueError(
                f"learnable_sink has shape {tuple(sink.shape)}, it must be one number for each of "
                f"the {call.heads[0]} heads of q"
            )
    _check_slopes(call)
    for name, takes in (("score_mod", SCORE_MOD), ("mask_mod", SCORE_MOD[1:])):
        function = getattr(call, name)
        if function is None:
            continue
        if not callable(function):
            raise TypeError(f"{name} must be a function or None, got {type(function).__name__}")
        if arguments_taken(function, (len(takes),)) is None:
            raise TypeError(f"{name} {function!r}: must be a Python function of {', '.join(takes)}")


def _check_slopes(call: AttentionCall) -> None:
    slopes = call.alibi_slopes
    if slopes is None:
        return
    if slopes.dtype != torch.float32:
        raise TypeError(f"alibi_slopes has dtype {slopes.dtype}, which is not float32")
    expected = call.batch, call.heads[0]
    if tuple(slopes.shape) != expected:
        raise ValueError(
            f"alibi_slopes has shape {tuple(slopes.shape)}, it must be (heads,) or (batch, heads), "
            f"here {expected[1:]} or {expected}"
        )
    if slopes.requires_grad:
        raise ValueError("alibi_slopes requires a gradient, which nothing computes: detach it")


def _check_operands(call: AttentionCall) -> None:
    q, k, v = call.q, call.k, call.v
    packed = {"q": call.cu_seqlens_q is not None}
    packed["k"] = packed["v"] = call.cu_seqlens_k is not None
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} has dtype {x.dtype}, which is not bfloat16 or float16")
        if x.dtype != q.dtype:
            raise TypeError(f"{name} has dtype {x.dtype}, but q has {q.dtype}")
        rank, modes = (3, "total") if packed[name] else (4, "batch, seqlen")
        if x.dim() != rank:
            side = "q" if name == "q" else "k"
            given = "with" if packed[name] else "without"
            raise ValueError(
                f"{name} has {x.dim()} dimensions, {given} cu_seqlens_{side} it has {rank}: "
                f"({modes}, heads, head dim)"
            )
    if kernel_dims(*call.head_dims) is None:
        raise ValueError(
            f"q and v have head dims {call.head_dims[0]} and {call.head_dims[1]}, each must be a "
            f"multiple of 8 up to {LARGEST_HEAD_DIM}"
        )
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"k has head dim {k.shape[-1]}, but q has {q.shape[-1]}")
    if v.shape[:-1] != k.shape[:-1]:
        raise ValueError(
            f"v has shape {tuple(v.shape)}, but k has {tuple(k.shape)}: all but the last must agree"
        )
    heads_q, heads_kv = call.heads
    if heads_kv == 0 or heads_q == 0 or heads_q % heads_kv:
        raise ValueError(f"q has {heads_q} heads, which is no multiple of the {heads_kv} of k")
    if not packed["k"] and k.shape[0] != call.batch:
        raise ValueError(f"k has batch size {k.shape[0]}, but q has {call.batch}")
    for name, x in (("q", q), ("k", k)):
        if x.shape[-3] > MAX_LENGTH:
            raise ValueError(f"{name} has {x.shape[-3]} rows, more than {MAX_LENGTH}")


def _check_lengths(call: AttentionCall) -> None:
    for name, x in call.lengths.items():
        if x.dtype != torch.int32:
            raise TypeError(f"{name} has dtype {x.dtype}, which is not int32")
        fewest = int(name.startswith("cu"))
        expected = call.batch + fewest
        if x.dim() != 1 or x.shape[0] != expected or expected < fewest:
            due = max(expected, fewest)
            raise ValueError(f"{name} has shape {tuple(x.shape)}, it must be ({due},)")
    for name in ("max_seqlen_q", "max_seqlen_k"):
        most = getattr(call, name)
        if most is None:
            continue
        if isinstance(most, bool) or not isinstance(most, INTEGERS):
            raise TypeError(f"{name} must be an int or None, got {type(most).__name__}")
        if most < 0:
            raise ValueError(f"{name}={most}: must be at least 0")
    if call.q.device.type == "cpu" and all(map(is_plain, call.tensors)):
        _check_values(call)


def _check_values(call: AttentionCall) -> None:
    """Check the values of the lengths, on the CPU only: on a GPU that would have to wait for it."""
    for side, x in (("q", call.q), ("k", call.k)):
        longest = x.shape[-3]
        cu, used = (getattr(call, f"{kind}_{side}") for kind in ("cu_seqlens", "seqused"))
        lengths = torch.full((call.batch,), longest, dtype=torch.int64)
        if cu is not None:
            lengths = cu.diff()
            if cu[0] != 0 or (lengths < 0).any() or cu[-1] > longest:
                raise ValueError(
                    f"cu_seqlens_{side} must rise from 0 to at most the {longest} rows, got "
                    f"{cu.tolist()}"
                )
            most = getattr(call, f"max_seqlen_{side}")
            if most is not None and lengths.numel() and int(lengths.max()) > most:
                raise ValueError(
                    f"max_seqlen_{side}={most}: there is a sequence of {int(lengths.max())} rows"
                )
        if used is not None and ((used < 0) | (used > lengths)).any():
            raise ValueError(
                f"seqused_{side} must be from 0 to a sequence's rows, {lengths.tolist()}, got "
                f"{used.tolist()}"
            )


def _check_numbers(call: AttentionCall) -> None:
    window = call.window_size
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise TypeError(f"window_size must be a pair (left, right), got {window!r}")
    for bound in window:
        if bound is None:
            continue
        if isinstance(bound, bool) or not isinstance(bound, INTEGERS):
            raise TypeError(f"window_size={tuple(window)}: a side is a whole number or None")
    if not isinstance(call.causal, (int, torch.SymBool)) or call.causal not in (0, 1):
        raise TypeError(f"causal must be True or False, got {call.causal!r}")
    for name in ("softcap", "softmax_scale"):
        x = getattr(call, name)
        if x is None and name == "softmax_scale":
            continue
        if isinstance(x, bool) or not isinstance(x, NUMBERS):
            raise TypeError(f"{name} must be a number, got {type(x).__name__}")
        if not isinstance(x, torch.SymFloat) and not -3e38 < x < 3e38:
            raise ValueError(f"{name}={x}: must be finite")
    if not isinstance(call.deterministic, (bool, torch.SymBool)):
        raise TypeError(f"deterministic must be True or False, got {call.deterministic!r}")
    if call.softmax_scale is not None and not call.softmax_scale > 0:
        raise ValueError(f"softmax_scale={call.softmax_scale}: must be positive")
    if call.softcap < 0:
        raise ValueError(f"softcap={call.softcap}: must be positive, or 0 for none")
