"""Settings, Redis URLs and the client's own checks: nothing here opens a socket."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from context_manager.__main__ import _replica_wait
from context_manager.client import ContextManagerClient
from context_manager.redis_connection import RedisConnection, ReplicaWait
from context_manager.settings import ManagerSettings
from contextcache.errors import InvalidRequest
from contextcache.model import NewSession, Segment, SegmentKind, TurnCommit
from contextcache.process.settings import settings_help


def connect(url: str) -> RedisConnection:
    return RedisConnection(url, timeout_s=1.0, max_connections=3)


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANAGER_REDIS_URL", "redis://user:hunter2@redis:6379")
    monkeypatch.setenv("MANAGER_MIN_TTL_S", "5")
    settings = ManagerSettings()

    assert settings.redis_url.get_secret_value() == "redis://user:hunter2@redis:6379"
    assert settings.min_ttl_s == 5
    assert "hunter2" not in repr(settings)


def test_every_setting_is_explained() -> None:
    printed = settings_help(ManagerSettings, "purpose")

    for name, field in ManagerSettings.model_fields.items():
        assert f"MANAGER_{name.upper()} " in printed
        assert field.description


@pytest.mark.parametrize(
    "url",
    [
        "redis://127.0.0.1:6379/0",
        "rediss://user:password@redis:6380/1?ssl_check_hostname=false",
        "unix:///tmp/redis.sock?db=1",
        "redis+cluster://127.0.0.1:7000",
        "rediss+cluster://user:password@127.0.0.1:7000",
        "redis+sentinel://user:pa%40ss@s1:26379,s2,[::1]:26380/main/2",
        "rediss+sentinel://s1/main?ssl_check_hostname=false",
    ],
)
async def test_a_url_of_every_topology_is_understood(url: str) -> None:
    await connect(url).close()


@pytest.mark.parametrize(
    "url",
    [
        "http://redis",
        "redis+what://redis",
        "127.0.0.1:6379",
        "redis+sentinel://s1:26379",
        "unix+cluster:///tmp/redis.sock",
        "redis://redis?socket_timeout=1",
    ],
)
def test_a_url_that_is_none_of_ours_is_refused(url: str) -> None:
    with pytest.raises(ValueError):
        connect(url)


async def test_what_cannot_be_sent_is_an_invalid_request() -> None:
    client = ContextManagerClient("127.0.0.1:1")
    surrogate = Segment(SegmentKind.PROMPT, (1,), text="\ud800")

    with pytest.raises(InvalidRequest):
        await client.reserve(NewSession("t", "s", "m", ttl_s=10**30), lease_id="x", lease_ttl_ms=1)
    with pytest.raises(InvalidRequest):
        await client.commit_turn(TurnCommit("t", "s", "x", 0, 0, (surrogate,), "", ""))
    with pytest.raises(InvalidRequest):
        await client.commit_turn(TurnCommit("t", "s", "x", 0, 0, (Segment(SegmentKind.PROMPT, (-1,)),), "", ""))


@pytest.mark.parametrize(
    ("url", "timeout_s", "said"),
    [("redis+cluster://redis:6379", "0.7", "Redis Cluster"), ("redis://redis:6379", "0.3", "MANAGER_REDIS_TIMEOUT_S")],
)
def test_a_wait_for_replicas_that_cannot_be_kept_is_refused_at_the_start(
    monkeypatch: pytest.MonkeyPatch, url: str, timeout_s: str, said: str
) -> None:
    monkeypatch.setenv("MANAGER_REDIS_URL", url)
    monkeypatch.setenv("MANAGER_REDIS_TIMEOUT_S", timeout_s)
    ManagerSettings()
    monkeypatch.setenv("MANAGER_REDIS_WAIT_REPLICAS", "1")

    with pytest.raises(ValueError, match=said):
        ManagerSettings()


def test_the_wait_for_replicas_is_in_whole_ms_and_shorter_than_the_wait_for_redis() -> None:
    waiting = {"redis_wait_replicas": 2, "redis_wait_timeout_s": 0.25}

    assert _replica_wait(ManagerSettings.model_validate(waiting)) == ReplicaWait(num_replicas=2, timeout_ms=250)
    with pytest.raises(ValidationError, match="MANAGER_REDIS_WAIT_TIMEOUT_S must be below"):
        ManagerSettings.model_validate(waiting | {"redis_timeout_s": 0.25})
