"""What all tests share: one seed, an event loop, and that none is skipped in silence."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from deploy import client_sources
from tests.kit.seed import SEED, VARIABLE
from tests.kit.skips import unlisted_skip

# How long an example takes, or its making, says something about the machine, not about the code.
settings.register_profile("any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any-machine")
# Workers, processes of ours, and a run that goes on past midnight have the same.
os.environ[VARIABLE] = str(SEED)

_LOOP = pytest.StashKey[asyncio.AbstractEventLoop]()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Bring generated sources up to date, seed what draws, and give the main thread an event loop of ours.

    pytest-asyncio asks for the current loop around its own ones; without one, Python 3.11 makes a loop that nobody
    closes, and its ResourceWarning is an error at the end of the run.
    """
    client_sources.write()
    if config.getoption("randomly_seed", None) == "default":
        config.option.randomly_seed = SEED
    if config.getoption("hypothesis_seed", None) is None:
        config.option.hypothesis_seed = str(SEED)
    loop = config.stash[_LOOP] = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)


@pytest.hookimpl(tryfirst=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Close it before pytest looks for what was left open."""
    asyncio.set_event_loop(None)
    config.stash[_LOOP].close()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how to see the same again."""
    terminalreporter.write_line(f"seed of the day: {SEED} ({VARIABLE}={SEED} repeats it)")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Let a test fail that was skipped, or expected to fail, and is not listed."""
    report = yield
    return _unless_unlisted(report)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """Let a file or class fail that was skipped as a whole and is not listed."""
    report = yield
    return _unless_unlisted(report)


def _unless_unlisted(report):
    why = unlisted_skip(report)
    if why is not None:
        report.outcome = "failed"
        report.longrepr = why
        report.__dict__.pop("wasxfail", None)
    return report
