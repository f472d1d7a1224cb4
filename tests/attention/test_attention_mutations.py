"""A fault in the attention kernel is found: as a wrong result, or by the simulator."""

from __future__ import annotations

import re
from dataclasses import replace

import cutlass
import pytest
import torch
from cutlass import cute
from mutations import Mutant

from cutex.compile import compile
from cutex.device.atoms.multicast import Cluster, SharedRing
from cutex.device.atoms.wgmma import WgmmaProduct
from cutex.device.attention.block_info import Band, BlockInfo
from cutex.device.attention.block_loop import BlockLoop
from cutex.device.attention.mask import Mask
from cutex.device.pipeline import Barrier, Ring
from cutex.kernels.attention.forward.sm90.config import Sm90ForwardConfig
from cutex.kernels.attention.forward.sm90.forward import Forward
from cutex.kernels.attention.forward.sm90.load import PairExchange
from cutex.kernels.attention.work_ring import WorkRing
from cutex.problem.attention.case import AttentionCase
from cutex.sim import SimError, simulate

# one CTA for all tiles, so that leftovers of one reach the next
CONFIG = Sm90ForwardConfig(
    head_dim=64, head_dim_v=64, causal=True, window=(True, False), tile_n=64, num_ctas=1
)
CASE = AttentionCase(
    seqlen_q=200, seqlen_k=330, heads_q=1, heads_kv=1, head_dim=64, head_dim_v=64,
    causal=True, window=(150, None),
)  # fmt: skip
ORDERS = ({}, {"order": "random", "seed": 1}, {"order": "random", "seed": 2}, {"order": "starved"})


def compiled(config: Sm90ForwardConfig = CONFIG):
    return compile(Forward(config), "bf16", "sm_90a", cache=False)


@pytest.fixture(scope="module")
def kernel():
    return compiled()


def wrong(kernel, case=CASE, orders=ORDERS, inputs=None) -> str | None:
    """The error of a kernel, under the first order that shows one."""
    inputs = case.inputs() if inputs is None else inputs
    left, _ = case.window
    band = () if left is None else (-left,)
    for order in orders:
        out, lse = case.outputs()
        counter = torch.zeros(2, dtype=torch.int32)
        arguments = (*inputs[:3], out, lse, counter, case.softmax_scale, *band)
        try:
            simulate(kernel, *arguments, **order)
        except SimError as error:
            return str(error)
        found = case.check(inputs, out, lse)
        if not found.ok:
            return found.message
        if counter.any():
            return f"the counter is {counter.tolist()}, not zero as before"
    return None


@pytest.mark.slow
@pytest.mark.parametrize("init", ["normal", "falling"])
def test_the_unchanged_kernel_is_right(kernel, init):
    assert wrong(kernel, replace(CASE, init=init)) is None


@pytest.mark.slow
def test_warpgroups_compute_the_blocks_that_their_own_rows_see(kernel):
    """4 warps, each head_dim / 16 instructions for Q K^T and tile_n / 16 for P V."""
    inputs = CASE.inputs()
    counter = torch.zeros(2, dtype=torch.int32)
    report = simulate(
        kernel, *inputs[:3], *CASE.outputs(), counter, CASE.softmax_scale, -CASE.window[0]
    )
    info = BlockInfo(64, CONFIG.tile_n, Band(-CASE.window[0], 0))
    blocks = [info.n_blocks(m, CASE.seqlen_q, CASE.seqlen_k) for m in range(info.num_m_blocks(200))]
    assert (
        sum(n for op, n in report.counts.items() if op.startswith("wgmma.mma"))
        == sum(b.end - b.first for b in blocks) * 4 * (64 + 64) // 16
    )


@pytest.mark.slow
def test_a_passed_block_that_is_not_waited_for_is_found(monkeypatch):
    @cute.jit
    def careless(self, count, state, in_turn: cutlass.Constexpr[bool]):
        k, v = state
        for _ in cutlass.range(count, unroll=1):
            if cutlass.const_expr(in_turn):
                self.issue_order.wait()
                self.issue_order.end()
            self.k.release(k)
            k.advance()
            self.v.release(v)
            v.advance()
        return k, v

    monkeypatch.setattr(BlockLoop, "pass_over", careless)
    tiles = replace(CASE, seqlen_q=256, seqlen_k=256, heads_q=4, heads_kv=4)
    message = wrong(compiled(), tiles, orders=({"order": "random", "seed": 0},))
    assert message is not None
    assert "the TMA load of" in message or "nothing that it has waited for says" in message


@pytest.mark.slow
@pytest.mark.parametrize(("side", "by"), [("upper", 1), ("upper", -1), ("lower", 1), ("lower", -1)])
def test_a_mask_that_is_off_by_one_is_found(monkeypatch, side, by):
    bounds = Mask._bounds

    def off(self, r, first_key):
        end, begin = bounds(self, r, first_key)
        return (end + by, begin) if side == "upper" else (end, begin + by)

    monkeypatch.setattr(Mask, "_bounds", off)
    message = wrong(compiled(), orders=({},))
    assert message is not None and "further off than" in message


@pytest.mark.slow
def test_keys_that_are_taken_the_wrong_way_are_found(monkeypatch):
    """MMA goes the other way than LOAD."""
    config = replace(CONFIG, window=(False, False), alternate=True)
    case = replace(CASE, window=(None, None))

    def found() -> str | None:
        return wrong(compile(Forward(config), "bf16", "sm_90a", cache=False), case, ({},))

    assert found() is None
    forwards = WorkRing.forwards
    monkeypatch.setattr(WorkRing, "forwards", lambda self, slot: 1 - forwards(self, slot))
    message = found()
    assert message is not None and "further off than" in message


@pytest.mark.slow
@pytest.mark.parametrize("half", [0, 1])
def test_rows_that_are_taken_to_end_elsewhere_in_their_last_block(monkeypatch, half):
    """Taken to end in its first half, keys are missing; in its second, all are there."""
    config = replace(CONFIG, window=(False, False), tile_n=128, halves=True)
    monkeypatch.setattr(BlockInfo, "ends_in_first_half", lambda self, *_: cutlass.Int32(half))
    mutant = compile(Forward(config), "bf16", "sm_90a", cache=False)
    message = wrong(mutant, replace(CASE, window=(None, None)), ({},))
    assert (message is not None and "further off than" in message) == bool(half), message


# ---- two CTAs that load for each other

SHARED = replace(CONFIG, window=(False, False), share=True, tile_m=256, num_ctas=2)


def of_shared(length: int = 700, fails: bool = False) -> str | None:
    """The error of two CTAs; with `fails`, the rows of the second get a key that exceeds all that
    they saw before by more than fp32 holds, so that they must be computed again; those of the first
    see it in their first block."""
    case = replace(CASE, window=(None, None), seqlen_q=length, seqlen_k=length)
    inputs = case.inputs()
    if fails:
        inputs.q.fill_(1.0)
        inputs.k[:, 100] = 32.0
    kernel = compile(Forward(SHARED), "bf16", "sm_90a", cache=False)
    return wrong(kernel, case, (*ORDERS, {"order": "peer-late"}), inputs)


@pytest.mark.slow
def test_a_slot_that_only_this_cta_has_read_is_not_empty(monkeypatch):
    assert of_shared() is None

    def of_cluster(smem, name, num_slots, slot_bytes, warps, cluster):
        ring = Ring.allocate(smem, name, num_slots, slot_bytes, warps)
        return SharedRing(num_slots, slot_bytes, ring.full, ring.empty, Cluster(1, 1))

    monkeypatch.setattr(SharedRing, "of_cluster", of_cluster)
    message = of_shared()
    assert message is not None and "the TMA load of" in message, message


@pytest.mark.slow
def test_a_failure_that_the_other_cta_is_not_told_is_found(monkeypatch):
    assert of_shared(256, fails=True) is None
    send = PairExchange.send
    monkeypatch.setattr(PairExchange, "send", lambda *of: send(*of) // 2 * 2)
    message = of_shared(256, fails=True)
    assert message is not None and "deadlock" in message, message


@pytest.mark.slow
def test_a_scale_that_is_forgotten_is_found(monkeypatch):
    monkeypatch.setattr(BlockLoop, "scale_output", lambda self: None)
    message = wrong(compiled(), replace(CASE, init="falling"), orders=({},))
    assert message is not None and "O[" in message


@pytest.mark.slow
def test_probabilities_that_are_not_scaled_with_o_are_found(monkeypatch):
    """Those of the block before, where references of negative scores rise between blocks: of 128
    keys, since rows by blocks of 64 raise them before the exponentials."""
    wide = replace(CONFIG, tile_n=128)
    case = replace(CASE, init="falling", seqlen_q=64, seqlen_k=1500, window=(1450, None))
    inputs = case.inputs()
    inputs.k.sub_(12.5)  # from scores of 64 products, times 1 / 8, 100
    assert wrong(compiled(wide), case, ({},), inputs) is None
    monkeypatch.setattr(BlockLoop, "scale_p", lambda self: None)
    message = wrong(compiled(wide), case, ({},), inputs)
    assert message is not None and "O[" in message


@pytest.mark.slow
def test_q_that_is_loaded_before_its_only_slot_was_read_is_found(monkeypatch):
    def found() -> str | None:
        one_slot = replace(CONFIG, q_stages=1)
        assert one_slot.q_waits
        return wrong(compile(Forward(one_slot), "bf16", "sm_90a", cache=False))

    assert found() is None
    wait = Barrier.wait
    monkeypatch.setattr(
        Barrier, "wait", lambda self, *at: None if self.event == "q read" else wait(self, *at)
    )
    message = found()
    assert message is not None and "TMA load" in message


@pytest.mark.slow
def test_a_slot_of_k_that_is_read_after_its_release_is_found(monkeypatch):
    issue = WgmmaProduct.issue

    def again(self, slot, accumulate):
        return issue(self, slot if accumulate else slot ^ 1, accumulate)

    monkeypatch.setattr(WgmmaProduct, "issue", again)
    message = wrong(compiled(), orders=({},))
    assert message is not None and "TMA load" in message


NAMED = re.compile(r"^\s*(?:@!?%p\d+ )?(?:bar|barrier)\.(?:cta\.)?sync[^;]*;", re.M)


@pytest.mark.slow
def test_every_named_barrier_that_is_missing_is_found(kernel):
    barriers = [m for m in NAMED.finditer(kernel.ptx) if "128" in m.group()]
    assert len(barriers) >= 2
    for m in barriers:
        ptx = kernel.ptx[: m.start()] + kernel.ptx[m.end() :]
        assert wrong(Mutant(kernel.object_path, kernel.symbol, ptx)) is not None, m.group()
