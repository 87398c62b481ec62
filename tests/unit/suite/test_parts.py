"""The suite's table: nothing is left out, nothing runs twice, and every part has its turn."""

from collections import Counter
from pathlib import Path

import pytest

from tests.kit.skips import ALLOWED
from tests.suite.__main__ import slice_of
from tests.suite.parts import PARTS, QUICK_ONES, THOROUGH_ONES, Tier

ROOT = Path(__file__).resolve().parents[3]
FILES = sorted(str(file.relative_to(ROOT)) for file in (ROOT / "tests").rglob("test_*.py"))


def parts_of(file):
    """Return which marks are run of a file, and in which tier."""
    return sorted(
        (part.marks, str(part.tier))
        for part in PARTS
        if any(file == path or file.startswith(f"{path}/") for path in part.paths)
    )


def test_each_test_is_in_exactly_one_part():
    whole = [("", "quick")], [("", "thorough")]
    short, both = [(QUICK_ONES, "quick")], [(QUICK_ONES, "quick"), (THOROUGH_ONES, "thorough")]

    def is_covered(file):
        marked = "mark.thorough" in (ROOT / file).read_text()
        return parts_of(file) in [*whole, both, *([] if marked else [short])]

    assert [file for file in FILES if not is_covered(file)] == []


def test_commits_choose_every_long_part_about_as_often():
    chosen = Counter(slice_of(f"{number * 0x9E3779B97F4A7C15 % (1 << 64):040x}"[::-1]).name for number in range(2000))
    thorough = [part.name for part in PARTS if part.tier is Tier.THOROUGH]

    assert set(chosen) == set(thorough)
    assert min(chosen.values()) > 2000 / len(thorough) / 2


@pytest.mark.parametrize("skip", ALLOWED, ids=lambda skip: skip.file)
def test_a_skip_that_is_allowed_is_still_there(skip):
    kit = "".join(file.read_text() for file in (ROOT / "tests" / "kit").glob("*_servers.py"))

    assert skip.said in (ROOT / skip.file).read_text() + kit
