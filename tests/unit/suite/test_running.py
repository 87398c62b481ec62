"""What is run again, what is not, and what a skip costs."""

from types import SimpleNamespace

import pytest

from tests.kit.skips import ALLOWED, unlisted_skip
from tests.suite import __main__ as suite
from tests.suite.parts import PARTS, Tier
from tests.suite.run import Outcome

NAMES = [part.name for part in PARTS]


@pytest.fixture
def ran(monkeypatch, tmp_path):
    """Names and seeds of what was run; those in `failing` fail."""
    seen = []

    def run_part(part, *, seed, within_s=None, **_how):
        seen.append((part.name, seed))
        limits.append(within_s)
        return Outcome(part.name, "failed" if part.name in seen_failing else "passed", 1.0, 1.0)

    seen_failing: set[str] = set()
    limits: list[float | None] = []

    class Lane:
        def __init__(self, parts, *, seed, keep_going):
            self.told = [run_part(part, seed=seed) for part in parts]

        def stop(self):
            self.told = []

        def outcomes(self):
            return self.told

    monkeypatch.setattr(suite, "run_part", run_part)
    monkeypatch.setattr(suite, "Lane", Lane)
    monkeypatch.setattr(suite, "FILE", tmp_path / "state.json")
    monkeypatch.setattr(suite, "tree_id", lambda: "tree")
    monkeypatch.delenv("SEED", raising=False)
    return SimpleNamespace(parts=seen, failing=seen_failing, limits=limits)


def test_what_has_passed_with_these_files_is_not_run_again(ran):
    ran.failing.add("fuzz")
    assert suite.main(["all"]) == 1
    assert [name for name, _ in ran.parts] == NAMES
    ran.failing.clear()
    ran.parts.clear()

    assert suite.main(["all"]) == 0
    assert [name for name, _ in ran.parts] == ["fuzz"]
    assert suite.main(["all", "--part", "unit", "--again"]) == 0
    assert [name for name, _ in ran.parts] == ["fuzz", "unit"]


def test_another_tree_begins_anew_and_a_run_that_goes_on_keeps_its_seed(ran, monkeypatch):
    suite.main(["all", "--part", "unit"])
    monkeypatch.setattr(suite, "SEED", 7)
    suite.main(["all", "--part", "unit", "--part", "fuzz"])
    monkeypatch.setattr(suite, "tree_id", lambda: "another")
    suite.main(["all", "--part", "unit"])

    (_, first), second, third = ran.parts
    assert second == ("fuzz", first)
    assert third == ("unit", 7)


def test_a_run_is_of_the_quick_parts_and_a_slice_of_one_of_the_others(ran):
    assert suite.main([]) == 0
    quick = [part for part in PARTS if part.tier is Tier.QUICK]
    first, *others = (part.name for part in quick if not part.beside)
    assert [name for name, _ in ran.parts] == [first, *(part.name for part in quick if part.beside), *others]
    ran.parts.clear()

    assert suite.main(["slice"]) == 0
    ((name, _),) = ran.parts
    assert name in {part.name for part in PARTS if part.tier is Tier.THOROUGH}


@pytest.mark.parametrize(("left_s", "within_s"), [(-3, None), (59, None), (100, 100), (900, suite.SLICE_S)])
def test_a_slice_takes_what_is_left_and_is_none_where_that_is_too_little(ran, left_s, within_s):
    assert suite.main(["slice", "--within-s", str(left_s)]) == 0

    assert ran.limits == ([] if within_s is None else [within_s])


def test_no_is_said_soon(ran):
    ran.failing.add("chart")
    assert suite.main([]) == 1
    assert [name for name, _ in ran.parts] == ["unit", "vllm", "faults", "chart"]

    assert suite.main(["--keep-going"]) == 1
    assert len(ran.parts) > 4


def report(file, longrepr, **more):
    return SimpleNamespace(nodeid=f"{file}::test_x", skipped=True, longrepr=longrepr, **more)


def test_a_skip_that_is_listed_is_one_and_any_other_is_a_failure():
    listed = ALLOWED[0]

    assert unlisted_skip(report(listed.file, ("x.py", 1, f"Skipped: {listed.said}"))) is None
    assert "not on the list" in unlisted_skip(report("tests/unit/test_x.py", ("x.py", 1, f"Skipped: {listed.said}")))
    assert "another" in unlisted_skip(report(listed.file, ("x.py", 1, "Skipped: another")))
    assert "xfail: slow" in unlisted_skip(report(listed.file, "", wasxfail="slow"))
    assert unlisted_skip(SimpleNamespace(nodeid="a", skipped=False)) is None
