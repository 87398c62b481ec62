"""Keys belong to tenants, and the file may change under a running gateway."""

import hashlib
import json
import os

import pytest
from prometheus_client import CollectorRegistry

from contextcache.errors import Unauthorized
from contextcache.model import ContextMode, UsageFormat
from gateway.metrics import Metrics
from gateway.tenants.keys import Caller, KeyFile, SingleTenant, hash_key
from tests.kit.gateway_parts import KEY, OTHER_KEY, write_keys


@pytest.fixture
def metrics():
    return Metrics(CollectorRegistry())


@pytest.fixture
def keys(tmp_path, metrics):
    write_keys(tmp_path / "keys.json", {KEY: "demo", OTHER_KEY: "other"})
    return KeyFile(tmp_path / "keys.json", metrics=metrics)


def tenant(keys, key):
    return keys.caller_of({"authorization": f"Bearer {key}"}).tenant


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": f"Bearer {OTHER_KEY}"},
        {"authorization": f"bearer  {OTHER_KEY} "},
        {"x-api-key": OTHER_KEY},
        {"x-api-key": f" {OTHER_KEY} ", "authorization": f"Bearer {OTHER_KEY}"},
    ],
)
def test_a_key_is_its_tenants_in_either_header_and_in_both(keys, headers):
    """Seen failing before: `X-Api-Key` was nothing."""
    assert keys.caller_of(headers).tenant == "other"


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", f"Basic {KEY}", KEY, "Bearer nobody", f"Bearer {KEY}, Bearer {KEY}"]
)
def test_anything_else_is_unauthorized_and_counted(keys, metrics, header):
    with pytest.raises(Unauthorized):
        keys.caller_of({} if header is None else {"authorization": header})

    assert metrics.registry.get_sample_value("contextcache_gateway_auth_failures_total") == 1


@pytest.mark.parametrize("header", ["", f"Bearer {KEY}", "nobody", f"{KEY}, {KEY}", OTHER_KEY])
def test_headers_that_disagree_or_come_twice_are_no_key(keys, header):
    """Seen failing before: whichever was read decided."""
    with pytest.raises(Unauthorized):
        keys.caller_of({"authorization": f"Bearer {KEY}", "x-api-key": header})
    for alone in {header} - {OTHER_KEY}:
        with pytest.raises(Unauthorized):
            keys.caller_of({"x-api-key": alone})


@pytest.mark.parametrize("space", ["\xa0", "\u2003", "\x85", "\u2028"])
def test_a_space_of_another_alphabet_is_part_of_a_key_here_as_in_envoy(keys, space):
    """Seen failing before: the gateway took such a key, Envoy's check refused it."""
    for headers in ({"authorization": f"Bearer {space}{KEY}"}, {"x-api-key": KEY + space}):
        with pytest.raises(Unauthorized):
            keys.caller_of(headers)


def test_what_two_headers_say_together_is_nobodys_key(tmp_path, metrics):
    """Seen failing when a key may have a comma: `X-Api-Key: a` and `X-Api-Key: b` were the key `a, b`."""
    with pytest.raises(ValueError, match="comma"):
        hash_key("a, b")
    entry = {"sha256": hashlib.sha256(b"a, b").hexdigest(), "tenant": "demo"}
    (tmp_path / "keys.json").write_text(json.dumps({"keys": [entry]}))
    keys = KeyFile(tmp_path / "keys.json", metrics=metrics)
    for headers in ({"x-api-key": "a, b"}, {"authorization": "Bearer a, b"}):
        with pytest.raises(Unauthorized):
            keys.caller_of(headers)


def test_a_key_may_say_how_its_prompts_are_read(tmp_path, metrics):
    entries = [
        {"sha256": hash_key(key), "tenant": "demo", **more}
        for key, more in (
            ("a", {}),
            ("b", {"context_mode": None}),
            ("c", {"context_mode": "replay"}),
            ("d", {"context_mode": "append"}),
            ("e", {"context_mode": "auto"}),
        )
    ]
    (tmp_path / "keys.json").write_text(json.dumps({"keys": entries}))
    keys = KeyFile(tmp_path / "keys.json", metrics=metrics)

    assert [keys.caller_of({"x-api-key": key}).context_mode for key in "abcde"] == [
        None,
        None,
        ContextMode.REPLAY,
        ContextMode.APPEND,
        ContextMode.AUTO,
    ]


def test_a_key_may_say_how_its_usage_counts(tmp_path, metrics):
    said = {"a": {}, "b": {"usage": "openai"}, "c": {"usage": "context"}}
    entries = [{"sha256": hash_key(key), "tenant": "demo", **more} for key, more in said.items()]
    (tmp_path / "keys.json").write_text(json.dumps({"keys": entries}))
    keys = KeyFile(tmp_path / "keys.json", metrics=metrics)

    found = [keys.caller_of({"x-api-key": key}).usage for key in said]
    assert found == [None, UsageFormat.OPENAI, UsageFormat.CONTEXT]


@pytest.mark.parametrize("name", ["context_mode", "usage", "plain"])
@pytest.mark.parametrize("said", ["", "Replay", "OpenAI", "Keep", 1, True, [], {}])
def test_what_no_key_can_say_is_refused_at_the_start(tmp_path, metrics, name, said):
    entry = {"sha256": hash_key(KEY), "tenant": "demo", name: said}
    (tmp_path / "keys.json").write_text(json.dumps({"keys": [entry]}))

    with pytest.raises(ValueError, match=rf"key 1 .*{name}"):
        KeyFile(tmp_path / "keys.json", metrics=metrics)


def test_the_hash_in_the_file_is_no_key(keys):
    with pytest.raises(Unauthorized):
        tenant(keys, hash_key(KEY))


def test_a_changed_file_counts(keys, tmp_path):
    write_keys(tmp_path / "keys.json", {"a-new-key": "demo"})

    assert tenant(keys, KEY) == "demo"
    keys.file.look()
    with pytest.raises(Unauthorized):
        tenant(keys, KEY)
    assert tenant(keys, "a-new-key") == "demo"


def test_a_replaced_file_of_the_same_size_and_time_counts(keys, tmp_path):
    path = tmp_path / "keys.json"
    before = path.stat()
    write_keys(tmp_path / "next.json", {KEY: "else", OTHER_KEY: "othe2"})
    os.utime(tmp_path / "next.json", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (tmp_path / "next.json").stat().st_size == before.st_size
    (tmp_path / "next.json").replace(path)
    keys.file.look()

    assert tenant(keys, KEY) == "else"


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"keys": {}}', '{"keys": [{"sha256": "abc", "tenant": "demo"}]}', None]
)
def test_a_broken_or_vanished_file_keeps_the_last_good_keys(keys, tmp_path, metrics, content):
    path = tmp_path / "keys.json"
    path.unlink() if content is None else path.write_text(content)
    keys.file.look()

    assert tenant(keys, KEY) == "demo"
    assert metrics.registry.get_sample_value("contextcache_gateway_key_reload_failures_total") == 1


def test_a_repaired_file_counts_again(keys, tmp_path):
    (tmp_path / "keys.json").write_text("{")
    keys.file.look()
    write_keys(tmp_path / "keys.json", {"a-new-key": "third"})
    keys.file.look()

    assert tenant(keys, "a-new-key") == "third"


@pytest.mark.parametrize("tenant", ["", "a:b", "x" * 65, 7, None])
def test_a_tenant_that_is_no_tenant_is_refused_at_the_start(tmp_path, metrics, tenant):
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"keys": [{"sha256": hash_key(KEY), "tenant": tenant}]}))

    with pytest.raises(ValueError, match="key 1"):
        KeyFile(path, metrics=metrics)


def test_without_keys_everybody_is_the_default_tenant():
    assert SingleTenant().caller_of({"x-api-key": "whatever"}) == Caller("default", operator=True)
