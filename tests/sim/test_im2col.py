"""Loads in im2col mode (PTX ISA 5.5.4, 9.7.9.27) against their definition: for each pixel of the
column, and each channel of it, the element of the image batch or nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest
from copies import DUMP, LOAD, WAIT, Copy, Tensor, run
from cutlass import cute
from cutlass.cute.nvgpu import cpasync
from ptx_kernel import simulate_ptx
from tensor_maps import aligned, encode, swizzled

from cutex.sim.errors import BadOperand, Hazards, UnknownInstruction
from cutex.sim.host.loaded import captured
from cutex.sim.isa.tensormap import Pixels, decode_map

IM2COL = LOAD.replace(".tile.", ".im2col.")


@dataclass
class Columns(Copy):
    """A copy in im2col mode. ``box``: channels, and pixels of a column; the rest by W, H, D, as
    many as the tensor has.
    """

    offsets: tuple[int, ...] = ()
    lower: tuple[int, ...] = ()
    upper: tuple[int, ...] = ()

    @property
    def map(self) -> np.ndarray:
        t, spatial = self.tensor, len(self.lower)
        box = (self.box[0], *[1] * (spatial + 1))
        steps = (1, *self.steps, 1) if self.steps else None
        raw = encode(0, t.kind, t.dims, t.strides, box, steps, swizzle=self.swizzle, nan=self.nan,
                     flags=1)  # fmt: skip
        words = np.frombuffer(raw, "<u4").copy()
        bits = {1: 16, 2: 8, 3: 5}[spatial]
        words[14] = 0
        for i in range(spatial):
            words[14] |= (self.lower[i] % (1 << bits)) << bits * i
            words[14] |= (self.upper[i] % (1 << bits)) << 16 + bits * i
        words[15] = self.box[1] - 1
        return aligned(words.view(np.uint8))

    def bases(self) -> list[tuple[int, ...]]:
        """Positions of the filter's base, W first and N last: those of the bounding boxes of all
        images, and of images past the last, from the instruction's own on.
        """
        steps = self.steps or (1,) * len(self.lower)
        ends = [d + corner for d, corner in zip(self.tensor.dims[1:-1], self.upper, strict=True)]
        axes = [range(*axis) for axis in zip(self.lower, ends, steps, strict=True)]
        images = range(self.at[-1], self.at[-1] + self.box[1] + 1)
        places = [place[::-1] for place in product(images, *reversed(axes))]
        return places[places.index(self.at[1:]) :][: self.box[1]]

    def elements(self) -> list[tuple[np.ndarray, int | None]]:
        out, size = [], 2
        for p, base in enumerate(self.bases()):
            place = [b + o for b, o in zip(base, (*self.offsets, 0), strict=True)]
            for c in range(self.box[0]):
                at = self.offset + (p * self.box[0] + c) * size + np.arange(size)
                byte = self.tensor.byte_at((self.at[0] + c, *place))
                out.append((swizzled(at, self.swizzle), byte))
        return out

    @property
    def bytes(self) -> int:
        return self.box[0] * self.box[1] * 2

    def text(self) -> str:
        offsets = ", ".join(map(str, self.offsets))
        return f"""
            @%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], {self.bytes};
            @%p0 cp.async.bulk.tensor.{len(self.at)}d.{IM2COL}
                [%r0+{self.offset}], [%map, {self.coordinates}], [%r1], {{{offsets}}};
        """


def f16(*dims: int) -> Tensor:
    return Tensor("f16", dims, pad=16)


CASES = {
    "a row of images": Columns(
        f16(16, 9, 4), (16, 20), (0, 3, 1), lower=(-1,), upper=(-1,), offsets=(2,)
    ),
    "the PTX ISA's first example": Columns(
        f16(64, 9, 14, 6), (8, 64), (0, 7, 7, 4), lower=(-1, -1), upper=(-1, -1), offsets=(0, 0)
    ),
    "its second": Columns(
        f16(64, 9, 14, 6), (8, 64), (8, 6, 7, 4), lower=(0, 0), upper=(-2, -2), offsets=(2, 2)
    ),
    "a stride of 2": Columns(
        f16(64, 8, 14, 9), (16, 32), (48, 5, 7, 5), steps=(2, 2), lower=(-1, -1), upper=(-1, -1),
        offsets=(1, 1),
    ),
    "past the last image": Columns(
        f16(8, 4, 3, 2), (8, 40), (0, 1, 1, 1), lower=(0, 0), upper=(0, 0), offsets=(0, 0)
    ),
    "past the last image, with NaN": Columns(
        f16(8, 4, 3, 2), (8, 40), (0, 1, 1, 1), lower=(0, 0), upper=(0, 0), offsets=(0, 0), nan=True
    ),
    "past the last channel": Columns(
        f16(24, 4, 3, 2), (16, 10), (16, 0, 0, 0), lower=(0, 0), upper=(0, 0), offsets=(1, 0)
    ),
    "volumes, swizzled": Columns(
        f16(64, 5, 4, 3, 2), (64, 60), (0, 2, 0, 0, 0), steps=(1, 2, 1), lower=(-1, -2, 0),
        upper=(-1, 0, -1), offsets=(1, 2, 1), swizzle=128, offset=1024,
    ),
}  # fmt: skip


@pytest.mark.sweep(3)
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("name", CASES)
def test_a_column_of_pixels_is_what_the_definition_says(name: str, arch: str) -> None:
    copy = CASES[name]
    got = run(simulate_ptx, copy, copy.text() + WAIT + DUMP, arch=arch)[0]
    np.testing.assert_array_equal(got, copy.loaded())


def test_a_column_in_flight_is_held_to_the_wait() -> None:
    copy = CASES["its second"]
    with pytest.raises(Hazards, match="while it is still being written by the TMA load of"):
        run(simulate_ptx, copy, copy.text() + DUMP + WAIT)


BROKEN = {
    "outside the bounding box": {"at": (0, 8, 7, 4)},
    "is not a multiple of 16 bytes": {"at": (4, 7, 7, 4)},
    "are not from 0 to 255": {"offsets": (0, 300)},
    "4 coordinates and 1 offsets": {"offsets": (0,)},
}


@pytest.mark.parametrize("why", BROKEN)
def test_what_the_mode_does_not_take_is_refused(why: str) -> None:
    first = CASES["the PTX ISA's first example"]
    copy = Columns(**{**vars(first), **BROKEN[why]})
    with pytest.raises(BadOperand, match=why):
        run(simulate_ptx, copy, copy.text() + WAIT)


def test_a_map_is_of_one_mode() -> None:
    copy = CASES["its second"]
    with pytest.raises(BadOperand, match="is of im2col mode, this copy of tiled mode"):
        tiled = copy.text().replace(".im2col.", ".tile.").replace(", {2, 2}", "")
        run(simulate_ptx, copy, tiled + WAIT)
    plain = Copy(copy.tensor, (8, 1, 1, 1), copy.at)
    with pytest.raises(BadOperand, match="the tensor map is of tiled mode"):
        run(simulate_ptx, plain, copy.text() + WAIT)


def test_stores_in_this_mode_are_not_defined() -> None:
    copy = CASES["its second"]
    text = "@%p0 cp.async.bulk.tensor.4d.global.shared::cta.im2col_no_offs.bulk_group "
    with pytest.raises(UnknownInstruction, match="im2col_no_offs"):
        run(simulate_ptx, copy, f"{text} [%map, {copy.coordinates}], [%r0];")


@cute.kernel
def has_map(x: cpasync.TmaInfo):
    cpasync.prefetch_descriptor(x.atom)


@cute.jit
def with_map(x: cute.Tensor):
    layout = cute.make_layout(((20, 18, 3), 64), stride=((64, 1280, 23040), 1))  # ((W, H, N), C)
    x = cute.make_tensor(x.iterator, layout)
    tile = cute.make_layout((96, 32), stride=(32, 1))
    tile = cute.make_composed_layout(cute.make_swizzle(0, 4, 3), 0, tile)
    corners = (-1, -2), (-3, -4), (1, 2), (1, 2)  # lower and upper ones, and padding
    op, walk = cpasync.CopyBulkTensorIm2ColG2SOp(), ((1, 2), (0, 0), (1, 1))
    found = cpasync.make_im2col_tma_atom(op, x, tile, (96, 32), *corners, *walk)
    has_map(found).launch(grid=[1, 1, 1], block=[32, 1, 1])


def test_the_map_of_the_dsl_is_read(monkeypatch) -> None:
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
    images = np.zeros(3 * 23040, np.float16)
    host, programs, arguments, _ = captured(with_map, [images], "sm_90a")
    (program,), maps = programs.values(), []
    sizes = [p.size for p in program.params]
    host(arguments, lambda what: maps.append(max(what.param_bytes(sizes), key=len)[:128]))
    tmap = decode_map(bytes(maps[0]))
    assert (tmap.dims, tmap.strides) == ((64, 20, 18, 3), (2, 128, 2560, 46080))
    assert (tmap.box[0], tmap.steps) == (32, (1, 1, 2, 1))
    assert tmap.pixels == Pixels(lower=(-1, -2), upper=(-3, -4), count=96)
    assert tmap.bytes == 96 * 32 * 2
