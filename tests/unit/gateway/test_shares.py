"""Which tenant a busy pod refuses: one that has its share of it, and only while others are there too."""

from collections import Counter
from contextlib import ExitStack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contextcache.clock import ManualClock
from gateway.shares import FIRST_ROOM, SHARE_MIN, SHARING_S, PodTenants


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def pod(clock):
    return PodTenants(lambda: clock.now_ms() / 1000)


def place(pod, tenant, most, *, whatever=False):
    """Place up to `most` requests as a front does, each only if the pod takes it; return how many it took."""
    taken = 0
    for _ in range(most):
        if not whatever and not pod.takes(tenant):
            break
        pod.routed(tenant)
        taken += 1
    return taken


def probe(pod, clock, running, waiting, *, deferred=0, **tenants):
    clock.advance(s=1)
    pod.probed(running=running, waiting=waiting, deferred=deferred, tenants=tenants)


def test_a_tenant_alone_is_never_refused(pod, clock):
    assert place(pod, "a", 500) == 500
    probe(pod, clock, 8, 492)
    assert place(pod, "a", 500) == 500


def test_a_flood_is_refused_and_the_other_tenant_is_not(pod, clock):
    """Seen failing before: behind Envoy no request was counted for its tenant, and a full queue refused both."""
    place(pod, "a", 500)
    probe(pod, clock, 8, 492, a=500)
    taken = place(pod, "b", 1)

    assert taken == 1
    assert not pod.takes("a")
    assert pod.takes("b")
    assert pod.is_below_share("b")
    assert not pod.is_below_share("a")


def test_before_a_batch_is_known_a_flood_beside_another_tenant_is_bounded(pod):
    place(pod, "b", 1)

    assert place(pod, "a", 500) == FIRST_ROOM


def test_where_requests_wait_for_room_a_tenant_has_its_share_of_the_batch(pod, clock):
    place(pod, "b", 1)
    place(pod, "a", 200, whatever=True)
    probe(pod, clock, 300, 101, a=200, b=10)

    assert not pod.takes("a")
    assert place(pod, "b", 500) == 140  # with the ten that it has, half of the batch
    assert place(pod, "c", 500) == 100


def test_requests_that_wait_for_their_kv_are_no_full_batch(pod, clock):
    place(pod, "b", 1)
    place(pod, "a", 20)
    probe(pod, clock, 2, 19, deferred=19, a=20, b=1)

    assert place(pod, "a", 500) == FIRST_ROOM - 21


def test_a_few_requests_are_taken_of_each_tenant_however_small_the_batch(pod, clock):
    place(pod, "a", 50)
    probe(pod, clock, 1, 49, a=50)

    assert place(pod, "b", 5) == 5
    probe(pod, clock, 1, 54, a=50, b=5)
    assert place(pod, "b", 50) == SHARE_MIN - 5
    assert place(pod, "c", 100) == FIRST_ROOM


def test_sharing_ends_some_seconds_after_the_last_request_of_others(pod, clock):
    place(pod, "b", 1)
    clock.advance(s=1)
    place(pod, "a", 300, whatever=True)
    for _ in range(int(SHARING_S) - 1):
        probe(pod, clock, 100, 200, a=300)
    assert not pod.takes("a")
    probe(pod, clock, 100, 200, a=300)
    probe(pod, clock, 100, 200, a=300)

    assert pod.takes("a")


def test_a_tenant_of_other_gateways_shares_the_pod_too(pod, clock):
    probe(pod, clock, 8, 492, a=500)

    assert not pod.is_below_share("a")
    assert place(pod, "b", 500) == FIRST_ROOM
    assert not pod.takes("a")


def test_short_requests_beside_long_ones_count_by_what_is_in_flight_and_not_by_how_many_came(pod, clock):
    """Seen failing with a list of placements: the newest of them are the short ones, and the flood counted as none."""
    place(pod, "a", 500)
    clock.advance(s=1)
    for _ in range(60):
        pod.probed(running=8, waiting=493, deferred=0, tenants={"a": 500, "b": 1})
        for _ in range(25):
            assert place(pod, "b", 1) == 1
            assert not pod.takes("a")
            clock.advance(ms=40)


def test_what_the_pod_reports_counts_for_a_limit_and_what_is_carried_does_not_count_twice(pod, clock):
    with pod.carried("a"):
        place(pod, "a", 5)
        assert pod.reported("a") == 0
        probe(pod, clock, 6, 0, a=6)

        assert pod.reported("a") == 5


def test_a_request_that_ended_after_a_probe_does_not_count_as_one_of_another_gateway(pod, clock):
    """Seen failing with the report less what is carried now: a tenant was refused until the next probe."""
    with pod.carried("a"):
        with pod.carried("a"):
            probe(pod, clock, 2, 0, a=2)
        assert pod.reported("a") == 0


def test_where_a_pod_reports_no_tenants_what_is_carried_and_came_since_counts(pod, clock):
    place(pod, "a", 500)
    with pod.carried("b"):
        clock.advance(s=1)
        pod.probed(running=8, waiting=492, deferred=0, tenants=None)
        taken = place(pod, "b", 500)

        assert 1 + taken == FIRST_ROOM


def test_a_tenant_beside_another_has_what_the_pod_does_in_a_second(pod, clock):
    """Requests shorter than a probe interval: what ended since counts, else a pod would stand idle beside a flood."""
    done = []
    for _ in range(12):
        taken = place(pod, "b", 1)
        for _ in range(20):
            clock.advance(ms=50)
            taken += place(pod, "a", 1000)
        pod.probed(running=8, waiting=0, deferred=0, tenants={"a": 8})
        done.append(taken)

    assert done == sorted(done)
    assert done[-1] > 5000


def test_a_flood_of_short_requests_never_queues_for_longer_than_a_moment(pod, clock):
    """A pod that does 400 a second in a batch of 8: what one tenant sends beside another waits for less than 0.4 s."""
    queue, queues, done = 0.0, [], 0.0
    for _ in range(40 * 20):
        queue += place(pod, "b", 1) + place(pod, "a", 1000)
        done += min(queue, 400 / 20)
        queue = max(0.0, queue - 400 / 20)
        queues.append(queue)
        clock.advance(ms=50)
        if len(queues) % 20 == 0:
            load = {"running": min(8, int(queue)), "waiting": max(0, int(queue) - 8), "deferred": 0}
            pod.probed(**load, tenants={"a": int(queue)})

    settled = queues[len(queues) // 2 :]
    assert max(settled) < 0.4 * 400
    assert done > 0.8 * 400 * 40


def test_a_request_whose_end_is_reported_counts_until_then(pod):
    place(pod, "b", 1)
    with pod.carried("a"):
        assert place(pod, "a", 500) == FIRST_ROOM - 1
        assert not pod.takes("a")

    assert pod.takes("a")


def test_nothing_is_kept_of_tenants_that_are_gone(pod, clock):
    for number in range(100):
        with pod.carried(f"carried-{number}"):
            pod.routed(f"routed-{number}")
    probe(pod, clock, 0, 0)
    clock.advance(s=SHARING_S)
    probe(pod, clock, 0, 0)

    assert not pod._of
    assert pod._all.at(0, 1) == 0


def test_what_is_remembered_is_bounded_while_no_probe_is_answered(pod):
    for number in range(20_000):
        with pod.carried(f"tenant-{number}"):
            pod.routed(f"tenant-{number}")

    assert len(pod._of) == 4096


steps = st.lists(
    st.one_of(
        st.tuples(st.just("place"), st.sampled_from("abc"), st.integers(1, 40)),
        st.tuples(st.just("probe"), st.integers(0, 60), st.integers(0, 60)),
    ),
    max_size=40,
)


@settings(deadline=None, max_examples=200)
@given(steps)
def test_whatever_the_probes_say_counts_are_right_and_a_small_tenant_is_never_refused(steps):
    clock = ManualClock()
    pod = PodTenants(lambda: clock.now_ms() / 1000)
    placed = Counter()
    for what, one, two in steps:
        if what == "place":
            placed[one] += place(pod, one, two)
        else:
            placed.clear()
            probe(pod, clock, one, two, a=min(one, 7), b=max(0, one + two - 7))

        assert pod.takes("d")
        assert all(pod.reported(tenant) + placed[tenant] >= SHARE_MIN or pod.takes(tenant) for tenant in "abc")


def test_direct_requests_are_no_ends_of_the_reported_ones(pod, clock):
    """Seen failing with direct requests in `since_probe`: the report without them looked like their end."""
    pod.routed("b")
    probe(pod, clock, 40, 40, a=39, b=1)
    for _ in range(30):
        pod.routed("a", is_direct=True)
    probe(pod, clock, 40, 40, a=39, b=1)
    clock.advance(s=0.9)

    assert not pod.is_below_share("a")


def test_direct_requests_count_for_their_tenant_while_they_are_carried(pod, clock):
    """Seen failing with `direct` left out of `at`."""
    with ExitStack() as carried:
        for _ in range(FIRST_ROOM):
            carried.enter_context(pod.carried("a", is_direct=True))
        probe(pod, clock, 40, 40, b=1)

        assert not pod.is_below_share("a")
    assert pod.is_below_share("a")


def test_a_pod_has_room_until_it_has_as_many_requests_as_it_computes(pod, clock):
    """Seen failing with direct requests left out of the total."""
    probe(pod, clock, 8, 1)
    assert not pod.has_room()
    probe(pod, clock, 8, 0)
    for _ in range(8):
        assert pod.has_room()
        pod.routed("a", is_direct=True)
    assert not pod.has_room()
