"""UserFunction: two functions have one key only if a kernel would trace them alike."""

from __future__ import annotations

import functools
import math
import operator
import statistics
import subprocess
import sys
import types

import cutlass
import pytest
import torch
from cutlass import Float32, cute

from cutex.compile.user_function import UserFunction, arguments_taken
from cutex.sim import simulate

FACTOR = 2.0
TABLE = [1.0, 2.0]


def key(function) -> str:
    found = UserFunction(function)
    assert found.cacheable, found.key
    return found.key


def scaled(by):
    return lambda x: x * by


def helper(x):
    return x + 1.0


def with_helper(x):
    return helper(x)


@cute.jit
def jitted(x):
    if x > 0.0:
        x = helper(x)
    return x


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("function", "count"),
    [
        (lambda x: x, 1),
        (lambda x, slope=0.1: x * slope, 1),  # a default is no coordinate
        (lambda x, m, n: x, 3),
        (lambda x, m: x, None),
        (lambda: 0, None),
        (functools.partial(lambda factor, x: x * factor, 2.0), 1),
        (lambda *x: x[0], 1),
        (jitted, 1),
        (max, None),
    ],
)
def test_a_function_takes_the_arguments_that_it_cannot_do_without(function, count):
    assert arguments_taken(function, (1, 3)) == count


def test_a_function_that_returns_nothing_is_named():
    def forgetful(x):
        x + 1

    with pytest.raises(TypeError, match=r"forgetful returns None, not a number"):
        UserFunction(forgetful)(1.0)


@pytest.mark.parametrize("value", [(1.0, 2.0), [1.0], "1"])
def test_a_function_that_returns_several_things_is_named(value):
    def generous(x):
        return value

    with pytest.raises(TypeError, match=rf"generous returns {type(value).__name__}, not a number"):
        UserFunction(generous)(1.0)


def test_two_lambdas_on_one_line_differ():
    first, second = lambda x: x + 1, lambda x: x + 2  # fmt: skip
    assert key(first) != key(second)
    assert UserFunction(first) != UserFunction(second)


def test_what_computes_the_same_has_one_key_wherever_it_stands():
    first = lambda x: x + 1

    def second(x):
        return x + 1

    assert key(first) == key(second)
    assert key(scaled(2.0)) == key(scaled(2.0)) != key(scaled(3.0))
    assert hash(UserFunction(first)) == hash(UserFunction(second))


@pytest.mark.parametrize("function", [with_helper, jitted])
def test_a_helper_that_changes_changes_the_key(monkeypatch, function):
    before = UserFunction(function)
    assert before.cacheable and before.is_current()
    monkeypatch.setattr(sys.modules[__name__], "helper", lambda x: x - 1.0)
    assert not before.is_current()
    assert key(function) != before.key


def test_a_helper_in_another_module_counts(monkeypatch):
    module = types.ModuleType("of_a_user")
    exec("def twice(x): return 2.0 * x\ndef unused(x): return x", vars(module))
    monkeypatch.setitem(globals(), "of_a_user", module)
    function = lambda x: of_a_user.twice(x)  # noqa: F821
    before = UserFunction(function)
    module.unused = None
    assert before.is_current() and key(function) == before.key
    exec("def twice(x): return 3.0 * x", vars(module))
    assert not before.is_current() and key(function) != before.key


# as Python has them, and as a user names files, too
STANDARD_NAMES = ("profile", "code", "token", "queue", "statistics", "calendar")


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", STANDARD_NAMES)
def test_a_users_module_named_like_one_of_python_counts(monkeypatch, tmp_path, name):
    """Its functions, and what is read of it, whether by name, in a default or in a closure."""
    path = tmp_path / f"{name}.py"

    def load(factor):
        path.write_text(f"FACTOR = {factor}\ndef scaled(x): return {factor} * x\n")
        found = types.ModuleType(name)
        found.__file__ = str(path)
        exec(compile(path.read_text(), path, "exec"), vars(found))
        monkeypatch.setitem(sys.modules, name, found)
        return found

    def keys(module):
        scope = {name: module}
        by_name = eval(f"lambda x: {name}.scaled(x)", scope)
        constant = eval(f"lambda x: {name}.FACTOR * x", scope)
        return [key(f) for f in (module.scaled, by_name, constant)]

    first, again, other = keys(load(2.0)), keys(load(2.0)), keys(load(3.0))
    assert first == again
    assert not set(first) & set(other)
    module = load(2.0)
    assert not UserFunction(lambda x, m=module: m.FACTOR * x).cacheable
    assert not UserFunction(scaled(module)).cacheable


def test_pythons_own_modules_are_known_by_name():
    for module in (math, operator, functools, sys, subprocess, types):
        found = UserFunction(lambda x, m=module: x)
        assert found.cacheable and found.is_current(), module
    assert UserFunction(lambda x: x * statistics.mean((1.0, 2.0))).cacheable


def test_a_helper_whose_code_is_replaced_changes_the_key(monkeypatch):
    before = UserFunction(with_helper)
    monkeypatch.setattr(helper, "__code__", (lambda x: x * 9.0).__code__)
    assert not before.is_current() and key(with_helper) != before.key


def test_tracing_does_not_change_the_key():
    """The DSL replaces the code of what it traces, a @cute.jit function's and its helpers'."""

    @cute.jit
    def positive(x):
        if x < 0.0:
            x = helper(x) * 0.0
        return x

    @cute.kernel
    def kernel(m):
        m[0] = positive(m[0])

    @cute.jit
    def launch(m):
        kernel(m).launch(grid=(1, 1, 1), block=(1, 1, 1))

    functions = (positive, launch)
    made = [UserFunction(f) for f in functions]
    values = torch.tensor([-3.0])
    simulate(launch, values, arch="sm_90a")
    assert values.item() == 0
    assert all(f.cacheable and f.is_current() for f in made)
    assert [UserFunction(f) for f in functions] == made


def test_globals_defaults_and_constants_count(monkeypatch):
    function = lambda x: x * FACTOR
    before = UserFunction(function)
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    assert not before.is_current() and key(function) != before.key
    monkeypatch.setitem(globals(), "UNRELATED", 3.0)
    assert key(lambda x, by=1.0: x * by) != key(lambda x, by=2.0: x * by)
    assert key(lambda x, *, by=1.0: x * by) != key(lambda x, *, by=2.0: x * by)
    assert key(lambda x: x * 1) != key(lambda x: x * 1.0)
    assert key(lambda x: x * 0.0) != key(lambda x: x * -0.0)


def test_what_changes_in_place_is_read_again_each_time(monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "TABLE", [1.0, 2.0])
    function = lambda x: x * TABLE[0]
    before = UserFunction(function)
    assert before.cacheable and not before.is_current()
    TABLE[0] = 5.0
    assert key(function) != before.key


def test_attributes_of_a_function_count(monkeypatch):
    function = lambda x: x * helper.factor
    monkeypatch.setattr(helper, "factor", 2.0, raising=False)
    before = UserFunction(function)
    assert before.cacheable and not before.is_current()
    monkeypatch.setattr(helper, "factor", 3.0)
    assert key(function) != before.key


def test_inner_functions_partials_and_methods_count(monkeypatch):
    def outer(x):
        def inner(y):
            return y * FACTOR

        return inner(x)

    before = key(outer)
    monkeypatch.setitem(globals(), "FACTOR", 5.0)
    assert key(outer) != before
    partials = [functools.partial(lambda by, x: x * by, by) for by in (1.0, 2.0)]
    assert key(partials[0]) != key(partials[1])


def test_recursion_ends():
    def odd(x):
        return even(x - 1) if x else False

    def even(x):
        return odd(x - 1) if x else True

    assert key(odd) != key(even)


def test_the_dsl_and_python_are_taken_by_name():
    function = lambda x: cute.arch.fmax(x, math.pi) + cutlass.min(x, 1.0) + abs(x) + Float32(2.0)
    assert UserFunction(function).is_current()
    assert key(function) != key(lambda x: cute.arch.fmin(x, math.pi))
    assert key(scaled(Float32(2.0))) != key(scaled(Float32(3.0)))


MODULE = types.ModuleType("of_a_user")


class Holder:
    value = 1.0

    def method(self, x):
        return x * self.value


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * Holder.value,
        Holder().method,
        lambda x: x * eval("FACTOR"),
        lambda x: x * globals()["FACTOR"],
        lambda x: x * not_defined_anywhere,  # noqa: F821
        scaled(Holder()),
        lambda x, module=MODULE: x * module.factor,
        scaled(MODULE),
        lambda x: operator.attrgetter("factor")(MODULE) * x,
    ],
)
def test_what_cannot_be_known_is_never_equal_to_anything(function):
    first, second = UserFunction(function), UserFunction(function)
    assert not first.cacheable and not first.is_current()
    assert first != second and repr(first) != repr(second)


def test_the_key_holds_in_another_process(root):
    script = """from cutex.compile.user_function import UserFunction
print(UserFunction(lambda x: x in {1, "two", 2.5}).key)"""
    keys = {
        subprocess.run(
            [sys.executable, "-c", script],
            cwd=root,
            env={"PYTHONPATH": str(root), "PYTHONHASHSEED": str(seed)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in (1, 2)
    }
    assert len(keys) == 1
