"""The parser of ledger lines into Results."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any

from cutex.results.result import Peer, Result, Timing
from cutex.results.schema import fields_of


def _made(cls: type) -> Callable[[Any], Any]:
    """A function from a dict to a `cls`, like cls(**data), except that unknown fields are dropped.

    It does not check the values: see `_checked`.

    NOTE: a frozen dataclass sets its fields one by one, through object.__setattr__; giving it the
    whole dict makes reading a ledger of 100,000 rows three times as fast.
    """
    names = frozenset(f.name for f in fields(cls))
    needed = {f.name for f in fields(cls) if f.default is f.default_factory is MISSING}
    optional = [f for f in fields(cls) if f.name not in needed]

    def make(data: Any) -> Any:
        if type(data) is not dict:
            raise ValueError(f"{type(data).__name__} where a {cls.__name__} belongs")
        if data.keys() != names:
            if not needed <= data.keys():
                raise ValueError(f"a {cls.__name__} without {min(needed - data.keys())}")
            data = {name: value for name, value in data.items() if name in names}
            for f in optional:
                if f.name not in data:
                    fresh = f.default_factory
                    data[f.name] = f.default if fresh is MISSING else fresh()
        made: Any = object.__new__(cls)
        object.__setattr__(made, "__dict__", data)
        return made

    return make


def _checked(cls: type) -> Callable[[dict[str, Any]], None]:
    """A function that raises ValueError if a field of `cls` has an invalid value."""
    rules = fields_of(cls)

    def check(data: dict[str, Any]) -> None:
        for name, value in data.items():
            holds = rules.get(name)
            if holds is not None and not holds(value):
                shown = repr(value)
                shown = shown if len(shown) <= 40 else shown[:37] + "..."
                raise ValueError(f"{cls.__name__}.{name} cannot be {shown}")

    return check


_make_timing, _make_peer, _make_row = _made(Timing), _made(Peer), _made(Result)
_check_timing, _check_peer, _check_row = _checked(Timing), _checked(Peer), _checked(Result)


def _timing(data: Any) -> Timing:
    made = _make_timing(data)
    _check_timing(made.__dict__)
    return made


def _peer(data: Any) -> Peer:
    made = _make_peer(data)
    made.__dict__["timing"] = _timing(made.__dict__["timing"])
    _check_peer(made.__dict__)
    return made


def _part(data: Any) -> dict[str, Any]:
    """The fields of a Result, all or some, converted from JSON; ValueError for invalid values."""
    if type(data) is not dict:
        raise ValueError(f"{type(data).__name__} where a row belongs")
    if data.get("timing") is not None:
        data["timing"] = _timing(data["timing"])
    if type(data.get("peers")) is list:
        data["peers"] = [_peer(p) for p in data["peers"]]
    _check_row(data)
    return data


class Lines:
    """A parser of ledger lines that parses text shared by many lines only once.

    All stages of a run have the same environment, peers and GPU states, and all runs the same
    problems, configs and verdicts: the text between two markers is cached once parsed. Timings are
    parsed for each line. A line whose markers are not where `to_json` puts them is parsed as a
    whole.
    """

    def __init__(self) -> None:
        self._known: dict[str, dict[str, Any]] = {}

    def parse(self, line: str) -> Result:
        """The Result of `line`; ValueError, in one sentence, if it holds none."""
        try:
            return self._in_parts(line) or _make_row(_part(json.loads(line)))
        except RecursionError:
            raise ValueError("it is nested too deep for a row") from None

    def _in_parts(self, line: str) -> Result | None:
        """The Result of a line that is written as `to_json` writes it; None for other lines."""
        what, a, rest = line.partition(',"ok":')
        check, b, rest = rest.partition(',"environment":')
        where, c, rest = rest.partition(',"compile_seconds":')
        took, d, beside = rest.partition(',"peers":')
        if not (a and b and c and d):
            return None
        known = self._known.get
        try:
            data = {
                **(known(what) or self._learn(what, "", "}")),
                **(known(check) or self._learn(check, '{"ok":', "}")),
                **(known(where) or self._learn(where, '{"environment":', "}")),
                **_part(json.loads(f'{{"compile_seconds":{took}}}')),
                **(known(beside) or self._learn(beside, '{"peers":', "")),
            }
        except ValueError:  # the marks stood elsewhere, or it is none
            return None
        return _make_row(data)

    def _learn(self, text: str, before: str, after: str) -> dict[str, Any]:
        """Parse and cache the fields of `text`, which is an object between `before` and `after`."""
        found = self._known[text] = _part(json.loads(before + text + after))
        return found


def parse(line: str) -> Result:
    """The Result of one line; fields that this version does not have are ignored.

    Raises ValueError, in one sentence, if the line is no row of a ledger.
    """
    return Lines().parse(line)
