"""Bounds of what loads and saves share, the ways of older vLLM, and the counts on vLLM's /metrics."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from contextcache.clock import ManualClock
from contextcache.errors import SidecarUnavailable
from contextcache.v1 import kv_sidecar_pb2 as pb
from kv_sidecar.client import EngineSidecarClient
from tests.kit.until import wait_until
from tests.unit.vllm_plugin.connector.conftest import Engine, cache_ref, transfer
from vllm_plugin.connector.loads.lookup import PendingSaves
from vllm_plugin.connector.metadata import RankFacts
from vllm_plugin.connector.telemetry import ConnectorPromMetrics, ConnectorStats, Counters, hit_source
from vllm_plugin.connector.transfer import ResultBox, TransferPool

A = cache_ref(1)


@pytest.fixture
def pool() -> Iterator[TransferPool]:
    pool = TransferPool("test", threads=1, queue_limit=2)
    yield pool
    assert pool.close(30)


def test_a_full_pool_refuses_at_once_and_takes_again_later(pool: TransferPool) -> None:
    gate, begun = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        gate.wait(30)

    first = pool.try_submit(hold)
    assert first is not None
    assert begun.wait(30)
    waiting = [pool.try_submit(lambda: None) for _ in range(3)]

    assert [future is None for future in waiting] == [False, False, True]
    gate.set()
    for future in (first, *waiting[:2]):
        assert future is not None
        future.result(30)
    assert pool.try_submit(lambda: None) is not None


def test_a_tenants_work_does_not_wait_for_another_tenants(pool: TransferPool) -> None:
    """Seen failing with one tenant's name for all work."""
    gate, begun = threading.Event(), threading.Event()
    pool.try_submit(lambda: begun.set() or (gate.wait(30) and None), "flood")
    assert begun.wait(30)
    waiting = [pool.try_submit(lambda: None, "flood") for _ in range(3)]
    other = pool.try_submit(lambda: None, "other")
    assert other is not None
    other.result(10)

    assert [future is None or future.done() for future in waiting] == [False, False, True]
    gate.set()


def test_tenants_take_turns(pool: TransferPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool._executor, "submit", lambda _work: None)
    for tenant in ("a", "a", "a", "b", "c"):
        pool.try_submit(lambda: None, tenant)
    begun = [pool._take() for _ in range(3)]
    pool._running.add("a", -1)
    begun += [pool._take()]

    assert [taken and taken[1] for taken in begun] == ["a", "b", None, "c"]


def test_a_closed_pool_refuses() -> None:
    pool = TransferPool("test", threads=1, queue_limit=2)
    pool.close(1)

    assert pool.try_submit(lambda: None) is None


def test_closing_a_pool_does_not_wait_for_ever() -> None:
    pool, gate, begun = TransferPool("test", threads=1, queue_limit=2), threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        gate.wait(30)

    future = pool.try_submit(hold)
    assert begun.wait(30)
    ended = pool.close(0.01)
    gate.set()

    assert not ended
    assert future is not None
    future.result(30)


def test_work_that_was_refused_never_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A save that ran after its engine blocks were freed would save another request's KV.

    Seen failing: `submit` queues the work before it fails to start a thread, and the thread there is carries it out.
    """
    pool = TransferPool("test", threads=2, queue_limit=8)
    begun, gate, ran = threading.Event(), threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        gate.wait(30)

    first = pool.try_submit(hold)
    assert begun.wait(30)

    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        refused = pool.try_submit(ran.set)
    gate.set()
    last = pool.try_submit(lambda: None)
    assert first is not None
    assert last is not None
    last.result(30)

    assert refused is None
    assert not ran.is_set()
    assert pool.close(30)


def test_pieces_that_were_refused_or_dropped_are_not_taken_for_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen failing: a copy that no thread took stayed queued, and wrote into a slot that another file had by then."""
    pool, may_end, written = TransferPool("test", threads=1, queue_limit=8), threading.Event(), list[str]()
    pool.try_submit(lambda: may_end.wait() and None)
    submit = pool._executor.submit

    def refused_once_queued(*work: Any) -> Any:
        submit(*work)
        raise RuntimeError("can't start new thread")

    def fails(name: str) -> None:
        with pytest.raises(RuntimeError):
            pool.run_all([lambda: written.append(name)])

    with monkeypatch.context() as patch:
        patch.setattr(pool._executor, "submit", refused_once_queued)
        fails("refused")
    dropped = threading.Thread(target=fails, args=("dropped",))
    dropped.start()
    wait_until(lambda: len(pool._live) == 2, what="the piece is queued")
    pool.close(0)
    may_end.set()
    dropped.join(60)

    assert (dropped.is_alive(), written) == (False, [])


def test_results_are_taken_once() -> None:
    box = ResultBox()
    box.release_blocks("a")
    box.end_load("b")
    box.end_load("c", is_failed=True)
    box.end_save(A)
    taken = box.take()

    assert (taken.sent, taken.received, taken.failed) == ({"a"}, {"b", "c"}, {"c"})
    assert taken.ended_saves == {A}
    assert box.take().received == set()


def test_pending_saves_end_by_word_or_by_age_and_are_bounded() -> None:
    clock = ManualClock()
    saves = PendingSaves(clock, life_ms=1000, limit=2)

    assert saves.add("a")
    assert not saves.add("a")
    clock.advance(ms=1000)
    assert "a" not in saves
    assert saves.add("b")
    assert saves.add("c")
    assert "b" in saves
    assert saves.add("d")
    assert "b" not in saves
    saves.end("c")
    assert "c" not in saves


def test_a_channel_is_opened_by_the_first_call_and_never_after_closing(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    open_channel = grpc.insecure_channel

    def opened(address: str, **options: Any) -> grpc.Channel:
        made.append(address)
        return open_channel(address, **options)

    monkeypatch.setattr(grpc, "insecure_channel", opened)
    client = EngineSidecarClient("127.0.0.1:1", timeout_s=0.5)
    assert made == []
    for _ in range(2):
        with pytest.raises(SidecarUnavailable):
            client.end_load("lease")
    assert made == ["127.0.0.1:1"]
    client.close()
    with pytest.raises(SidecarUnavailable):
        client.end_load("lease")
    assert len(made) == 1


def test_ranks_that_differ_turn_the_connector_off(engine: Engine) -> None:
    facts = engine.loop.worker.worker_side.facts
    assert facts is not None
    other = RankFacts("0" * 64, "{}", 1, 2, facts.groups)
    engine.loop.connector.scheduler_side.learn_ranks([facts, other])
    engine.save([1, 2, 3], A)

    assert engine.sidecar.manifests == {}


def test_threads_end_at_shutdown(start_engine: Callable[..., Engine]) -> None:
    engine = start_engine()
    engine.save([1, 2, 3], A)
    engine.loop.close()
    alive = [thread for pool in engine.loop._pools() for thread in pool._executor._threads if thread.is_alive()]
    for thread in alive:
        thread.join(5)

    assert not any(thread.is_alive() for thread in alive)


def test_a_save_in_flight_at_shutdown_is_sealed(start_engine: Callable[..., Engine]) -> None:
    """Seen failing: with the channels closed first, as before, the seal met a closed channel."""
    engine = start_engine()
    engine.sidecar.hang["seal"] = threading.Event()
    engine.sidecar.close = lambda: setattr(engine.sidecar, "down", True)
    engine.loop.add("save", list(range(1, 100)), params=transfer(save=A))
    wait_until(lambda: engine.loop.step() and engine.sidecar._arrival("seal").is_set(), what="the save is sealed")
    threading.Timer(0.2, engine.sidecar.hang["seal"].set).start()

    engine.loop.worker.shutdown()

    engine.sidecar.down = False
    assert list(engine.sidecar.manifests) == [A]


def test_a_save_whose_last_part_waits_for_an_early_one_at_shutdown_is_sealed(
    start_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen failing: the threads that copy were looked at first, and had nothing to do yet."""
    engine = start_engine(extra={"early_saves": "on"})
    side, sidecar, looked_at = engine.loop.worker.worker_side, engine.sidecar, list[str]()
    gates = {"uploads": "prepare_save", "saves": "extend_save"}
    for name, pool in {"uploads": side._upload_pool, "saves": side._save_pool}.items():
        sidecar.hang[gates[name]] = threading.Event()

        def drain(timeout_s: float, name: str = name, drain: Callable[[float], bool] = pool.drain) -> bool:
            looked_at.append(name)
            sidecar.hang[gates[name]].set()
            return drain(timeout_s)

        monkeypatch.setattr(pool, "drain", drain)
    sidecar.close = lambda: setattr(sidecar, "down", True)
    engine.loop.add("save", list(range(1, 901)), params=transfer(save=A))
    while "save" not in engine.loop.finished:
        engine.loop.step()
    engine.loop.step()
    sidecar.wait_for("prepare_save")

    engine.loop.worker.shutdown()

    assert "saves" in looked_at
    assert list(sidecar.manifests) == [A]
    sidecar.down = False


def test_a_seal_that_hangs_does_not_hold_up_the_shutdown(start_engine: Callable[..., Engine]) -> None:
    engine = start_engine(bounds={"shutdown_deadline_ms": 200})
    gate = engine.sidecar.hang["seal"] = threading.Event()
    engine.loop.add("save", list(range(1, 100)), params=transfer(save=A))
    wait_until(lambda: engine.loop.step() and engine.sidecar._arrival("seal").is_set(), what="the save is sealed")

    engine.loop.worker.shutdown()

    assert not gate.is_set()
    assert engine.sidecar.manifests == {}
    gate.set()
    engine.loop.settle()


def test_vllms_metrics_are_told_where_the_tokens_come_from(engine: Engine) -> None:
    engine.save(list(range(1, 100)), A, forgets=True)
    request = engine.loop.add("again", list(range(1, 100)), params=transfer(load=(A,)))
    engine.loop.settle()
    engine.loop.step()

    assert engine.loop.connector.get_external_cache_hit_sources(request, 98) == {CacheHitSource.HOST: 98}
    assert engine.loop.connector.get_external_cache_hit_sources(request, 0) == {}
    assert hit_source(pb.TIER_OBJECT) == CacheHitSource.EXTERNAL_UNSPECIFIED


def test_counts_become_prometheus_counters() -> None:
    counters = Counters()
    counters.add("skipped_saves", "storage_full", 2)
    counters.add("loaded_bytes", amount=4096)
    first = ConnectorStats(data=counters.take_fresh())
    counters.add("skipped_saves", "storage_full")
    stats = first.aggregate(ConnectorStats(data=counters.take_fresh()))
    registry = CollectorRegistry()

    def counter(**fields: object) -> Counter:
        return Counter(fields["name"], fields["documentation"], fields["labelnames"], registry=registry)

    types = {Counter: counter, Gauge: Gauge, Histogram: Histogram}
    config = type("Config", (), {"kv_transfer_config": None})()
    metrics = ConnectorPromMetrics(config, types, ["engine"], {0: ["0"]})
    metrics.observe(stats.data)

    labels = {"engine": "0", "event": "skipped_saves", "reason": "storage_full"}
    assert registry.get_sample_value("contextcache_connector_events_total", labels) == 3
    assert registry.get_sample_value("contextcache_connector_loaded_bytes_total", {"engine": "0"}) == 4096
    assert counters.get("skipped_saves") == 3
    assert counters.take_fresh() == {}
