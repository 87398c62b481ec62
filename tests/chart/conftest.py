"""Fixtures of the chart's tests: both versions of Helm, fetched when they are missing, and clusters to install into."""

from __future__ import annotations

import pytest

from deploy.chart.tools import Helm, fetch
from tests.chart.clusters import running_cluster
from tests.chart.rendering import EACH_HELM
from tests.kit.kube_servers import SERVERS


@pytest.fixture(scope="session", autouse=True)
def _helm() -> None:
    fetch()


@pytest.fixture(params=SERVERS)
def cluster(request):
    with running_cluster(request.param) as cluster:
        yield cluster


@pytest.fixture(params=EACH_HELM, ids=lambda helm: helm.version)
def helm(request) -> Helm:
    return request.param
