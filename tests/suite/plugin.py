"""pytest plugin of the suite: runs one shard of the tests, stops in time, and names the tests that it did not reach."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

import pytest


def shard(names: Sequence[str], number: int, count: int) -> set[str]:
    """Return shard `number` of `count`, a run of neighbours: tests of one file share what the file starts.

    The shards of a count are disjoint, cover all names and differ in size by one at most.
    """
    names = sorted(names)
    return set(names[len(names) * number // count : len(names) * (number + 1) // count])


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("suite")
    group.addoption("--shard", metavar="K/N", help="run shard K of N, counted from 0")
    group.addoption("--stop-at", type=float, metavar="TIME", help="begin no further test after this Unix time")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Reached(config))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the other shards, after `-m` has deselected its own."""
    if config.getoption("--shard"):
        number, count = map(int, config.getoption("--shard").split("/"))
        chosen = shard([item.nodeid for item in items], number, count)
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in chosen])
        items[:] = [item for item in items if item.nodeid in chosen]


class _Reached:
    """Compares the tests that were collected with those that ran."""

    def __init__(self, config: pytest.Config) -> None:
        self._stop_at: float | None = config.getoption("--stop-at")
        self._is_worker = hasattr(config, "workerinput")
        self._collected: set[str] = set()
        self._ran: set[str] = set()
        self._session: pytest.Session | None = None

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self._session = session

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._collected |= {item.nodeid for item in session.items}

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self._collected |= set(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._ran.add(report.nodeid)

    def pytest_runtest_logfinish(self) -> None:
        if self._stop_at is not None and self._session is not None and time.time() > self._stop_at:
            self._session.shouldstop = "the time is up"

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        unreached = Counter(test.partition("[")[0] for test in self._collected - self._ran)
        if unreached and self._stop_at is not None and not self._is_worker:
            terminalreporter.write_sep("=", f"out of time: {unreached.total()} tests were not reached")
            for test, count in sorted(unreached.items()):
                terminalreporter.write_line(f"{test} ({count})" if count > 1 else test)
