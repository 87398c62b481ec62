"""When a reflector tries again, lists anew, and what it keeps meanwhile. Time is virtual, the server a script."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest
from prometheus_client import CollectorRegistry

from contextcache.clock import ManualClock
from contextcache.kubernetes.objects import (
    PODS,
    KubernetesExpired,
    KubernetesForbidden,
    KubernetesUnavailable,
    Listing,
    Selection,
    WatchEvent,
)
from gateway.metrics import Metrics
from gateway.pods.reflector import Reflector


def pod(name, version="1", **fields):
    return {"metadata": {"name": name, "resourceVersion": version}, **fields}


def event(kind, name, version):
    return WatchEvent(kind, pod(name, version))


class Script:
    """Answers lists and watches with what it has: an error, objects, or events before the watch's time is over."""

    def __init__(self) -> None:
        self.listed = [pod("a")]
        self.list_error: Exception | None = None
        self.watch_error: Exception | None = None
        self.events: list[WatchEvent] = []
        self.ends_at_once = False
        self.calls: list[tuple[float, str]] = []
        self.versions: list[str] = []
        """What watches were to go on from."""

    def times_of(self, call):
        return [at for at, name in self.calls if name == call]

    async def list(self, _selection):
        self.calls.append((asyncio.get_running_loop().time(), "list"))
        if self.list_error is not None:
            raise self.list_error
        return Listing(tuple(self.listed), "1")

    @asynccontextmanager
    async def watch(self, _selection, *, resource_version, timeout_s):
        self.calls.append((asyncio.get_running_loop().time(), "watch"))
        self.versions.append(resource_version)
        if self.watch_error is not None:
            raise self.watch_error
        yield self._events(timeout_s)

    async def _events(self, timeout_s):
        while self.events:
            yield self.events.pop(0)
        await asyncio.sleep(0 if self.ends_at_once else timeout_s)


class Rig:
    def __init__(self, *, resync_s=300.0, read=lambda subject: subject["metadata"]["resourceVersion"]):
        self.script = Script()
        self.registry = CollectorRegistry()
        self.clock = ManualClock(5000)
        self.reflector = Reflector(
            self.script,
            Selection(PODS, "ns", "x=y"),
            read,
            resync_s=resync_s,
            metrics=Metrics(self.registry),
            clock=self.clock,
        )

    def failures(self, reason):
        name = "contextcache_gateway_discovery_failures_total"
        return self.registry.get_sample_value(name, {"resource": "pods", "reason": reason})

    async def run_for(self, s):
        task = asyncio.create_task(self.reflector.run())
        await asyncio.sleep(s)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()


@pytest.mark.looptime
async def test_it_lists_once_and_watches_from_there():
    rig = Rig()
    rig.script.events = [event("ADDED", "b", "2"), event("MODIFIED", "a", "3"), event("DELETED", "b", "4")]
    await rig.run_for(100)

    assert rig.reflector.objects == {"a": "3"}
    assert rig.script.times_of("list") == [0]
    assert rig.script.versions == ["1", "4"]
    assert rig.registry.get_sample_value(
        "contextcache_gateway_discovery_synced_timestamp_seconds", {"resource": "pods"}
    ) == pytest.approx(5)


@pytest.mark.looptime
async def test_a_bookmark_moves_where_it_goes_on_and_nothing_else():
    rig = Rig()
    rig.script.events = [WatchEvent("BOOKMARK", {"metadata": {"resourceVersion": "77"}})]
    await rig.run_for(61)

    assert rig.reflector.objects == {"a": "1"}
    assert rig.reflector.version == 1
    assert rig.script.versions == ["1", "77"]


@pytest.mark.looptime
async def test_everything_is_listed_anew_at_every_resync():
    rig = Rig(resync_s=100)
    await rig.run_for(301)

    assert rig.script.times_of("list") == pytest.approx([0, 100, 200, 300])


@pytest.mark.looptime
async def test_a_dead_server_is_asked_ever_more_slowly_and_the_copy_stays():
    rig = Rig()
    await rig.run_for(1)
    rig.script.calls.clear()
    rig.script.list_error = rig.script.watch_error = KubernetesUnavailable("away")
    await rig.run_for(600)

    times = [at for at, _ in rig.script.calls]
    gaps = [after - before for before, after in pairwise(times)]
    assert all(0.1 <= gap <= 30 for gap in gaps)
    assert all(gap <= 0.4 for gap in gaps[:2])
    assert all(gap >= 15 for gap in gaps[8:])
    assert rig.reflector.objects == {"a": "1"}
    assert rig.failures("unavailable") == len(times)


@pytest.mark.looptime
async def test_delays_are_spread_out():
    """All gateways lose the same server at the same time."""
    rigs = [Rig() for _ in range(20)]
    for rig in rigs:
        rig.script.list_error = KubernetesUnavailable("away")
    await asyncio.gather(*(rig.run_for(1) for rig in rigs))

    assert len({rig.script.calls[1][0] for rig in rigs}) > 10


@pytest.mark.looptime
async def test_what_is_forbidden_is_asked_for_slowly_from_the_start():
    rig = Rig()
    rig.script.list_error = KubernetesForbidden("no role")
    await rig.run_for(300)

    times = rig.script.times_of("list")
    assert 2.5 <= times[1] - times[0] <= 5
    assert times[-1] - times[-2] >= 15


@pytest.mark.looptime
async def test_a_server_that_starts_and_refuses_what_it_allowed_is_asked_again_soon(caplog):
    rig = Rig()
    await rig.run_for(70)
    rig.script.watch_error = KubernetesUnavailable("away")
    rig.script.list_error = KubernetesUnavailable("away")
    await rig.run_for(120)
    caplog.clear()
    rig.script.list_error = rig.script.watch_error = KubernetesForbidden("caches are empty")
    rig.script.calls.clear()
    await rig.run_for(20)

    gaps = [later - earlier for earlier, later in pairwise(rig.script.times_of("list"))]
    assert len(gaps) >= 15
    assert max(gaps) <= 1
    assert rig.failures("forbidden") is None
    assert rig.failures("starting") >= 15
    [told] = caplog.records
    assert "a starting API server" in told.means
    assert not hasattr(told, "needs")


@pytest.mark.looptime
async def test_what_stays_forbidden_for_a_minute_is_no_start(caplog):
    rig = Rig()
    await rig.run_for(70)
    rig.script.list_error = rig.script.watch_error = KubernetesForbidden("no role any more")
    await rig.run_for(300)

    times = rig.script.times_of("list")
    assert times[-1] - times[-2] >= 15
    assert rig.failures("forbidden") >= 5
    assert [hasattr(told, "needs") for told in caplog.records] == [False, True]


@pytest.mark.looptime
async def test_after_three_failures_in_a_row_it_lists():
    rig = Rig()
    rig.script.watch_error = KubernetesUnavailable("this version breaks the server")
    await rig.run_for(3)

    assert [name for _, name in rig.script.calls][:5] == ["list", "watch", "watch", "watch", "list"]


@pytest.mark.looptime
async def test_a_forgotten_version_means_a_new_list_and_no_warning(caplog):
    rig = Rig()
    rig.script.watch_error = KubernetesExpired("too old")
    await rig.run_for(0.05)
    rig.script.watch_error = None
    await rig.run_for(5)

    assert [name for _, name in rig.script.calls] == ["list", "watch", "list", "watch"]
    assert rig.failures("expired") == 1
    assert not caplog.records


@pytest.mark.looptime
async def test_watches_that_end_at_once_are_no_loop_without_a_pause():
    rig = Rig()
    rig.script.ends_at_once = True
    await rig.run_for(60)

    assert len(rig.script.calls) < 20


@pytest.mark.looptime
async def test_an_event_makes_the_next_failure_the_first_one():
    rig = Rig()
    rig.script.list_error = KubernetesUnavailable("away")
    await rig.run_for(120)
    rig.script.list_error = None
    rig.script.events = [event("ADDED", "b", "2")]
    rig.script.ends_at_once = True
    await rig.run_for(0.01)
    rig.script.watch_error = KubernetesUnavailable("away")
    rig.script.calls.clear()
    await rig.run_for(1)

    assert len(rig.script.calls) >= 2


@pytest.mark.looptime
async def test_what_cannot_be_read_is_asked_for_again_and_changes_nothing(caplog):
    def read(subject):
        if subject.get("broken"):
            raise TypeError("of our own making")
        return subject["metadata"]["resourceVersion"]

    rig = Rig(read=read)
    rig.script.events = [WatchEvent("MODIFIED", pod("a", "2", broken=True))]
    await rig.run_for(10)

    assert rig.reflector.objects == {"a": "1"}
    assert rig.script.versions == ["1", "1"]
    assert rig.failures("internal") == 1
    assert "discovery failed by an internal fault" in [record.message for record in caplog.records]


@pytest.mark.looptime
async def test_it_warns_once_of_a_fault_and_tells_when_it_is_over(caplog):
    caplog.set_level("INFO", "gateway.pods.reflector")
    rig = Rig()
    rig.script.list_error = KubernetesForbidden("no role")
    await rig.run_for(300)
    rig.script.list_error = None
    await rig.run_for(70)

    assert [record.message for record in caplog.records] == [
        "discovery failed, last known pods stay",
        "discovery recovered",
    ]


@pytest.mark.looptime
async def test_the_first_try_is_told_whether_it_succeeds_or_not():
    rig = Rig()
    rig.script.list_error = KubernetesUnavailable("away")
    await rig.run_for(0.001)

    assert rig.reflector.tried.is_set()
    assert not rig.reflector.listed
