"""The suite's table: no test is left out, no test runs twice, and every thorough test has its turn."""

from pathlib import Path

import pytest

from tests.kit.skips import ALLOWED
from tests.suite.__main__ import SHARDS
from tests.suite.parts import PARTS, QUICK_ONES, THOROUGH_ONES, Tier
from tests.suite.plugin import shard

ROOT = Path(__file__).resolve().parents[3]
FILES = sorted(str(file.relative_to(ROOT)) for file in (ROOT / "tests").rglob("test_*.py"))


def is_in(file, paths):
    return any(file == path or file.startswith(f"{path}/") for path in paths)


def parts_of(file):
    """Return the marks and tiers of the parts that run a file."""
    return sorted(
        (part.marks, str(part.tier)) for part in PARTS if is_in(file, part.paths) and not is_in(file, part.but)
    )


def test_each_test_is_in_exactly_one_part():
    whole = [("", "quick")], [("", "thorough")]
    short, both = [(QUICK_ONES, "quick")], [(QUICK_ONES, "quick"), (THOROUGH_ONES, "thorough")]

    def is_covered(file):
        marked = "mark.thorough" in (ROOT / file).read_text()
        return parts_of(file) in [*whole, both, *([] if marked else [short])]

    assert [file for file in FILES if not is_covered(file)] == []


def test_each_quick_part_has_a_budget():
    assert [part.name for part in PARTS if part.tier is Tier.QUICK and not part.budget_cpu_s] == []


@pytest.mark.parametrize(("num_tests", "count"), [(0, 3), (2, 3), (100, 1), (100, 7)])
def test_each_test_is_in_one_shard_and_shards_are_of_one_size(num_tests, count):
    names = [f"file_{number % 5}::test_{number}" for number in range(num_tests)]
    shards = [shard(names[::-1], number, count) for number in range(count)]

    assert sorted(name for one in shards for name in one) == sorted(names)
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


def test_consecutive_turns_run_every_shard_of_every_thorough_part():
    wanted = {(part.name, number) for part in PARTS if part.tier is Tier.THOROUGH for number in range(part.shards)}

    assert {(part.name, number) for part, number in SHARDS} == wanted
    assert len(SHARDS) == len(wanted)


@pytest.mark.parametrize("skip", ALLOWED, ids=lambda skip: skip.file)
def test_a_skip_that_is_allowed_is_still_there(skip):
    kit = "".join(file.read_text() for file in (ROOT / "tests" / "kit").glob("*_servers.py"))

    assert skip.said in (ROOT / skip.file).read_text() + kit
