"""`python -m tests.torture` itself: which runs, which seed, what makes it fail."""

import json
import sys
from types import ModuleType

import pytest

from tests.torture.__main__ import main
from tests.torture.report import Options, Report


@pytest.fixture
def torture(monkeypatch, tmp_path):
    """Run the command with runs that are functions of a test; return exit status and JSON."""

    def call(*arguments, **runs):
        for name, run in runs.items():
            module = ModuleType(f"tests.torture.{name}")
            module.run = run
            monkeypatch.setitem(sys.modules, module.__name__, module)
        names = [word for name in runs for word in ("--only", name)]
        status = main([*names, "--json", str(tmp_path / "out.json"), *arguments])
        return status, json.loads((tmp_path / "out.json").read_text())

    return call


def test_a_run_gets_the_seed_and_its_figures_are_printed_and_written(torture, capsys):
    def run(options: Options):
        return Report("tenants", {"calls": options.turns, "first": options.random("tenants").randrange(10**9)})

    status, written = torture("--seed", "7", "--turns", "20", tenants=run)

    assert status == 0
    assert written["seed"] == 7
    (found,) = written["runs"]
    assert (found["name"], found["rows"]["calls"], found["failures"]) == ("tenants", 20, [])
    assert found["rows"]["first"] == Options(7).random("tenants").randrange(10**9)
    assert str(found["rows"]["first"]) in capsys.readouterr().out


def test_without_a_seed_one_is_drawn_and_printed(torture, capsys):
    _, written = torture(tenants=lambda _: Report("tenants"))

    assert f"seed {written['seed']}" in capsys.readouterr().out


def test_one_failure_makes_the_whole_fail_and_the_others_still_run(torture, capsys):
    def broken(_):
        raise RuntimeError("broke off")

    async def failing(_):
        return Report("races", failures=["a turn was lost"])

    status, written = torture(tenants=broken, races=failing, orphans=lambda _: Report("orphans"))

    assert status == 1
    assert [bool(run["failures"]) for run in written["runs"]] == [True, True, False]
    printed = capsys.readouterr().out
    assert "broke off" in printed
    assert "a turn was lost" in printed


def test_the_same_seed_gives_each_run_its_own_choices():
    assert Options(1).random("a").random() == Options(1).random("a").random()
    assert len({Options(seed).random(name).random() for seed in (1, 2) for name in ("a", "b")}) == 4
