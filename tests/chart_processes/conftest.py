"""One running release for each class of tests: class attribute `tls` says which."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.local.model import prepare_model
from tests.chart.rendering import Release
from tests.kit.rendered.cluster import Cluster, running_cluster
from tests.kit.rendered.front import Front
from tests.kit.rendered.installation import install
from tests.kit.rendered.scenario import MODEL, Scenario, scenario


@pytest.fixture(scope="class")
def scene(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Scenario:
    """What is installed."""
    models: Path = tmp_path_factory.mktemp("models")
    (models / MODEL).symlink_to(prepare_model())
    return scenario(models, tls=request.cls.tls)


@pytest.fixture(scope="class")
def started(scene: Scenario, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The release, all of whose pods have been ready."""
    # A short name: the path of a Unix socket has room for 107 bytes.
    with running_cluster(install(Release(scene.values)), scene.given, tmp_path_factory.mktemp("r")) as cluster:
        cluster.start()
        yield cluster


@pytest.fixture
def cluster(started: Cluster) -> Cluster:
    """The release, whole: every pod is ready, also when the test before has left it in pieces."""
    started.restart_ended()
    started.wait_ready()
    return started


@pytest.fixture
def front(cluster: Cluster, scene: Scenario) -> Iterator[Front]:
    """A client, once requests reach a pod."""
    client = Front(cluster, scene.front_ca)
    with client.http:
        client.wait_served()
        yield client
