"""The masks of transformers' models, kept as functions as long as our kernel can express them.

transformers describes a mask as a function of positions (transformers.masking_utils), and lets an
attention implementation turn it into whatever it needs. `mask_of` makes a `Mask`: it looks like the
float mask that eager attention adds, and becomes it as soon as anything computes with it. Our
attention asks it for a `Layout` instead: a band of keys, and the rows that are not padding. Unknown
functions have no Layout, and run on torch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from transformers import masking_utils

FEW = 16  # queries that are taken as those of a decoder, of which a call splits the keys
FAR = 2**20  # a position that no edge of a mask is near to
# the attribute of a plain mask of one token and a static cache: where the keys that it sees begin
# (None: in row 0) and end, (batch,) int32 each; None if they do not follow one another. It is there
# for a compiled model, too, which takes no `Mask`
RUN = "cutex_run"


class Band(NamedTuple):
    """Which keys a query sees: lo <= position of the key - its own <= hi; None is unbounded."""

    lo: int | None = None
    hi: int | None = None

    def __and__(self, other: Band) -> Band:
        lows = [x for x in (self.lo, other.lo) if x is not None]
        highs = [x for x in (self.hi, other.hi) if x is not None]
        return Band(max(lows, default=None), min(highs, default=None))


class Pattern(NamedTuple):
    """A band, and the numbers of the packed sequences (batch, rows) that do not see each other."""

    band: Band
    sequences: Tensor | None = None


class Layout(NamedTuple):
    """A mask as flash_attn_func and flash_attn_varlen_func take it.

    The tensors are None where every row counts. Otherwise q and k are the rows that `rows_q` and
    `rows_k` keep, and `cu_seqlens_*` say where the sequences begin.
    """

    window: tuple[int | None, int | None]  # aligned bottom right; (.., 0) is causal
    keys: int  # the first that can be seen: a static cache has more
    rows_q: Tensor | None = None  # (batch, queries) bool
    rows_k: Tensor | None = None  # (batch, keys) bool
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    longest: tuple[int, int] | None = None
    # where the keys of each entry begin and end, (batch,) int32, if they follow one another and no
    # query is padding, of at most FEW
    run: tuple[Tensor, Tensor] | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The arguments causal and window_size."""
        left, right = self.window
        return {"causal": right == 0, "window_size": (left, right or None)}


# ---- mask functions


def _made_by(name: str, *arguments: Any) -> CodeType | None:
    """The code of the functions that the maker `name` of masking_utils returns."""
    maker = getattr(masking_utils, name, None)
    return None if maker is None else maker(*arguments).__code__


_NONE = torch.zeros(1, 1, dtype=torch.int64)
_AND = _made_by("and_masks")
_PACKED = _made_by("packed_sequence_mask_function", _NONE)
_REMAPPED = _made_by(
    "remap_positions_for_packed_sequence", masking_utils.causal_mask_function, _NONE
)
_CHUNKED = _made_by("chunked_overlay", 1, _NONE[0])
_BANDS: dict[CodeType | None, Callable[..., Band]] = {  # by what the functions close over
    masking_utils.causal_mask_function.__code__: lambda: Band(None, 0),
    masking_utils.bidirectional_mask_function.__code__: lambda: Band(),
    _made_by("sliding_window_overlay", 1): lambda sliding_window: Band(1 - sliding_window, None),
    _made_by("sliding_window_bidirectional_overlay", 1): (
        lambda sliding_window: Band(-sliding_window, sliding_window)
    ),
}


def pattern_of(function: Callable[..., Any], positions: int) -> Pattern | None:
    """What `function` (a mask function of transformers) shows of the keys at positions below
    `positions`; None if we cannot express it."""
    code, held = _held(function)
    if code is _AND:
        return _of_all(held["mask_functions"], positions)
    if code is _CHUNKED:
        # NOTE: rows before the first chunk are padding, which the caller leaves out
        return Pattern(Band()) if positions <= held["chunk_size"] else None
    if code is None or code not in _BANDS or not all(isinstance(x, int) for x in held.values()):
        return None
    band = _BANDS[code](**held)
    key = code, *held.values()
    if key not in _checked:
        _checked[key] = _is_band(function, band)
    return Pattern(band) if _checked[key] else None


def _of_all(functions: tuple[Callable[..., Any], ...], positions: int) -> Pattern | None:
    """The pattern of what all `functions` show."""
    band, sequences, places = Band(), None, None
    for function in functions:
        code, held = _held(function)
        if code is _PACKED and sequences is None:
            sequences = held["packed_sequence_mask"]
            continue
        if code is _REMAPPED and places is None:
            function, places = held["mask_function"], held["position_ids"]
        found = pattern_of(function, positions)
        if found is None or found.sequences is not None:
            return None
        band &= found.band
    if sequences is None and places is None:
        return Pattern(band)
    if sequences is None or places is None or places.shape != sequences.shape:
        return None
    # within a sequence places must be consecutive, so that a band of them is one of rows
    consecutive = (places.diff() == 1) | (sequences.diff() != 0)
    return Pattern(band, sequences) if consecutive.all() else None


def _held(function: Callable[..., Any]) -> tuple[CodeType | None, dict[str, Any]]:
    """The code of `function`, and what it closes over."""
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None) or ()
    names = () if code is None else code.co_freevars
    return code, {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}


_checked: dict[tuple[Any, ...], bool] = {}  # by code and numbers


def _is_band(function: Callable[..., Any], band: Band) -> bool:
    """Whether `function` shows just `band`, by its values around the edges: transformers may change
    what a function of this name means."""
    edges = [x + step for x in (*band, 0) if x is not None for step in (-1, 0, 1)]
    offsets = torch.tensor([*edges, -FAR // 2, FAR // 2])
    lo, hi = (-FAR if band.lo is None else band.lo), (FAR if band.hi is None else band.hi)
    zero, query = torch.tensor(0), torch.tensor(FAR)
    shown = torch.stack([torch.as_tensor(function(zero, zero, query, query + x)) for x in offsets])
    return torch.equal(shown, (offsets >= lo) & (offsets <= hi))


# ---- masks


def mask_of(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    **more: Any,
) -> Tensor | None:
    """The mask of one kind of layers, with the arguments of a mask function of transformers'
    AttentionMaskInterface: a `Mask`; where a compiler looks on, what sdpa has, in floats."""
    made: dict[str, Any] = {
        "batch_size": batch_size, "q_length": q_length, "kv_length": kv_length,
        "q_offset": q_offset, "kv_offset": kv_offset, "mask_function": mask_function,
        "attention_mask": attention_mask, "device": device, **more,
    }  # fmt: skip
    compiled_later = q_length == 1 and "allow_is_bidirectional_skip" not in more
    compiling = torch.compiler.is_compiling() or torch.jit.is_tracing()
    if compiling or (compiled_later and not more.get("allow_is_causal_skip", True)):
        mask = masking_utils.sdpa_mask(**made)
        if mask is None:
            return None
        floats = _floats(mask, dtype)
        if not compiling:
            setattr(floats, RUN, run_of_token(made))
        return floats
    # NOTE: of a static cache q_offset is a tensor, which the cache advances before the layers
    # attend; of a sliding one that was cropped others are, too
    sizes = ("q_length", "kv_length", "q_offset", "kv_offset")
    return Mask(made | {name: int(made[name]) for name in sizes}, dtype)


def _floats(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where `mask` is True, else the lowest number: added to scores, as in eager attention."""
    zero = torch.zeros((), dtype=dtype, device=mask.device)
    return torch.where(mask, zero, torch.finfo(dtype).min)


class Mask(Tensor):
    """The float mask (batch, 1, queries, keys) of the arguments `made` of a mask function, which is
    computed when it is needed."""

    made: dict[str, Any]
    packed: dict[tuple[int, ...], Any]  # layouts by the arguments of a model's layers

    @staticmethod
    def __new__(cls, made: dict[str, Any], dtype: torch.dtype) -> Mask:
        shape = (made["batch_size"], 1, made["q_length"], made["kv_length"])
        mask: Mask = Tensor._make_wrapper_subclass(
            cls,
            shape,
            dtype=dtype,
            device=torch.empty(0, dtype=torch.float32, device=made["device"]).device,
        )
        mask.made, mask.packed = made, {}
        return mask

    def __repr__(self, **_: Any) -> str:
        return f"Mask({tuple(self.shape)}, {self.expressed or 'left to torch'})"

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map(
            lambda x: x.computed if isinstance(x, Mask) else x, (args, kwargs or {})
        )
        return function(*args, **kwargs)

    @cached_property
    def computed(self) -> Tensor:
        """The mask as a plain tensor."""
        skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        return _floats(masking_utils.sdpa_mask(**{**self.made, **skips}), self.dtype)

    @cached_property
    def expressed(self) -> Layout | None:
        """How our kernel computes it, or None. It waits for the GPU where there is padding."""
        m = self.made
        positions = max(m["q_offset"] + m["q_length"], m["kv_offset"] + m["kv_length"])
        pattern = pattern_of(m["mask_function"], positions)
        return None if pattern is None else _layout(pattern, m)


def _layout(pattern: Pattern, m: dict[str, Any]) -> Layout | None:
    (lo, hi), queries, keys = pattern.band, m["q_length"], m["kv_length"]
    shift = m["q_offset"] - m["kv_offset"]  # the row of k at the first query's position
    whole = True  # whether the last query's last key is among them
    if hi is not None:
        whole = queries + hi + shift <= keys
        keys = min(keys, queries + hi + shift)
    if keys <= 0 or queries <= 0:
        return None
    behind = keys - queries  # the row of k that the first query is aligned with
    right = None if hi is None else hi + shift - behind
    left = None if lo is None else behind - lo - shift
    if left is not None and left < 0:
        return None
    if left is not None and left >= keys - 1:
        left = None  # no query can feel it
    layout = Layout((left, right), keys)
    if pattern.sequences is not None:
        return _packed(layout, pattern.sequences) if shift == 0 == behind else None
    mask = m["attention_mask"]
    if mask is None:
        return layout
    rows_k = _part(mask, m["kv_offset"], keys)
    if rows_k.all():
        return layout
    if hi is None and lo is None:  # of a decoder's queries on an encoder's keys, all count
        return _unpadded(layout, rows_k.new_ones(rows_k.shape[0], queries), rows_k)
    # padded queries are left out with their keys: distances then count the others in between
    if hi != 0 or not whole or (left is not None and not _is_one_run(rows_k)):
        return None
    return _unpadded(layout, _part(mask, m["q_offset"], queries), rows_k)


def run_of_token(m: dict[str, Any]) -> tuple[Tensor | None, Tensor] | None:
    """The first and last key of a cache that one token sees, for the arguments `m` of a mask
    function; None if the keys between are not all seen. It waits for the GPU if there is a mask of
    tokens, but never for the token's position, which a static cache has as a tensor."""
    first, keys, device = m["kv_offset"], m["kv_length"], m["device"]
    pattern = pattern_of(m["mask_function"], first + keys)
    if pattern is None or pattern.sequences is not None:
        return None
    at = torch.as_tensor(m["q_offset"] - first, device=device)  # the token's row of the cache
    lo, hi = pattern.band
    begin = None if lo is None else (at + lo).clamp(0, keys)
    end = at.new_full((), keys) if hi is None else (at + hi + 1).clamp(0, keys)
    if m["attention_mask"] is None:
        begins, ends = (
            # NOTE: expanded to one, it would keep a stride of 0, which no plan takes as it is
            None if x is None else x.to(torch.int32).repeat(m["batch_size"])
            for x in (begin, end)
        )
        assert ends is not None
        return begins, ends
    rows = torch.arange(keys, device=device)
    seen = rows < end if begin is None else (rows < end) & (rows >= begin)
    return run_of(_part(m["attention_mask"], first, keys) & seen)


def _part(mask: Tensor, begin: int, count: int) -> Tensor:
    """Columns of the padding mask (batch, positions); what is beyond it is padding."""
    found = mask[:, begin : begin + count].bool()
    return torch.nn.functional.pad(found, (0, count - found.shape[1]))


def _is_one_run(rows: Tensor) -> bool:
    """Whether in each entry of the batch the rows that count follow one another."""
    begins = rows[:, 0].int() + (rows[:, 1:] & ~rows[:, :-1]).sum(-1)
    return bool((begins <= 1).all())


def run_of(rows_k: Tensor, rows_q: Tensor | None = None) -> tuple[Tensor, Tensor] | None:
    """The first and last row of each entry, if the rows between all count and so do all of
    `rows_q`."""
    steps = rows_k.int().diff(prepend=rows_k.new_zeros(len(rows_k), 1).int())
    good = ((steps == 1).sum(-1) <= 1).all()
    if not bool(good if rows_q is None else good & rows_q.all()):
        return None
    begins = rows_k.int().argmax(-1).to(torch.int32)
    return begins, begins + rows_k.sum(-1, dtype=torch.int32)


def _unpadded(layout: Layout, rows_q: Tensor, rows_k: Tensor) -> Layout:
    if rows_q.shape[1] <= FEW:
        layout = layout._replace(run=run_of(rows_k, rows_q))
    lengths = [x.sum(-1, dtype=torch.int32) for x in (rows_q, rows_k)]
    ends = [torch.nn.functional.pad(n.cumsum(0, dtype=torch.int32), (1, 0)) for n in lengths]
    longest = int(lengths[0].max()), int(lengths[1].max())
    return layout._replace(
        rows_q=rows_q, rows_k=rows_k, cu_seqlens_q=ends[0], cu_seqlens_k=ends[1], longest=longest
    )


def _packed(layout: Layout, sequences: Tensor) -> Layout:
    """The layout for packed sequences, of which `sequences` (batch, rows) has the numbers."""
    begins = torch.ones_like(sequences, dtype=torch.bool)
    begins[:, 1:] = sequences.diff() != 0
    return layout._replace(**packed_by(begins))


def packed_by(begins: Tensor) -> dict[str, Any]:
    """The fields of a Layout for sequences that begin in the rows where `begins` is True."""
    rows = begins.flatten()
    starts = rows.nonzero().flatten()
    cu_seqlens = torch.cat((starts, starts.new_tensor([rows.numel()]))).to(torch.int32)
    longest = int(cu_seqlens.diff().max())
    return {
        "cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens, "longest": (longest, longest)
    }  # fmt: skip
