"""What Envoy checks keys with follows the key file; a file that cannot be read changes nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gateway.envoy.keys import discovered, watched_keys
from gateway.envoy.settings import EnvoySettings
from gateway.tenants.keys import hash_key
from tests.kit.gateway_parts import write_keys


@pytest.fixture
def keys_file(tmp_path):
    write_keys(tmp_path / "keys.json", {"first": "demo"})
    return tmp_path / "keys.json"


@pytest.fixture
def settings(tmp_path, keys_file):
    return EnvoySettings(
        gateways=["gw:1,gw:2"], pods=["pod:3"], api_keys_file=str(keys_file), config_dir=str(tmp_path / "made")
    )


@pytest.fixture
def filter_file(settings):
    return Path(settings.api_keys_filter_file)


@pytest.fixture
def watch(settings):
    return watched_keys(settings)


def of(*keys: str) -> str:
    return json.dumps(discovered(hash_key(key) for key in keys))


def test_the_filter_is_there_at_once_and_follows_the_file(watch, keys_file, filter_file):
    before = filter_file.read_text()
    write_keys(keys_file, {"second": "demo", "third": "other"})
    watch.look()

    assert before == of("first")
    assert filter_file.read_text() == of("third", "second")
    assert list(filter_file.parent.iterdir()) == [filter_file]


def test_a_look_at_the_same_file_writes_nothing(watch, filter_file):
    before = filter_file.stat().st_mtime_ns, filter_file.stat().st_ino
    watch.look()

    assert (filter_file.stat().st_mtime_ns, filter_file.stat().st_ino) == before


def test_a_broken_or_missing_file_keeps_the_last_good_keys_and_is_told_once(watch, keys_file, filter_file, caplog):
    keys_file.write_text("{")
    for _ in range(3):
        watch.look()
    keys_file.unlink()
    for _ in range(3):
        watch.look()

    assert filter_file.read_text() == of("first")
    assert len(caplog.records) == 2

    write_keys(keys_file, {"second": "demo"})
    watch.look()

    assert filter_file.read_text() == of("second")


def test_what_could_not_be_written_is_written_at_the_next_look(watch, keys_file, filter_file):
    write_keys(keys_file, {"second": "demo"})
    filter_file.with_suffix(".new").mkdir()
    watch.look()
    filter_file.with_suffix(".new").rmdir()
    watch.look()

    assert filter_file.read_text() == of("second")


def test_without_a_good_file_there_is_no_watch(keys_file, settings):
    keys_file.write_text("{}")

    with pytest.raises(ValueError, match="keys"):
        watched_keys(settings)


def test_no_key_and_no_tenant_reaches_envoy(watch, filter_file):
    text = filter_file.read_text()

    assert hash_key("first") in text
    assert "demo" not in text
