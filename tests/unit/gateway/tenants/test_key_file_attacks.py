"""A key file in every state it can be found in: never a crash, never other keys than the last good ones."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from contextcache.errors import Unauthorized
from gateway.metrics import Metrics
from gateway.tenants.keys import KeyFile, hash_key
from tests.kit.gateway_parts import KEY, write_keys

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)
ENTRY = st.fixed_dictionaries(
    {}, optional={"sha256": JSON | st.just(hash_key(KEY)) | st.text("0123456789abcdefGﬀ", max_size=66), "tenant": JSON}
)
FILES = (
    st.binary(max_size=120)
    | JSON.map(lambda value: json.dumps(value).encode())
    | st.lists(ENTRY, max_size=5).map(lambda entries: json.dumps({"keys": entries}).encode())
    | st.fixed_dictionaries({"keys": JSON}).map(lambda value: json.dumps(value).encode("utf-16"))
)


class Watched:
    """A key file, and a gateway's view of it after a look."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = Metrics(CollectorRegistry())
        self.keys = KeyFile(path, metrics=self.metrics)

    def tenant(self, key: str) -> str | None:
        self.keys.file.look()
        try:
            return self.keys.caller_of({"authorization": f"Bearer {key}"}).tenant
        except Unauthorized:
            return None

    @property
    def failures(self) -> float:
        return self.metrics.registry.get_sample_value("contextcache_gateway_key_reload_failures_total")


class Unlistable(dict):
    """What can be asked for one key, and not for all."""

    def __iter__(self):
        raise AssertionError("all keys were looked at")

    items = keys = values = __iter__


@pytest.fixture
def watched(tmp_path):
    write_keys(tmp_path / "keys.json", {KEY: "demo"})
    return Watched(tmp_path / "keys.json")


@settings(max_examples=300, deadline=None)
@given(st.lists(FILES, min_size=1, max_size=4))
def test_no_content_is_a_crash_and_a_bad_one_leaves_the_last_good_keys(contents):
    """Seen failing without `ValueError` in the reload, and with the keys cleared before a file is read."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "keys.json"
        write_keys(path, {KEY: "demo"})
        watched = Watched(path)
        good = {KEY: "demo"}
        for content in contents:
            path.write_bytes(content)
            found = watched.tenant(KEY)
            if watched.failures:
                assert found == good[KEY]
                return
            # It could be read: then it says what it says.
            good = {KEY: next((e["tenant"] for e in json.loads(content)["keys"] if e["sha256"] == hash_key(KEY)), None)}
            assert found == good[KEY]


def test_a_file_cut_anywhere_leaves_the_last_good_keys(watched):
    write_keys(watched.path.with_name("next"), {KEY: "else", "another": "third"})
    whole = watched.path.with_name("next").read_bytes()
    for length in range(len(whole)):
        watched.path.write_bytes(whole[:length])

        assert watched.tenant(KEY) == "demo"
    watched.path.write_bytes(whole)
    assert watched.tenant(KEY) == "else"


def test_a_file_found_half_written_counts_once_it_is_whole_though_nothing_else_about_it_changed(watched):
    """Seen failing when the version of a file that could not be read was remembered: `demo` for ever."""
    write_keys(watched.path.with_name("next"), {KEY: "else"})
    whole = watched.path.with_name("next").read_bytes()
    watched.path.write_bytes(whole[:-9] + b" " * 9)
    found = watched.path.stat()

    assert watched.tenant(KEY) == "demo"
    watched.path.write_bytes(whole)
    os.utime(watched.path, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert watched.tenant(KEY) == "else"


def test_a_file_that_stays_broken_is_told_once(watched, caplog):
    watched.path.write_text("{")
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            assert watched.tenant(KEY) == "demo"

    assert (watched.failures, len(caplog.records)) == (1, 1)


def test_a_key_is_found_by_its_digest_and_compared_with_no_other(tmp_path):
    """Seen failing before: each of the thousand was compared, 6 ms of the loop for a hundred thousand."""
    write_keys(tmp_path / "keys.json", {f"key-{number}": f"tenant-{number % 7}" for number in range(1000)})
    watched = Watched(tmp_path / "keys.json")
    watched.keys.file.value.callers = Unlistable(watched.keys.file.value.callers)

    for key, tenant in (("key-0", "tenant-0"), ("key-999", "tenant-5"), ("nobodys", None)):
        assert watched.tenant(key) == tenant


def test_one_key_of_two_tenants_is_refused_and_twice_of_one_is_not(watched):
    """Seen failing before: the last line won, and one tenant was given the other's contexts."""
    mine = {"sha256": hash_key(KEY), "tenant": "demo"}
    watched.path.write_text(json.dumps({"keys": [mine, mine, {"sha256": hash_key("b"), "tenant": "b"}]}))

    assert (watched.tenant("b"), watched.tenant(KEY)) == ("b", "demo")
    upper = {"sha256": hash_key(KEY).upper(), "tenant": "other"}
    watched.path.write_text(json.dumps({"keys": [mine, upper]}))
    assert (watched.tenant("b"), watched.tenant(KEY), watched.failures) == ("b", "demo", 1)


def test_a_name_twice_in_one_object_is_refused(watched):
    digest = hash_key(KEY)
    for text in (
        f'{{"keys": [{{"sha256": "{digest}", "tenant": "a", "tenant": "b"}}]}}',
        f'{{"keys": [], "keys": [{{"sha256": "{digest}", "tenant": "b"}}]}}',
    ):
        watched.path.write_text(text)

        assert watched.tenant(KEY) == "demo"


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["directory", "pipe", "endless", "loop"])
def test_what_is_no_file_leaves_the_last_good_keys_and_stops_nothing(watched, kind):
    """Seen failing for the pipe with `read_bytes`: the gateway stood still."""
    watched.path.unlink()
    if kind == "directory":
        watched.path.mkdir()
    elif kind == "pipe":
        os.mkfifo(watched.path)
    else:
        watched.path.symlink_to("/dev/zero" if kind == "endless" else watched.path)

    assert watched.tenant(KEY) == "demo"
    assert watched.failures == 1


def test_a_directory_in_the_files_place_costs_no_descriptor_a_look(watched):
    """Seen failing with `os.fdopen`, which does not close what it refuses: one a second until none are left."""
    watched.path.unlink()
    watched.path.mkdir()
    assert watched.tenant(KEY) == "demo"
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(10):
        assert watched.tenant(KEY) == "demo"

    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_file_beyond_all_measure_is_not_read_to_its_end(watched):
    with watched.path.open("wb") as file:
        file.truncate(1 << 40)

    assert watched.tenant(KEY) == "demo"


def test_what_is_logged_of_a_broken_file_is_not_what_is_in_it(watched, caplog):
    watched.path.write_text(json.dumps({"keys": [{"sha256": "a-secret-of-mine", "tenant": "a secret tenant"}]}))
    with caplog.at_level(logging.DEBUG):
        watched.tenant(KEY)
    told = str([vars(record) for record in caplog.records])

    assert "key 1" in told
    assert "secret" not in told
