"""The API page is what the docstrings say, and has every public name."""

from __future__ import annotations

import inspect

from api_page import PAGE, page

import cutex


def test_the_page_is_written_from_the_docstrings(root):
    assert (root / PAGE).read_text() == page(), "python tests/api_page.py writes it"


def test_every_public_name_of_the_package_is_on_it():
    text = page()
    functions = [n for n in cutex.__all__ if inspect.isroutine(getattr(cutex, n))]
    assert "matmul" in functions
    for name in functions:
        assert f"### cutex.{name}\n" in text
    assert "### cutex.attention.activate\n" in text
