"""The text of findings: the cause first, its consequences folded under it, with source text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cutex.sim.sides import Side

if TYPE_CHECKING:
    from cutex.sim.finding import Finding

_WAITED = re.compile(r"on which this warp last waited with parity \d+ at (PTX line \d+)[^\n]*")
_WHERE = re.compile(
    r"(PTX line \d+): [^()]*? \((?=[^()\s]+:\d+)"
)  # a PTX line with its instruction
_PTX = re.compile(r"PTX line (\d+)")
_SIGNALS = re.compile(r"(?:completes on|phase \d+ of) mbarrier .*?\(initialised at ([^)]*)\)")
_LEFT = re.compile(r"at the end mbarrier .*?\(initialised at ([^)]*)\)")
_EARLY = re.compile(r"reads tensor memory column \d+ before ")  # see `EarlyLoads`
_BACKWARDS = re.compile(r"overwrites tensor memory column \d+, which .* loaded at (PTX line \d+):")
_NEVER = "on which this warp never waited"
BYTES = "bytes announced"
UNORDERED = "nothing orders the one thread before the other"  # that issue MMAs
# the rules of causes that stand before whatever follows from them
CAUSES = (BYTES, "tensor map")
_TOLD = 4  # findings of one cause that its report lists


@dataclass
class Report:
    """A finding, and those that share its cause."""

    root: Finding
    followers: list[Finding] = field(default_factory=list)

    def __str__(self) -> str:
        text = headed(str(self.root), self.root.sides)
        if self.root.remedy:
            two = self.root.rule in ("race", "proxy", "exit", "start")
            text += f"\n  what would {'order the two' if two else 'mend it'}: {self.root.remedy}"
        if not self.followers:
            return text
        same = "wait" if _WAITED.search(self.root.message) else "cause"
        lines = [f"  {len(self.followers)} more follow from the same {same}:"]
        lines += [f"    {f.rule} at {f.where}" for f in self.followers[:_TOLD]]
        if (left := len(self.followers) - _TOLD) > 0:
            lines.append(f"    and {left} more")
        return "\n".join([text, *lines])

    def as_dict(self) -> dict[str, Any]:
        """The content of the report for programs."""
        return {
            **_plain(self.root),
            "text": str(self),
            "followers": [_plain(f) for f in self.followers],
        }


def folded(findings: Iterable[Finding]) -> list[Report]:
    """One report per cause: first those that are the cause of others, then those with the most
    findings; see `_cause`."""
    ordered = sorted(
        findings,
        key=lambda f: (not _comes_first(f), not _EARLY.search(f.message), f.rule == "exit"),
    )
    causes, early = _barriers(ordered), _early(ordered)
    short = {_signalled(f) for f in ordered if f.rule == BYTES}
    groups: dict[object, Report] = {}
    first: object = None
    for number, finding in enumerate(ordered):
        cause = early.get(_overwritten(finding)) or causes.get(_signalled(finding))
        if (left := _LEFT.search(finding.message)) and left[1] in short:
            cause = causes[left[1]]  # the tx-count that too few bytes announced leave
        cause = cause or _cause(finding) or number
        if first is None and _WAITED.search(finding.message):
            first = cause
        if finding.rule == "exit" and first is not None:
            cause = first
        if cause in groups:
            groups[cause].followers.append(finding)
        else:
            groups[cause] = Report(finding)
    return sorted(groups.values(), key=lambda r: (not _comes_first(r.root), -len(r.followers)))


def _comes_first(finding: Finding) -> bool:
    """Whether others follow from it, whatever they are."""
    return finding.rule in CAUSES or finding.message.endswith(UNORDERED)


def is_cause(finding: Finding, rule: str, message: str) -> bool:
    """Whether the error that ended a run, of `rule` and with `message`, follows from what was found
    before: an access by a warp that never waited on its mbarrier, or waited for another phase,
    after which warps run ahead until they block or arrive too often.
    """
    if finding.rule in CAUSES:
        return True
    if rule not in ("deadlock", "barrier misuse") or finding.rule != "race":
        return False
    if _NEVER in finding.message:
        return True
    # NOTE: a barrier that completes too early, as its count is too small, is misused itself
    of_it = f"(initialised at {_signalled(finding)})" in message.partition("\n")[0]
    return bool(_WAITED.search(finding.message)) and (rule == "deadlock" or not of_it)


def _signalled(finding: Finding) -> str:
    """The place at which the mbarriers are initialised that a finding's operation completes on."""
    found = _SIGNALS.search(finding.message)
    return found[1] if found else ""


def _early(findings: Iterable[Finding]) -> dict[str, object]:
    """The causes of findings about loads that came before the MMA that they wait for, by what
    follows from them: the place of the load, which the MMA then overwrites, a dealloc, and loads
    of what nothing has written yet.
    """
    causes: dict[str, object] = {}
    for finding in findings:
        if _EARLY.search(finding.message):
            cause = finding.advisory, _signalled(finding) or finding.where
            causes.setdefault("dealloc", cause)
            causes.setdefault("unwritten", cause)
            causes[finding.where.partition(":")[0]] = cause
    return causes


def _overwritten(finding: Finding) -> str:
    """The key of a finding in `_early`."""
    if finding.rule == "race" and finding.message.startswith("tcgen05.dealloc"):
        return "dealloc"
    if finding.rule == "uninitialised" and finding.message.startswith("tcgen05.ld"):
        return "unwritten"
    if found := _BACKWARDS.search(finding.message):
        return found[1]
    return finding.where.partition(":")[0] if _EARLY.search(finding.message) else ""


def _barriers(findings: Iterable[Finding]) -> dict[str, object]:
    """The causes that lie in the use of a ring of mbarriers, by the place of its initialisation:
    too few bytes were announced on it, or nobody waits on it.
    """
    causes: dict[str, object] = {}
    for finding in findings:
        place = _signalled(finding)
        if place and (finding.rule == BYTES or _NEVER in finding.message):
            causes.setdefault(place, (finding.advisory, place))
    return causes


def _cause(finding: Finding) -> object:
    """A key that findings with the same cause share.

    It is the wait that their warps passed last: a CTA that returns too early for an operation has
    the same cause as another access after that wait. Otherwise it is the rule and the place of the
    other side, which nothing orders before them; or the finding's own place, for instructions of
    one line.
    """
    if waited := _WAITED.search(finding.message):
        return waited.group(1)
    side = next((s for s in finding.sides[1:] if s.stack), None) or next(iter(finding.sides), None)
    return (finding.rule, finding.advisory, side.stack) if side and side.stack else None


def as_text(findings: Sequence[Finding]) -> str:
    """The reports of all findings as text."""
    return "\n".join(map(str, folded(findings)))


def headed(text: str, sides: Sequence[Side]) -> str:
    """``text`` after the place of the first side, in the form of a compiler message, with the
    source of all sides.
    """
    stacks = [s for s in sides if s.stack]
    head, *rest = text.split("\n")
    text = "\n".join([_WHERE.sub(r"\1 (", head), *rest])
    lines = [f"{stacks[0].place}: {text}" if stacks else text]
    for i, side in enumerate(stacks):
        lines += [f"  PTX line {side.ptx_line}, {side.text.split()[0]}:"] if i else []
        lines += side.lines()
    return "\n".join(lines)


def _plain(finding: Finding) -> dict[str, Any]:
    line = _PTX.search(finding.where)
    return {
        "rule": finding.rule,
        "message": finding.message,
        "advisory": finding.advisory,
        "where": finding.where,
        "ptx_line": int(line[1]) if line else None,
        "sides": [side.as_dict() for side in finding.sides],
        "remedy": finding.remedy,
    }


def around(ptx: str, text: str, lines: int = 4) -> str:
    """The PTX around every line that ``text`` names."""
    code = ptx.split("\n")
    parts = []
    for number in dict.fromkeys(int(n) for n in _PTX.findall(text)):
        near = range(max(1, number - lines), min(len(code), number + lines) + 1)
        shown = [f"  {'>' if n == number else ' '}{n:6} {code[n - 1].strip()}" for n in near]
        parts += [f"  PTX around line {number}:", *shown]
    return "\n".join(parts)


def used_once(rings: Sequence[str]) -> str:
    """A sentence on rings of mbarriers of which no slot was used twice."""
    return (
        f"no slot of {', '.join(rings)} was used twice, so a wait that is missing before its reuse "
        "does not show: a larger problem tells"
    )
