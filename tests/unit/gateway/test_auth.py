"""Keys belong to tenants, and the file may change under a running gateway."""

import json
import os

import pytest
from prometheus_client import CollectorRegistry

from contextcache.clock import ManualClock
from contextcache.errors import Unauthorized
from gateway.auth import KeyFile, SingleTenant, hash_key
from gateway.metrics import Metrics
from tests.helpers.gateway_parts import KEY, OTHER_KEY, write_keys


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def metrics():
    return Metrics(CollectorRegistry())


@pytest.fixture
def keys(tmp_path, clock, metrics):
    write_keys(tmp_path / "keys.json", {KEY: "demo", OTHER_KEY: "other"})
    return KeyFile(tmp_path / "keys.json", clock=clock, metrics=metrics)


def test_each_key_is_its_tenants(keys):
    assert keys.tenant_of(f"Bearer {KEY}") == "demo"
    assert keys.tenant_of(f"bearer  {OTHER_KEY} ") == "other"


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", f"Basic {KEY}", KEY, "Bearer nobody", f"Bearer {KEY}, Bearer {KEY}"]
)
def test_anything_else_is_unauthorized_and_counted(keys, metrics, header):
    with pytest.raises(Unauthorized):
        keys.tenant_of(header)

    assert metrics.registry.get_sample_value("contextcache_gateway_auth_failures_total") == 1


def test_the_hash_in_the_file_is_no_key(keys):
    with pytest.raises(Unauthorized):
        keys.tenant_of(f"Bearer {hash_key(KEY)}")


def test_a_changed_file_counts_after_a_second(keys, tmp_path, clock):
    write_keys(tmp_path / "keys.json", {"a-new-key": "demo"})

    assert keys.tenant_of(f"Bearer {KEY}") == "demo"
    clock.advance(s=1)
    with pytest.raises(Unauthorized):
        keys.tenant_of(f"Bearer {KEY}")
    assert keys.tenant_of("Bearer a-new-key") == "demo"


def test_a_replaced_file_of_the_same_size_and_time_counts(keys, tmp_path, clock):
    path = tmp_path / "keys.json"
    before = path.stat()
    write_keys(tmp_path / "next.json", {KEY: "else", OTHER_KEY: "othe2"})
    os.utime(tmp_path / "next.json", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (tmp_path / "next.json").stat().st_size == before.st_size
    (tmp_path / "next.json").replace(path)
    clock.advance(s=1)

    assert keys.tenant_of(f"Bearer {KEY}") == "else"


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"keys": {}}', '{"keys": [{"sha256": "abc", "tenant": "demo"}]}', None]
)
def test_a_broken_or_vanished_file_keeps_the_last_good_keys(keys, tmp_path, clock, metrics, content):
    path = tmp_path / "keys.json"
    path.unlink() if content is None else path.write_text(content)
    clock.advance(s=1)

    assert keys.tenant_of(f"Bearer {KEY}") == "demo"
    assert metrics.registry.get_sample_value("contextcache_gateway_key_reload_failures_total") == 1


def test_a_repaired_file_counts_again(keys, tmp_path, clock):
    (tmp_path / "keys.json").write_text("{")
    clock.advance(s=1)
    keys.tenant_of(f"Bearer {KEY}")
    write_keys(tmp_path / "keys.json", {"a-new-key": "third"})
    clock.advance(s=1)

    assert keys.tenant_of("Bearer a-new-key") == "third"


@pytest.mark.parametrize("tenant", ["", "a:b", "x" * 65, 7, None])
def test_a_tenant_that_is_no_tenant_is_refused_at_the_start(tmp_path, clock, metrics, tenant):
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"keys": [{"sha256": hash_key(KEY), "tenant": tenant}]}))

    with pytest.raises(ValueError, match="key 1"):
        KeyFile(path, clock=clock, metrics=metrics)


def test_without_keys_everybody_is_the_default_tenant():
    assert SingleTenant().tenant_of(None) == "default"
