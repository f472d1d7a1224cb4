"""Why a mutant of which nothing is told may be as right as the kernel: derived from what a run of
the kernel did, and of the mutant where that says more; "" where nothing here shows it.

Nothing of the simulator's checks is used, only the events of the machine.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from mutants import Site
from run_trace import names_of, trace, trace_of
from subjects import Subject

from cutex.sim import SimError

# ---- reasons, by operator


def _not_executed(subject: Subject, site: Site) -> str:
    return "" if site.line in trace_of(subject).executed else "no run comes here at this size"


def _first_phase(subject: Subject, site: Site) -> str:
    known = trace_of(subject).phases[site.line] <= {0}
    return "it only waits for slots before their first use" if known else ""


def _never_waited_for(subject: Subject, site: Site) -> str:
    of = trace_of(subject)
    waits = any(of.waited.get(b, -1) >= phase for b, phase in of.fills[site.line])
    return "" if waits else "nobody waits for the phases that it is for: their slots' last ones"


# NOTE: in a run of this size; of a larger one a report may tell, of which this run has a part
NOBODY_WAITS = "nobody waits for the end of a phase of the barrier"


def _nobody_waits(subject: Subject, site: Site) -> str:
    of = trace_of(subject)
    waited = any(of.waited.get(barrier) for barrier, _ in of.fills[site.line])
    return "" if waited else NOBODY_WAITS


def _never_used(subject: Subject, site: Site) -> str:
    of = trace_of(subject)
    used = not of.made[site.line] or of.made[site.line] & of.used
    return "" if used else "nothing uses the mbarrier in a run of this size"


def _informed(subject: Subject, site: Site) -> str:
    early = trace(subject, site.mutant).uninformed - trace_of(subject).uninformed
    return "" if early else "who accesses global memory behind it knows of another warp's wait"


def _own_waits(subject: Subject, site: Site) -> str:
    of = trace_of(subject)
    arrivers = of.arrivers[site.line].items()
    others = any(of.passers[phase] - {warp} for phase, who in arrivers for warp in who)
    return "" if others else "the warp that arrives is the only one that waits for it"


def _no_tcgen05(subject: Subject, site: Site) -> str:
    where = "before it" if "::before" in site.text else "behind it, but dealloc"
    used = site.line in trace_of(subject).fences_used
    return "" if used else f"no access by tcgen05 of the warp comes {where}"


def _no_other_tcgen05(subject: Subject, site: Site) -> str:
    needed = site.line in trace_of(subject).fences_behind_others
    ours = site.text.startswith("tcgen05.fence::after")
    return "no access by tcgen05 of another warp comes before it" if ours and not needed else ""


def _nothing_handed_over(subject: Subject, site: Site) -> str:
    needed = site.line in trace_of(subject).fences_for_others
    ours = site.text.startswith("tcgen05.fence::after")
    why = "what it has waited for since its last such fence tells of no other warp's tensor memory"
    return why if ours and not needed else ""


_PREFETCH = re.compile(r"(cp\.async\.bulk\.)?prefetch")
_REGISTERS_ONLY = re.compile(
    r"(mov|add|sub|mul|mad|neg|and|or|xor|not|shl|shr|cvt|cvta|setp|selp|min|max)\b"
)


def _only_prefetches(subject: Subject, site: Site) -> str:
    """Of an elected lane, whose block of code has nothing else but arithmetic for it."""
    behind = [line.split("//")[0].strip() for line in subject.kernel.ptx.split("\n")[site.line :]]
    jump = next(i for i, text in enumerate(behind) if re.search(r"\bbra\b", text))
    to = behind[jump].rstrip(";").split()[-1]
    end = behind.index(f"{to}:")
    code = [text for text in behind[jump + 1 : end] if text and not text.startswith(".")]
    labels = {to, *(text.rstrip(":") for text in code if text.endswith(":"))}
    made: set[str] = set()
    for text in code:
        if jumped := re.search(r"\bbra\s+(\S+);", text):
            if jumped[1] not in labels:
                return ""
        elif _REGISTERS_ONLY.match(text):
            made.add(text.split()[1].rstrip(","))
        elif not text.endswith(":") and not _PREFETCH.match(text):
            return ""
    later = set(re.findall(r"%\w+", "\n".join(behind[end:])))
    return "the elected lane only prefetches" if code and not made & later else ""


def _arrival_not_waited_for(subject: Subject, site: Site) -> str:
    """Of an arrival whose address a mapa gives."""
    lines = subject.kernel.ptx.split("\n")
    to = site.text.split(maxsplit=1)[1].partition(",")[0]
    arrives = re.compile(rf"mbarrier\.arrive.*\[{re.escape(to)}[\]+]")
    at = next((n for n in range(site.line, len(lines)) if arrives.search(lines[n])), None)
    return "" if at is None else _never_waited_for(subject, site._replace(line=at + 1))


def _told_before(subject: Subject, site: Site) -> str:
    """As without the change, whoever writes memory that a bulk store reads knows that it has."""
    mine, other = trace_of(subject), trace(subject, site.mutant)
    if other.overwritten - mine.overwritten:
        return ""
    for thread, before in mine.bulk.items():
        if other.bulk[thread].read.keys() != before.read.keys():
            return ""
    return "who writes the memory of each store knows that it has read it"


def _ordered_anyway(subject: Subject, site: Site) -> str:
    if "tcgen05" in subject.kernel.ptx:
        return ""
    mine, other = trace_of(subject), trace(subject, site.mutant)
    if mine.unordered["global memory"] or other.unordered - mine.unordered:
        return ""
    bulk = other.overwritten - mine.overwritten
    return "" if bulk else "other barriers order all accesses that it orders"


def _whole_warps(subject: Subject, site: Site) -> str:
    needed = site.line in trace_of(subject).lanes_meet
    return "" if needed else "whole warps come there, and have stored nothing since their last one"


def _told_by_others(subject: Subject, site: Site) -> str:
    """Of one before an arrival for the warp: all that the arrival tells is told by others, too."""
    if "tcgen05" in subject.kernel.ptx:
        return ""
    lines = subject.kernel.ptx.split("\n")
    behind = (n for n in range(site.line, len(lines)) if re.search(_MEETS, lines[n]))
    at = next(behind, 0)
    if not at or "mbarrier.arrive" not in lines[at]:
        return ""
    mine, other = trace_of(subject), trace(subject, subject.kernel, at + 1)
    late = other.unordered - mine.unordered
    return "" if late else "other barriers order what the warp does before the arrival behind it"


_MEETS = r"mbarrier\.arrive|\bbar\.|barrier\.|tcgen05|cp\.async"


def _same_waits(subject: Subject, site: Site) -> str:
    mine, other = trace_of(subject).wgmmas, trace(subject, site.mutant).wgmmas
    return "each wgmma is known to be complete by the same wait" if mine == other else ""


def _behind_first_phase(subject: Subject, site: Site) -> str:
    first = trace_of(subject).fence_phases[site.line] == {0}
    return "the wait before it is for a first use" if first else ""


def _no_store(subject: Subject, site: Site) -> str:
    idle = not trace_of(subject).bulk_waits[site.line]
    return "the thread has no store to wait for here" if idle else ""


def _waited_for(subject: Subject, site: Site) -> str:
    """Each store is known by the same wait, or by a later one where nothing writes its memory
    again; and at the end of its thread to have read or written as without the change."""
    mine, other = trace_of(subject).bulk, trace(subject, site.mutant).bulk
    for thread in mine.keys() | other.keys():
        a, b = mine[thread], other[thread]
        if a.read.keys() != b.read.keys() or a.written.keys() != b.written.keys():
            return ""
        if any(b.read.get(store) != a.read.get(store) for store in a.reused | b.reused):
            return ""
    return "each store is waited for before its memory is used again, or the thread ends"


def _same_arrivals(subject: Subject, site: Site) -> str:
    mine, other = trace_of(subject).arrivals, trace(subject, site.mutant).arrivals
    # NOTE: lines are those of the kernel; only an operand differs
    same = mine == other and site.text.startswith("mapa")
    return "each warp arrives on the same barriers there, in another order" if same else ""


def _untouched(subject: Subject, site: Site) -> str:
    needed = site.line in trace_of(subject).fenced
    return "" if needed else "nothing but wgmmas accesses their registers in between"


def _releases_anyway(subject: Subject, site: Site) -> str:
    behind = subject.kernel.ptx.split("\n")[site.line :]
    relaxed = any("barrier.cluster.arrive.relaxed" in line for line in behind)
    ours = site.text.startswith("fence.mbarrier_init")
    return "no relaxed cluster barrier needs it" if ours and not relaxed else ""


_HANDOVER = re.compile(r"\b(mbarrier|bar|barrier|fence|membar|tcgen05\.(commit|fence|dealloc))\.")


def _common(a: str, b: str) -> int:
    """How many characters they begin with alike."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))


def _passed(subject: Subject, site: Site) -> str:
    """What an instruction is moved behind."""
    old, new = subject.kernel.ptx, site.mutant.ptx
    low, high = _common(old, new), len(old) - _common(old[::-1], new[::-1])
    return re.sub(r"//[^\n]*|\.loc[^\n]*", "", old[low:high]).replace(site.text, "")


def _wgmma_unused(subject: Subject, site: Site) -> str:
    """The same of a wait for wgmma, which nothing else tells of its end either."""
    passed = _passed(subject, site)
    if trace_of(subject).loaded[site.line] & names_of(passed) or _HANDOVER.search(passed):
        return ""
    mine, other = trace_of(subject), trace(subject, site.mutant)
    late = other.unordered - mine.unordered
    return "" if late else "what it is moved behind touches nothing that the wgmmas do"


def _unused(subject: Subject, site: Site) -> str:
    """What it waits for is neither used nor handed over by what it is moved behind."""
    passed = _passed(subject, site)
    loaded = trace_of(subject).loaded[site.line]
    used = not loaded or loaded & names_of(passed)
    if "wait::ld" not in site.text or _HANDOVER.search(passed) or used:
        return ""
    return "nothing that it is moved behind uses what was loaded"


Reason = Callable[[Subject, Site], str]
REASONS: dict[str, tuple[Reason, ...]] = {
    "an mbarrier's wait": (_first_phase, _ordered_anyway),
    "an mbarrier's arrival": (_never_waited_for,),
    "an mbarrier's arrival, earlier": (_never_waited_for, _own_waits, _ordered_anyway),
    "an mbarrier's initialisation": (_never_used,),
    "an arrival less": (_never_used, _nobody_waits),
    "an arrival more": (_never_used, _nobody_waits),
    "a barrier of a warp": (_whole_warps, _told_by_others),
    "a named barrier": (_ordered_anyway,),
    "a named barrier only arrived at": (_ordered_anyway,),
    "a named barrier, earlier": (_ordered_anyway,),
    "a named barrier, later": (_ordered_anyway,),
    "a wait for the grid before": (_informed,),
    "a wait for the grid before, later": (_informed,),
    "a group of wgmma": (_same_waits,),
    "a group of wgmma, earlier": (_same_waits,),
    "a commit of tcgen05": (_never_waited_for,),
    "a commit to one CTA less": (_never_waited_for,),
    "a commit of tcgen05, earlier": (_never_waited_for,),
    "a fence of tcgen05": (
        _behind_first_phase, _no_tcgen05, _no_other_tcgen05, _nothing_handed_over
    ),
    "a fence of tcgen05, later": (_no_tcgen05, _no_other_tcgen05, _nothing_handed_over),
    "every lane elected": (_only_prefetches,),
    "a wait for bulk stores": (_no_store, _waited_for, _told_before),
    "a wait for one bulk store more": (_no_store, _waited_for, _told_before),
    "a wait for bulk stores, later": (_no_store, _waited_for, _told_before),
    "a group of bulk stores": (_waited_for, _told_before),
    "a group of bulk stores, earlier": (_waited_for, _told_before),
    "an arrival in another CTA": (_same_arrivals, _arrival_not_waited_for),
    "a fence of wgmma": (_untouched,),
    "a fence of wgmma, later": (_untouched,),
    "another fence": (_releases_anyway,),
    "a wait for tcgen05.ld or st, later": (_unused,),
    "a wait for wgmma, later": (_wgmma_unused,),
}  # fmt: skip


def why(subject: Subject, site: Site) -> str:
    """Why the mutant is as right as the kernel; "" if that is not known."""
    for reason in (_not_executed, *REASONS.get(site.operator, ())):
        try:
            if found := reason(subject, site):
                return found
        except SimError:  # NOTE: a mutant's own run may end by one
            continue
    return ""
