"""The key of a kernel has what the text of its files does not say."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from enum import Enum
from typing import Any

import cutlass
import pytest
import torch
from cutlass import cute

from cutex.compile.compiling import _ingredients
from cutex.compile.identity import class_values, text_of
from cutex.compile.user_function import UserFunction
from cutex.kernels.gemm import stage
from cutex.kernels.gemm.sm90.stage0 import Stage0

ROWS = 64
TABLE = {"rows": 64}


@dataclasses.dataclass(frozen=True)
class Config:
    """A user's config, some of which its repr does not show."""

    tile: int = 64
    function: Callable[..., Any] | None = None
    hidden: Any = dataclasses.field(default=None, repr=False)


def helper(config):
    return config.tile_m // ROWS * TABLE["rows"]


class Mine(Stage0):
    number, factor = 77, 1

    @property
    def num_threads(self):
        return helper(self.config) * self.factor


def made_with(threads):
    class Made(Stage0):
        number = 78

        @property
        def num_threads(self):
            return threads

    return Made


def key(cls=Mine, config=None):
    kernel = cls.__new__(cls)
    kernel.config = stage("sm_90a", 0).config() if config is None else config
    return _ingredients(kernel, "bf16", "sm_90a")


def test_a_class_that_a_function_makes_is_told_from_its_siblings():
    assert key(made_with(128)) == key(made_with(128))
    assert key(made_with(128)) != key(made_with(256))
    assert text_of(made_with(128)) != text_of(made_with(256))


def test_what_a_script_sets_after_the_import_counts(monkeypatch):
    """A class's attribute, a global of its module, a table there, a helper that is replaced."""
    first = key()
    assert first == key()
    module = f"{__name__}.ROWS"
    for name, value in (
        (f"{__name__}.Mine.factor", 2),
        (module, 32),
        (f"{__name__}.TABLE", {"rows": 32}),
        (f"{__name__}.helper", lambda config, by=3: by),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(name, value)
            assert key() != first, name
    assert key() == first


def test_a_constant_of_another_module_of_the_users_counts(monkeypatch, tmp_path):
    (tmp_path / "sizes_of_mine.py").write_text("import os\nTHREADS = int(os.environ['THREADS'])\n")
    (tmp_path / "stage_of_mine.py").write_text(
        "import sizes_of_mine\nfrom cutex.kernels.gemm.sm90.stage0 import Stage0\n"
        "class Of(Stage0):\n    number = 79\n"
        "    def threads(self): return sizes_of_mine.THREADS\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("THREADS", "128")
    of = importlib.import_module("stage_of_mine").Of
    first = key(of)
    assert first == key(of)
    monkeypatch.setenv("THREADS", "256")
    importlib.reload(importlib.import_module("sizes_of_mine"))
    assert key(of) != first


def test_cutexs_own_classes_are_told_by_their_text():
    assert class_values(Stage0) == []


class Mode(Enum):
    ONE, TWO = 1, 2


class Plain:
    def __init__(self, value):
        self.value = value

    def __repr__(self):
        return "Plain"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Config(hidden=1), Config(hidden=2)),
        (Config(function=lambda x: x), Config(function=lambda x: 2 * x)),
        (Config(function=UserFunction(lambda x: x)), Config(function=UserFunction(lambda x: -x))),
        (Config(hidden=Plain(1)), Config(hidden=Plain(2))),
        (Config(hidden=(1, [2, {3: Plain(4)}])), Config(hidden=(1, [2, {3: Plain(5)}]))),
        (Config(hidden=1), Config(hidden=True)),
        (Config(hidden=0.0), Config(hidden=-0.0)),
        (Config(hidden=Mode.ONE), Config(hidden=Mode.TWO)),
        (Config(hidden=torch.float16), Config(hidden=torch.bfloat16)),
        (Config(hidden=cutlass.Float32(1.0)), Config(hidden=cutlass.Float32(2.0))),
        (Config(hidden=made_with(1)), Config(hidden=made_with(2))),
        (Config(hidden=helper), Config(hidden=lambda config: ROWS)),
    ],
)
def test_all_of_a_config_counts_whatever_its_repr_shows(one, other):
    assert text_of(one) == text_of(dataclasses.replace(one)) != text_of(other)


def test_what_cannot_be_written_down_is_never_alike():
    for value in (torch.zeros(4000), object(), iter(()), Plain(torch.zeros(1))):
        assert text_of(Config(hidden=value)) != text_of(Config(hidden=value))


def test_a_config_that_holds_itself_ends():
    held: list[Any] = [1]
    held.append(held)
    assert text_of(held) == text_of(held)


def test_the_key_of_a_jitted_methods_class_stays_when_it_is_traced():
    class Traced:
        @cute.jit
        def by(self, x):
            return x * ROWS

    before = class_values(Traced)
    assert any("ROWS = 64" in line for line in before)
    assert class_values(Traced) == before
