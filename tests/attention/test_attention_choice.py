"""How Hopper's forward divides few tiles of dense rows: whole, cut in the last round, or split."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cutex.arch import arch
from cutex.kernels.attention.forward.sm90.choose import fitted
from cutex.kernels.attention.spec import AttentionSpec, Shape

H200 = replace(arch("sm_90a"), num_sms=132, l2_bytes=60 << 20)


def chosen(head_dims: tuple[int, int], rows: int, keys: int, heads: tuple[int, int]):
    spec = AttentionSpec(head_dim=head_dims[0], head_dim_v=head_dims[1])
    return fitted(spec, Shape(1, *heads, rows, keys, rows), H200)


@pytest.mark.parametrize(("heads_kv", "cut"), [(12, False), (6, True)])
def test_tiles_are_cut_where_l2_holds_what_their_parts_read(heads_kv, cut):
    """A round of 120 tiles, of twelve heads or of six: parts begin anywhere in their keys, so each
    reads keys of its own."""
    config = chosen((128, 128), 120 // heads_kv * 128, 13607, (heads_kv, heads_kv))
    assert config.pack == 1 and config.spread == cut and not config.split


@pytest.mark.parametrize(
    ("head_dim", "rows", "keys", "heads", "split"),
    [
        (256, 384, 15940, 8, True),  # three tiles of a head read the same keys
        (256, 896, 10292, 4, False),  # two pieces of O of each CTA take longer to merge
        (128, 857, 13999, 12, True),  # 84 tiles: keys of twelve heads come from memory once
        (128, 1714, 13999, 6, False),  # L2 holds those of six
    ],
)
def test_tiles_are_split_where_parts_would_read_apart(head_dim, rows, keys, heads, split):
    config = chosen((head_dim, head_dim), rows, keys, (heads, heads))
    assert config.split == split
