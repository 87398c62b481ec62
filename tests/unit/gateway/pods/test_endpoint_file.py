"""Pods come, drain and go with a file; a broken one changes nothing."""

import json

import pytest
from prometheus_client import CollectorRegistry

from gateway.metrics import Metrics
from gateway.pods.state import Endpoint
from gateway.pods.static import endpoint_file

A = {"name": "a", "url": "http://a:8001/", "sidecar": "a:9001"}


@pytest.fixture
def metrics():
    return Metrics(CollectorRegistry())


@pytest.fixture
def path(tmp_path):
    return tmp_path / "endpoints.json"


def replace(path, content):
    """Replace the file as a whole, as a mounted ConfigMap is."""
    new = path.with_suffix(".new")
    new.write_text(content if isinstance(content, str) else json.dumps(content))
    new.rename(path)


def num_failures(metrics):
    return metrics.registry.get_sample_value("contextcache_gateway_endpoint_reload_failures_total")


def changed(file):
    return file.value if file.look() else None


def test_a_file_says_what_the_settings_would(path, metrics):
    replace(path, [{**A, "turn_url": "http://a:8010/"}, {"name": "b", "url": "https://b", "draining": True}])

    assert endpoint_file(path, metrics).value == (
        Endpoint("a", "http://a:8001", "a:9001", turn_url="http://a:8010"),
        Endpoint("b", "https://b", draining=True),
    )


def test_only_a_change_is_told_and_only_once(path, metrics):
    replace(path, [A])
    file = endpoint_file(path, metrics)

    assert changed(file) is None
    replace(path, [{**A, "draining": True}])
    assert changed(file) == (Endpoint("a", "http://a:8001", "a:9001", draining=True),)
    assert changed(file) is None
    replace(path, [])
    assert changed(file) == ()


BROKEN = [
    "",
    "[",
    "{}",
    '[{"name": "a"}]',
    '[{"name": "a", "url": "a:80"}]',
    '[{"name": "a/b", "url": "http://a"}]',
    '[{"name": "a", "url": "http://a", "surprise": 1}]',
    '[{"name": "a", "url": "http://a"}, {"name": "a", "url": "http://b"}]',
    "[" * 100_000,
    "[]" + " " * (4 << 20),
]


@pytest.mark.parametrize("content", BROKEN, ids=range(len(BROKEN)))
def test_a_broken_file_is_refused_at_the_start_and_ignored_later(path, metrics, content):
    replace(path, [A])
    file = endpoint_file(path, metrics)
    replace(path, content)

    assert (changed(file), changed(file)) == (None, None)
    assert [endpoint.name for endpoint in file.value] == ["a"]
    assert num_failures(metrics) == 1
    with pytest.raises(ValueError, match="endpoints"):
        endpoint_file(path, metrics)


def test_a_file_that_is_away_for_a_while_changes_nothing(path, metrics):
    replace(path, [A])
    file = endpoint_file(path, metrics)
    path.unlink()

    assert (changed(file), num_failures(metrics)) == (None, 1)
    replace(path, [])
    assert changed(file) == ()


def test_without_a_file_there_is_no_start(path, metrics):
    with pytest.raises(FileNotFoundError):
        endpoint_file(path, metrics)
