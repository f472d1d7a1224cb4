"""Faults of the kernels of rows: texts of their modules before and after, and the case that shows
each."""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

from cutex.device.row import bulk, packed, reduction, relayed, tickets, vector_words, words
from cutex.kernels.row import (
    by_tickets,
    cross_entropy,
    cross_entropy_dense,
    dense,
    kernel,
    moments,
    norm_backward_bulk,
    norm_bulk,
    norm_by_words,
    norm_resident,
    softmax,
    softmax_bulk,
    softmax_dense,
    unequal,
)


class Fault(NamedTuple):
    module: ModuleType
    case: str
    text: str
    into: str


# by the module and the case: what is changed, and the text before and after
TEXTS: dict[tuple[ModuleType, str], dict[str, tuple[str, str]]] = {
    (relayed, "relayed"): {
        "kept values of the wrong turn": ("i, turn % KEPT] for", "i, (turn + 1) % KEPT] for"),
        "kept by the lane, not the warp": (
            "kept[cute.arch.warp_idx(), i",
            "kept[cute.arch.lane_idx(), i",
        ),
        "kept values in one slot": ("KEPT = 3", "KEPT = 1"),
        "parts not waited for": ("self.full.wait(turn // RELAYED % 2, slot)", "pass"),
        "parts waited for by the other parity": (
            "self.full.wait(turn // RELAYED % 2, slot)",
            "self.full.wait(turn // RELAYED % 2 ^ 1, slot)",
        ),
        "parts of another slot": (
            "self.parts[part, i, slot]",
            "self.parts[part, i, (slot + 1) % RELAYED]",
        ),
        "fewer bytes announced": (
            "4 * self.tile.ctas * self.count",
            "4 * (self.tile.ctas - 1) * self.count",
        ),
        "more bytes announced": (
            "4 * self.tile.ctas * self.count",
            "4 * (self.tile.ctas + 1) * self.count",
        ),
        "sent to one CTA alone": ("self.full[slot], lane)", "self.full[slot], 0)"),
        "sent to the place of the first": (
            "domain_offset((rank, i, slot)",
            "domain_offset((0, i, slot)",
        ),
        "sent before the last were read": ("self.read.wait(turn // RELAYED % 2 ^ 1, slot)", "pass"),
        "never given back": (
            "self.read[turn % RELAYED], lane)",
            "self.read[turn % RELAYED], lane) if False else None",
        ),
        "given back by each CTA to itself": (
            "cute.arch.mbarrier_arrive(self.read[turn % RELAYED], lane)",
            "cute.arch.mbarrier_arrive(self.read[turn % RELAYED])",
        ),
        "given back behind the end": ("(turn + RELAYED < turns)", "(turn + 1 < turns)"),
    },
    (relayed, "relayed, a turn ahead"): {
        "one part alone": ("lane_idx() % self.tile.ctas", "lane_idx() * 0"),
    },
    (norm_bulk, "relayed"): {
        "relayed by all warps": (
            "(cute.arch.warp_idx() == RELAYS) & (turn < turns)",
            "turn < turns",
        ),
        "relayed before all have begun": (
            "cute.arch.sync_threads()\n            # NOTE: other warps",
            "# NOTE: other warps",
        ),
        "a row too many is begun": (
            "        turn, end = span\n        if turn < end:",
            "        turn, end = span\n        if turn <= end:",
        ),
        "a slot filled too early": ("turn + (c.stages - 1))", "turn + c.stages)"),
        "a store not waited for": ("wait_group(1, read=True)", "wait_group(2, read=True)"),
        "the async proxy is not told": ("cute.arch.fence_view_async_shared()", "pass"),
        "weights of the first columns": (
            "domain_offset((column,), optional[name])",
            "domain_offset((0,), optional[name])",
        ),
        "moments of rows for those of parts": ("columns if c.relays else None", "None"),
    },
    (norm_bulk, "halves"): {
        "weights of the other half": (
            "norm = self.norm(mX, order.chunk(begin)",
            "norm = self.norm(mX, order.chunk(0)",
        ),
        "rows of one half alone": ("self.even * 2 - 1, Int32(0)", "self.even * 2, Int32(0)"),
    },
    (tickets, "tickets"): {
        "a chunk left out": ("return ticket + self.given", "return ticket + self.given + 1"),
        "the count is not left zeroed": (
            "(ticket == self.left + self.members - 1)",
            "(ticket == self.left + self.members)",
        ),
    },
    (tickets, "tickets, clusters"): {
        "the first of another": ("self.own + turn * self.members", "self.own + turn"),
        "not heard before it is told": ("self.told.wait(index // TOLD % 2, slot)", "pass"),
        "told to the first CTA alone": ("self.told[slot], lane)", "self.told[slot], 0)"),
        "two numbers on their way": ("TOLD = 8", "TOLD = 2"),
        "a number of eight bytes": ("arrive_expecting(4, slot)", "arrive_expecting(8, slot)"),
    },
    (by_tickets, "tickets"): {
        "a slot taken before its rows have left": (
            "wait_group(1, read=True)",
            "wait_group(2, read=True)",
        ),
        "the chunk of another slot": (
            "places.of_slots, turn % self.stages",
            "places.of_slots, (turn + 1) % self.stages",
        ),
        "an end that nobody hears of": ("ring.full.arrive(slot)", "pass"),
    },
    (by_tickets, "tickets, several turns"): {
        "a turn's chunk twice": (
            "tickets.number(ticket), taken + 1)",
            "tickets.number(ticket), taken)",
        ),
        "drawn in each turn": ("draws = draws & is_next", "pass"),
    },
    (by_tickets, "tickets, clusters"): {
        "ended while others signal": ("sync_cluster()  # nobody", "pass  # nobody"),
        "all CTAs draw": ("block_idx_in_cluster()) == 0", "block_idx_in_cluster()) >= 0"),
        "told a turn late": ("places.hear(turn - 1)", "places.hear(turn)"),
    },
    (by_tickets, "softmax, tickets"): {
        "a slot taken before its row has left": (
            "wait_group(1, read=True)",
            "wait_group(2, read=True)",
        ),
        "stored before all are done": ("        cute.arch.sync_threads()\n", ""),
    },
    (by_tickets, "softmax, tickets, clusters"): {
        "ended while others signal": ("sync_cluster()  # nobody", "pass  # nobody"),
    },
    (reduction, "softmax, tickets, clusters"): {
        "sent before the CTA's warps have met": (
            "cute.arch.sync_threads()\n        if warp == 0:",
            "if warp == 0:",
        ),
        "a warp's values for the CTA's": ("found = inner([own], tile.warps)", "found = values"),
        "sent to the first CTA alone": (
            "word, self.full[slot], lane)\n        self.full.wait",
            "word, self.full[slot], 0)\n        self.full.wait",
        ),
        "CTAs' values not waited for": (
            "        self.full.wait(turn // SLOTS % 2, slot)\n        part",
            "        part",
        ),
        "bytes of the CTA alone": ("4 * tile.ctas * self.count", "4 * self.count"),
    },
    (kernel, "few"): {
        "sent to a CTA that has not begun": (
            "        cute.arch.cluster_wait()\n",
            "        pass\n",
        ),
    },
    (unequal, "few"): {
        "counts of other warps": ("lane % tile.warps", "lane * 0"),
        "counts of other CTAs": ("lane % tile.ctas", "lane * 0"),
        "means not apart": ("apart * apart * self.cross", "apart * self.cross"),
    },
    (softmax, "losses, dense"): {
        "largest without a largest": (
            "fmax(*halves(word, rX.element_type))",
            "fmax(*halves(rWords[0], rX.element_type))",
        ),
        "halves of one kind alone": (
            "cute.arch.fmax(*halves(word, rX.element_type))",
            "halves(word, rX.element_type)[0]",
        ),
        "what a product loses": ("exp2(-fma(top, by, -shift))", "Float32(1)"),
        "the largest products": ("fmax(top, -top) < LARGE", "fmax(top, -top) >= 0"),
    },
    (dense, "losses, dense"): {
        "read before it has come": ("cp_async_wait_group(0)", "cp_async_wait_group(1)"),
        "read before all have come": ("        cute.arch.sync_threads()\n", ""),
    },
    (cross_entropy_dense, "losses, dense"): {
        "words of another offset": ("begin % per, n)", "Int32(0), n)"),
        "a label of the row before": ("sX[begin + Int32(target)]", "sX[begin - n + Int32(target)]"),
    },
    (cross_entropy, "losses, dense"): {
        "rounded off by the logarithm": (
            "apart(top, label[0].to(Float32), mean, s) + log_total + z",
            "lse - label[0].to(Float32) + z",
        ),
    },
    (softmax_dense, "softmax, dense"): {
        "words stored while others read them": (
            "            cute.arch.sync_threads()\n        for turn",
            "            pass\n        for turn",
        ),
        "stored before all are done": (
            "        cute.arch.sync_threads()\n        run.store",
            "        run.store",
        ),
    },
    (softmax, "softmax, tickets"): {
        "the largest of bits": ('word ^ ((word >> 31) & LOW_BITS), "max"', 'word, "max"'),
    },
    (words, "relayed"): {
        "elements of neighbours counted": (
            "return self.begun(own, word) & self.mask(word)",
            "return self.begun(own, word)",
        ),
        "ends are not of the row": ("word == 0 or word >= self.count - self.open", "word == 0"),
        "a thread has a word more": (
            "found += self.holds(word, element).to(Float32) if",
            "found += 1.0 if",
        ),
    },
    (norm_by_words, "relayed"): {
        "neighbours in the squares": (
            "self.words.where_held([v - mean for v in x])",
            "[v - mean for v in x]",
        ),
        "not apart from the mean": ("(v - mean if c.centred else v) * rstd", "v * rstd"),
    },
    (vector_words, "relayed, vectors"): {
        "vectors behind the row": (
            "return (self.count - word - 1) // self.vector < self.open",
            "return False",
        ),
        "a vector in its row by its last column": (
            "self.column(word - word % self.vector) < self.n",
            "self.column(word) + 8 < self.n",
        ),
    },
    (vector_words, "vectors"): {
        "vectors of another thread": ("+ turn * self.threads", "+ turn * self.threads + 1"),
    },
    (bulk, "relayed"): {
        "ends stored that others share": (
            "return (self.lead + (width - 1)) & -width, self.end & -width",
            "return self.lead & -width, (self.end + (width - 1)) & -width",
        ),
        "a copy of too few bytes": (
            "num_bytes = (last - first) * (COPY_BYTES // self.width)\n        cute",
            "num_bytes = (last - first - 8) * (COPY_BYTES // self.width)\n        cute",
        ),
    },
    (norm_resident, "resident"): {
        "rows in turn in place of others": (
            "step = groups * tile.rows",
            "step = groups * tile.rows + 1",
        ),
        "the next row is this row": ("replace(row, row=row.row + step)(mX)", "row(mX)"),
        "columns behind the row counted": (
            "has = self.has(self.tile.vectors - 1)",
            "has = Boolean(True)",
        ),
        "a warp's mean for the row's": (
            "shift = (mean - found[-2]) * rstd",
            "shift = (mean - mean) * rstd",
        ),
    },
    (moments, "relayed"): {
        "means of parts not apart": ("s + n * (m - mean) * (m - mean) for", "s for"),
        "the first mean left out": ("return mean + first, squares", "return mean, squares"),
        "parts of as many columns as rows": (
            "(self.of_cta, *gathered)",
            "(self.of_warp, *gathered)",
        ),
    },
    (reduction, "gradient"): {
        "words sent before the last were read": (
            "self.read.wait(turn // SLOTS % 2 ^ 1, slot)",
            "pass",
        ),
    },
    (softmax, "softmax"): {
        "totals of another largest": (
            "parts = [(total * exp(own - above(top)), *more)",
            "parts = [(total, *more)",
        ),
    },
    (norm_backward_bulk, "gradient"): {
        "sums of the last row alone": (
            'sums["dweight"][at] += dy * xhat',
            'sums["dweight"][at] = dy * xhat',
        ),
        "sums of x, not xhat": (
            'sums["dweight"][at] += dy * xhat',
            'sums["dweight"][at] += dy * x',
        ),
        "one chain left out": ("sum(along[1:], along[0])", "along[0]"),
        "the mean of a part": ("total / n for total", "total * 2 / n for total"),
        "dx of the mean alone": ("g = g - means[1] if self.config.centred else g", "g = g"),
        "dy not waited for": ("                dys.wait(turn)\n", ""),
        "x not waited for": ("                xs.wait(turn)\n", ""),
        "x of a slot too early": (
            "ahead = turn + (c.slots - 1)\n                dense.fetch(mX",
            "ahead = turn + c.slots\n                dense.fetch(mX",
        ),
        "moments of the row before": ("                moments = later\n", "pass"),
        "parts of columns in the first's place": (
            "domain_offset((dense.column(n),), gPart)",
            "domain_offset((0,), gPart)",
        ),
        "parts of the first group": (
            'optional[f"{name}_parts"][group, None]',
            'optional[f"{name}_parts"][0, None]',
        ),
    },
    (norm_backward_bulk, "gradient, vectors"): {
        "weights of the first part": (
            'domain_offset((self.dense.column(n),), optional["weight"])',
            'domain_offset((0,), optional["weight"])',
        ),
    },
    (norm_backward_bulk, "gradient, relayed"): {
        "moments of the row that is finished": (
            "moments, following = following, later",
            "moments, following = moments, later",
        ),
        "begun with the row's own moments": (
            "reduction, following, (row + groups",
            "reduction, moments, (row + groups",
        ),
        "relayed at once": (
            "cute.arch.sync_threads()\n            self.relay(reduction",
            "self.relay(reduction",
        ),
        "sums not given back": ("reduction.release(turn, turns)", "pass"),
        "lanes not added up": (
            "reduction.start(lanes(values, add, WARP), turn)",
            "reduction.start(values, turn)",
        ),
    },
    (packed, "gradient"): {
        "parts begin anywhere": ("ctas), 8) * 8", "ctas), 8) * 8 + 1"),
        "a part too long": (
            "count = cutlass.min(self.part(n), n - column)",
            "count = self.part(n)",
        ),
    },
    (softmax_bulk, "softmax"): {
        "its own largest element": ("exp(own - above(top))", "exp(own - above(own))"),
        "0 outside of the row": ("there, x, -Float32.inf", "there, x, Float32(0)"),
        "a thread's own total": (
            "cute.arch.rcp_approx(total)",
            "cute.arch.rcp_approx(folded(e, plus))",
        ),
        "largest without a largest": ("functools.reduce(cute.arch.fmax, x)", "x[0]"),
        "stored before all are done": ("            cute.arch.sync_threads()\n", ""),
        "a part's slot filled too early": (
            "ahead = turn + (c.slots - 1)",
            "ahead = turn + c.slots",
        ),
    },
}
FAULTS = {
    f"{module.__name__.rpartition('.')[-1]} of {case}: {what}": Fault(module, case, *texts)
    for (module, case), found in TEXTS.items()
    for what, texts in found.items()
}
