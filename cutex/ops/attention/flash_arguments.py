"""Arguments of flash-attn 2, 3 and 4 that cutex has no use for.

An argument passes with the value that changes nothing, and is refused in a sentence otherwise.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor


class Neutral(NamedTuple):
    """The values of an argument that change nothing, and why others are refused."""

    values: tuple[Any, ...]
    instead: str


_NONE = (None,)
_PAGES = Neutral(_NONE, "flash_attn_with_kvcache and flash_attn_varlen_func take pages")
_SCALE = Neutral(_NONE, "operands are bfloat16 or float16, which need no scale")
_SPARSE = Neutral(_NONE, "there is no block sparsity here; mask_mod hides keys")
_PROBABILITIES = Neutral(
    (False, None), "probabilities are never written; return_lse=True returns (out, lse)"
)
NEUTRAL = {
    "dropout_p": Neutral((0, None), "there is no dropout here"),
    "return_attn_probs": _PROBABILITIES,
    "return_softmax": _PROBABILITIES,
    "block_table": _PAGES,
    "page_table": _PAGES,
    "num_splits": Neutral((0, 1, None), "keys are not split"),
    "pack_gqa": Neutral((False, None), "heads are packed where it helps"),
    "sm_margin": Neutral((0, None), "the kernel takes all SMs"),
    "attention_chunk": Neutral((0, None), "there are no chunks here; mask_mod can be one"),
    "qv": Neutral(_NONE, "there is no second product with v"),
    "leftpad_k": Neutral(_NONE, "keys begin at the first row"),
    "scheduler_metadata": Neutral(_NONE, "tiles are handed out while the kernel runs"),
    "zero_tensors": Neutral((False, None), "rows of no sequence are left unwritten"),
    "q_descale": _SCALE,
    "k_descale": _SCALE,
    "v_descale": _SCALE,
    "aux_tensors": Neutral(_NONE, "what score_mod and mask_mod read is compiled in"),
    "block_sparse_tensors": _SPARSE,
    "full_block_cnt": _SPARSE,
    "full_block_idx": _SPARSE,
    "mask_block_cnt": _SPARSE,
    "mask_block_idx": _SPARSE,
}
OTHER_NAMES = {"return_softmax_lse": "return_lse", "s_aux": "learnable_sink"}
OURS = ("softmax_scale", "causal", "window_size", "softcap", "learnable_sink", "return_lse")
FLASH2 = ("dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes",
          "deterministic", "return_attn_probs", "block_table")  # fmt: skip


def taken(function: str, others: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `function` that `others`, which it does not name, stand for, beside those
    `given` by name. Raises TypeError or ValueError for one that would change the result, or that is
    given by both of its names."""
    found: dict[str, Any] = {}
    for name, value in others.items():
        if (ours := OTHER_NAMES.get(name)) is not None:
            if value is not None and value is not False:
                found[ours] = one_of(ours, given.get(ours), name, value)
        elif (known := NEUTRAL.get(name)) is None:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
        elif isinstance(value, Tensor) or value not in known.values:
            shown = "a tensor" if isinstance(value, Tensor) else repr(value)
            raise ValueError(f"{name} is {shown}: {known.instead}")
    return found


def one_of(name: str, value: Any, other_name: str, other: Any) -> Any:
    """The value of an argument that has two names. Raises ValueError if each has a value of its
    own."""
    if value is None or other is None or value is other:
        return other if value is None else value
    raise ValueError(f"{name} and {other_name} are the same argument: give one of them")


def in_flash2_order(given: tuple[Any, ...], by_name: dict[str, Any]) -> bool:
    """Whether `given`, the arguments after the operands, are in the order of flash-attn 2, which
    begins with dropout_p and softmax_scale, and not in ours, softmax_scale and causal."""
    first, second, third = (*given, *(_ABSENT,) * 3)[:3]
    a_dropout = isinstance(first, int | float) and not isinstance(first, bool) and first == 0
    no_causal = second is None or isinstance(second, float)
    taken = "softmax_scale" in by_name or ("causal" in by_name and len(given) > 1)
    return a_dropout or no_causal or taken or isinstance(third, bool)


_ABSENT = object()


def named(
    function: str, given: tuple[Any, ...], by_name: dict[str, Any], flash2: bool = False
) -> dict[str, Any]:
    """All arguments after the operands by name: `given` positionally, in our order or flash-attn
    2's (always in that with `flash2`), and `by_name`. Raises TypeError for too many, or for one
    given twice."""
    order = FLASH2 if flash2 or in_flash2_order(given, by_name) else OURS
    if len(given) > len(order):
        raise TypeError(f"{len(given)} arguments after the operands: at most {len(order)}")
    found = dict(zip(order, given, strict=False))
    for name in found.keys() & by_name.keys():
        raise TypeError(f"{function}() got multiple values for argument {name!r}")
    for name, kinds in (("causal", bool), ("window_size", (tuple, list, type(None)))):
        if not isinstance(found.get(name, False if kinds is bool else None), kinds):
            x = found[name]
            shown = type(x).__name__ if isinstance(x, Tensor) else f"{x!r:.40}"
            raise TypeError(
                f"{function}(): {name} is {shown}: arguments by place are "
                f"{', '.join(order)}; those of another order go by name"
            )
    # NOTE: None is flash-attn 2's default, too
    found = {name: x for name, x in found.items() if x is not None}
    return {**found, **by_name}


def is_default(x: Any) -> bool:
    """Whether an option of our functions was not given."""
    return x is None or x is False or x == (None, None) or (isinstance(x, float) and x == 0.0)
