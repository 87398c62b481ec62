"""What all tests share."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes, or its making, says something about the machine, not about the code.
settings.register_profile("any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any-machine")

_LOOP = pytest.StashKey[asyncio.AbstractEventLoop]()


def pytest_configure(config: pytest.Config) -> None:
    """Give the main thread an event loop of ours.

    pytest-asyncio asks for the current loop around its own ones; without one, Python 3.11 makes a loop that nobody
    closes, and its ResourceWarning is an error at the end of the run.
    """
    loop = config.stash[_LOOP] = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)


@pytest.hookimpl(tryfirst=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Close it before pytest looks for what was left open."""
    asyncio.set_event_loop(None)
    config.stash[_LOOP].close()
