"""What the tests of the chart share: both versions of Helm, fetched when they are missing."""

from __future__ import annotations

import pytest

from deploy.chart.tools import fetch


@pytest.fixture(scope="session", autouse=True)
def _helm() -> None:
    fetch()
