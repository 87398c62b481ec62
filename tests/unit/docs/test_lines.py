"""`make lines` counts each line of a file once."""

from __future__ import annotations

from deploy.lines import Lines, counted, data, total

MODULE = '''"""A docstring
of two lines."""

# a comment
SIZE = 1  # a comment beside code
"""A docstring of an attribute."""
TEXT = """a literal

with three lines"""


def one() -> str:
    """Return a literal."""
    return "not a docstring"
'''


def test_each_line_has_one_kind():
    """Seen to fail with a blank line inside a literal counted as code, and with a comment beside code counted twice."""
    assert counted(MODULE) == Lines(code=5, comment=1, docstring=4, blank=4)


def test_packages_are_added_up_without_generated_files():
    files = [("a/x.py", "x = 1\n"), ("a/b/y.py", "\n# note\n"), ("a/v1/z_pb2.py", "z = 1\n"), ("setup.py", "s = 1\n")]

    assert total(files) == {"a": Lines(code=1, comment=1, blank=1)}


def test_rules_in_other_languages_are_counted_in_product_packages_only():
    files = [("gateway/envoy/a.lua", "return 1\n\n"), ("tests/kit/b.lua", "return 1\n"), ("charts/c/v.yaml", "a: 1\n")]

    assert data(files) == {"gateway .lua": 1}
