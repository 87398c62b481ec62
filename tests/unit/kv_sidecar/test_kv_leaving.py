"""Handing over to peers: who may take, what goes first, and where it stops. Real processes: test_handing_over.py."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import pytest
from prometheus_client import CollectorRegistry

from contextcache.errors import ContextNotFound, SidecarUnavailable
from contextcache.model import SaveOutcome
from contextcache.v1 import kv_sidecar_pb2 as pb
from kv_sidecar.metrics import SidecarMetrics
from kv_sidecar.moving.leaving import Leaving
from kv_sidecar.settings import SidecarSettings
from tests.kit.kv_blocks import FINGERPRINT, SidecarUnderTest

ME, MINE = "engine-0", "127.0.0.1:1"


@dataclass
class Peer:
    """A sidecar that takes what it is asked to, and does what it is told."""

    told: pb.StatsResponse
    outcome: str = "started"
    is_sealed: bool = True
    hangs: bool = False
    asked: list[str] = field(default_factory=list)
    is_closed: bool = False

    async def stats(self, *, beginnings_after=0):
        if not self.told.endpoint:
            raise SidecarUnavailable("away")
        return self.told

    async def pull_context(self, tenant, cache_refs, *, peer):
        assert peer == MINE
        self.asked += cache_refs
        if self.hangs:
            await asyncio.Event().wait()
        return self.outcome

    async def wait_sealed(self, tenant, cache_ref, *, timeout_ms):
        return SaveOutcome(self.is_sealed, "")

    async def close(self):
        self.is_closed = True


class Sessions:
    """Remembers what it was told."""

    def __init__(self):
        self.noted: list[tuple[str, str, str]] = []
        self.gone: set[str] = set()

    async def note_holder(self, tenant, session_id, *, holder, instead_of=""):
        if session_id in self.gone:
            raise ContextNotFound("no such context")
        self.noted.append((session_id, holder, instead_of))


def peer(name: str = "engine-1", *, fingerprint: str = FINGERPRINT, draining: bool = False, **more: object) -> Peer:
    return Peer(pb.StatsResponse(endpoint=name, fingerprints=[fingerprint], draining=draining), **more)


@pytest.fixture
async def kv(tmp_path) -> AsyncIterator[SidecarUnderTest]:
    async with SidecarUnderTest(tmp_path) as kv:
        kv.sidecar.engine.introduce(0, 1, FINGERPRINT, "")
        yield kv


@pytest.fixture
def sessions() -> Sessions:
    return Sessions()


@pytest.fixture
def leave(kv: SidecarUnderTest, sessions: Sessions) -> Callable[..., object]:
    """Hand over to these peers; return how many contexts moved."""

    async def run(*peers: Peer, timeout_s: float = 60, bytes_max: int = 1 << 40) -> int:
        by_address = {f"127.0.0.1:{number}": it for number, it in enumerate(peers, 2)}
        story = Leaving(
            kv.catalog,
            sessions,
            SidecarMetrics(CollectorRegistry()),
            connect=by_address.__getitem__,
            fingerprint=kv.sidecar.engine.fingerprint,
            timeout_s=timeout_s,
            endpoint=ME,
            address=MINE,
            peers=(MINE, *by_address),
            bytes_max=bytes_max,
        )
        moved = await story.run()
        assert all(it.is_closed for it in peers)
        return moved

    return run


async def three(kv: SidecarUnderTest) -> list[str]:
    return [(await kv.save(tuple(range(n, n + 10)), session_id=f"ctx_{n}")).cache_ref for n in (0, 100, 200)]


async def test_what_was_used_last_goes_first_and_the_manager_knows_before_and_after(kv, sessions, leave):
    refs = await three(kv)
    await kv.catalog.open("demo", refs[1])
    taker = peer()

    assert await leave(taker) == 3
    assert taker.asked == [refs[1], refs[2], refs[0]]
    for session in ("ctx_0", "ctx_100", "ctx_200"):
        told = [note[1:] for note in sessions.noted if note[0] == session]
        assert told == [("engine-1", ""), ("engine-1", ME)]


async def test_of_a_context_its_newest_generation_goes(kv, sessions, leave):
    await kv.save(tuple(range(10)), session_id="ctx_1")
    new = await kv.save(tuple(range(14)), session_id="ctx_1")
    taker = peer()

    assert await leave(taker) == 1
    assert taker.asked == [new.cache_ref]


async def test_what_goes_is_spread_over_the_peers_and_keeps_to_its_bytes(kv, sessions, leave):
    refs = await three(kv)
    size_bytes = next(it for it in kv.catalog.manifests if not it.is_kept).size_bytes
    one, two = peer("engine-1"), peer("engine-2")

    assert await leave(one, two, bytes_max=2 * size_bytes) == 2
    assert sorted([len(one.asked), len(two.asked)]) == [1, 1]
    assert {*one.asked, *two.asked} == set(refs[1:])


@pytest.mark.parametrize(
    "unfit",
    [peer(""), peer(ME), peer(fingerprint="0" * 64), peer(draining=True)],
    ids=["is away", "is this pod", "has another engine", "ends too"],
)
async def test_a_peer_that_cannot_keep_it_is_asked_for_nothing(kv, sessions, leave, unfit):
    await three(kv)

    assert await leave(unfit) == 0
    assert (unfit.asked, sessions.noted) == ([], [])


@pytest.mark.parametrize("fault", [{"outcome": "refused"}, {"is_sealed": False}, {"hangs": True}])
async def test_what_the_peer_has_not_sealed_stays_where_it_was(kv, sessions, leave, fault):
    await three(kv)

    assert await leave(peer(**fault), timeout_s=0.1 if "hangs" in fault else 60) == 0
    assert sessions.noted
    assert not [note for note in sessions.noted if note[2]]


async def test_kv_that_no_session_names_and_kv_of_plain_or_interrupted_requests_is_left(kv, sessions, leave):
    refs = await three(kv)
    await kv.save(tuple(range(300, 310)), session_id="kept_" + "0" * 32)
    interrupted = await kv.save(tuple(range(400, 410)), session_id="ctx_400")
    await kv.catalog.interrupt(interrupted.tenant, interrupted.cache_ref)
    sessions.gone = {"ctx_100"}
    taker = peer()

    assert await leave(taker) == 2
    assert taker.asked == [refs[2], refs[0]]


def test_peers_are_those_that_are_named_by_address_and_a_wrong_one_is_refused_at_the_start():
    settings = SidecarSettings(peers=("*", "10.0.0.0/8", "pod-1:50061", "pod-2"), listen="10.0.0.1:50061")

    assert settings.takers == ("pod-1:50061",)
    assert settings.peer_address == "10.0.0.1:50061"
    assert SidecarSettings(handover_address="10.0.0.2:50061").peer_address == "10.0.0.2:50061"
    assert SidecarSettings(handover_peers=("kv:1",)).takers == ("kv:1",)
    with pytest.raises(ValueError, match="host:port"):
        SidecarSettings(handover_peers=("kv",))
