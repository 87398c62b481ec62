"""Plugin of pytest: tells the suite which tests there were, how long each took and what failed, and stops in time."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("suite")
    group.addoption("--record", metavar="FILE", help="write there what was run, as JSON")
    group.addoption("--stop-at", type=float, metavar="TIME", help="begin no further test after this Unix time")


def pytest_configure(config: pytest.Config) -> None:
    worker = hasattr(config, "workerinput")
    if config.getoption("--record") and not worker:
        config.pluginmanager.register(_Recorder(Path(config.getoption("--record"))))
    if config.getoption("--stop-at") and (worker or not config.getoption("numprocesses")):
        config.pluginmanager.register(_Bound(config.getoption("--stop-at")))


class _Recorder:
    def __init__(self, file: Path) -> None:
        self._file = file
        self._collected: set[str] = set()
        self._seconds: dict[str, float] = defaultdict(float)
        self._failed: set[str] = set()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._collected |= {item.nodeid for item in session.items}

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self._collected |= set(ids)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration
        self._note(report)

    def _note(self, report: pytest.CollectReport | pytest.TestReport) -> None:
        if report.failed:
            self._failed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        told = {
            "seconds": {test: round(seconds, 2) for test, seconds in self._seconds.items()},
            "failed": sorted(self._failed),
            "unreached": sorted(self._collected - set(self._seconds)),
        }
        self._file.write_text(json.dumps(told, indent=1))


class _Bound:
    def __init__(self, stop_at: float) -> None:
        self._stop_at = stop_at
        self._session: pytest.Session | None = None

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self._session = session

    def pytest_runtest_logfinish(self) -> None:
        if self._session is not None and time.time() > self._stop_at:
            self._session.shouldstop = "the time is up"
