"""Who may sweep: one at a time, nobody for long never, and whatever the API server does nobody fails for it."""

from __future__ import annotations

import asyncio
import random

import pytest

from contextcache.kubernetes_objects import KubernetesForbidden, KubernetesUnavailable
from tests.helpers.lease_world import DURATION_S, Candidate, LeaseServer


@pytest.mark.looptime
@pytest.mark.parametrize("seed", range(12))
async def test_two_never_hold_it_together(seed):
    """Clocks 15 % off either way, requests and answers lost, writes that come late, processes that stand still."""
    rng = random.Random(seed)
    server = LeaseServer(rng)
    candidates: list[Candidate] = []
    seen = []

    def check() -> None:
        # The Lease is gained in a look only, so to check after each is to check always.
        seen.append([number for number, candidate in enumerate(candidates) if candidate.is_held()])

    rates = [0.85, 1.15, rng.uniform(0.85, 1.15), rng.uniform(0.85, 1.15)]
    for number, rate in enumerate(rates):
        offset_s = rng.uniform(0, 1e6)
        candidates.append(Candidate(server, f"c{number}", rate=rate, offset_s=offset_s, on_looked=check))
        candidates[-1].start()
    for _ in range(12):
        await asyncio.sleep(rng.uniform(1, 60))
        server.error = KubernetesUnavailable("away") if rng.random() < 0.3 else None
        if rng.random() < 0.3:
            # A rollout: one ends, and comes back as another.
            held = [number for number, candidate in enumerate(candidates) if candidate.is_held()]
            number = rng.choice(held or range(len(candidates)))
            await candidates[number].stop()
            candidates[number] = Candidate(server, f"n{rng.random()}", rate=rates[number], on_looked=check)
            candidates[number].start()

    server.error, server.is_calm = None, True
    await asyncio.sleep(6 * DURATION_S)
    assert sum(candidate.is_held() for candidate in candidates) == 1
    for candidate in candidates:
        await candidate.stop()
    assert not [held for held in seen if len(held) > 1]
    assert any(seen)
    assert all(not candidate.sample("sweep_lease_failures_total", {"reason": "internal"}) for candidate in candidates)


@pytest.mark.looptime
async def test_a_slow_clock_has_stopped_before_a_fast_one_begins():
    server = LeaseServer()
    slow, fast = Candidate(server, "slow", rate=0.85), Candidate(server, "fast", rate=1.15)
    await slow.look()
    while not fast.is_held():
        assert asyncio.get_running_loop().time() < 2 * DURATION_S
        await fast.look()
        await asyncio.sleep(0.01)

    assert not slow.is_held()


@pytest.mark.looptime
async def test_the_first_takes_it_and_keeps_it():
    server = LeaseServer()
    first, second = Candidate(server, "first"), Candidate(server, "second")
    first.start()
    await asyncio.sleep(0.1)
    second.start()
    await asyncio.sleep(10 * DURATION_S)

    assert (first.is_held(), second.is_held()) == (True, False)
    assert (first.may_sweep(), second.may_sweep()) == (True, False)
    assert (first.sample("sweep_lease_held_state"), second.sample("sweep_lease_held_state")) == (1, 0)
    assert server.stored["spec"] | {"renewTime": "", "acquireTime": ""} == {
        "holderIdentity": "first",
        "leaseDurationSeconds": 15,
        "leaseTransitions": 0,
        "renewTime": "",
        "acquireTime": "",
    }
    assert server.stored["spec"]["renewTime"].endswith("Z")
    await first.stop()
    await second.stop()


@pytest.mark.looptime
async def test_what_is_given_back_is_taken_at_the_next_look():
    server = LeaseServer()
    first, second = Candidate(server, "first"), Candidate(server, "second")
    first.start()
    await asyncio.sleep(0.1)
    second.start()
    await asyncio.sleep(DURATION_S)
    await first.stop()
    assert server.holder == ""
    assert not first.is_held()
    await asyncio.sleep(DURATION_S / 6)

    assert second.is_held()
    assert server.stored["spec"]["leaseTransitions"] == 1
    await second.stop()


@pytest.mark.looptime
async def test_a_holder_that_died_is_succeeded_after_the_duration_and_not_before():
    server = LeaseServer()
    first, second = Candidate(server, "first"), Candidate(server, "second")
    await first.look()
    second.start()
    await asyncio.sleep(DURATION_S - 0.1)
    assert not second.is_held()
    await asyncio.sleep(DURATION_S / 6 + 0.1)

    assert second.is_held()
    await second.stop()


@pytest.mark.looptime
async def test_the_duration_that_the_holder_wrote_counts_when_it_is_longer():
    server = LeaseServer()
    first, second = Candidate(server, "first", duration_s=60), Candidate(server, "second")
    await first.look()
    second.start()
    await asyncio.sleep(59)
    assert not second.is_held()
    await asyncio.sleep(DURATION_S / 6 + 1)

    assert second.is_held()
    await second.stop()


@pytest.mark.looptime
async def test_a_holder_that_cannot_renew_stops_before_others_may_begin():
    server = LeaseServer()
    holder = Candidate(server)
    holder.start()
    await asyncio.sleep(DURATION_S)
    server.error = KubernetesUnavailable("away")
    await asyncio.sleep(2 / 3 * DURATION_S)

    assert not holder.is_held()
    assert not holder.may_sweep()
    await holder.stop()


@pytest.mark.looptime
@pytest.mark.parametrize("error", [KubernetesUnavailable("away"), KubernetesForbidden("no role")])
async def test_when_nobody_can_have_it_for_four_durations_everyone_sweeps(error, caplog):
    server = LeaseServer()
    server.error = error
    candidate = Candidate(server)
    candidate.start()
    await asyncio.sleep(4 * DURATION_S - 0.1)
    assert not candidate.may_sweep()
    await asyncio.sleep(0.2)
    assert candidate.may_sweep()
    assert not candidate.is_held()
    assert candidate.sample("sweep_lease_failures_total", {"reason": error.reason}) >= 4 * 6
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
        "sweep lease cannot be had"
    ]
    server.error = None
    other = Candidate(server, "other")
    await other.look()
    await asyncio.sleep(DURATION_S / 6)

    assert not candidate.may_sweep()
    await candidate.stop()


@pytest.mark.looptime
async def test_who_may_read_and_not_write_sweeps_after_all():
    server = LeaseServer()
    server.write_error = KubernetesForbidden("cannot update")
    candidate = Candidate(server)
    candidate.start()
    await asyncio.sleep(4 * DURATION_S + 0.1)

    assert candidate.may_sweep()
    await candidate.stop()


@pytest.mark.looptime
async def test_the_lease_is_counted_from_before_it_was_asked_for():
    """An answer that comes late, as after a pause of the process, gives no more than what is left."""

    class Slow(LeaseServer):
        async def _call(self, name, timeout_s, act):
            found = await super()._call(name, timeout_s, act)
            await asyncio.sleep(DURATION_S if name == "create" else 0)
            return found

    candidate = Candidate(Slow())
    await candidate.look()

    assert not candidate.is_held()


@pytest.mark.looptime
async def test_others_fields_of_the_lease_stay():
    server = LeaseServer()
    server.stored = {
        "metadata": {"name": "cc", "resourceVersion": "x", "labels": {"app": "cc"}},
        "spec": {"holderIdentity": "", "strategy": "OldestEmulationVersion"},
    }
    await Candidate(server).look()

    assert server.stored["metadata"]["labels"] == {"app": "cc"}
    assert server.stored["spec"]["strategy"] == "OldestEmulationVersion"
    assert server.holder == "a"


@pytest.mark.looptime
@pytest.mark.parametrize("spec", [None, {}, {"holderIdentity": None, "leaseTransitions": "x"}])
async def test_a_lease_of_an_unknown_shape_is_free(spec):
    server = LeaseServer()
    server.stored = {"metadata": {"name": "cc", "resourceVersion": "x"}, "spec": spec}
    candidate = Candidate(server)
    await candidate.look()

    assert candidate.is_held()


async def test_stopping_what_never_started_is_harmless():
    server = LeaseServer()
    await Candidate(server).stop()

    assert server.calls == []
