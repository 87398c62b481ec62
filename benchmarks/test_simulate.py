"""The simulation: the same seed shows the same, and what it shows follows from what happens."""

import pytest

from benchmarks.bench_simulate import EVENTS, control_row, happen, rows_of
from benchmarks.simulate.pods import Tier
from benchmarks.simulate.rates import BYTES_PER_TOKEN, Rates, control_costs, measured_rates
from benchmarks.simulate.seen import told
from benchmarks.simulate.world import World

STRETCH_S = 90.0
RATES = Rates(6.0e9, 1.7e9, 0.57e9)
"""About what is measured; the tests do not change with each measurement."""


@pytest.fixture
def world():
    made = []

    def make(**more):
        asked = {"num_pods": 6, "num_contexts": 3000, "requests_per_pod_s": 1.0, "seed": 1} | more
        made.append(World(RATES, **asked))
        return made[-1]

    yield make
    for one in made:
        one.close()


def stretch(world):
    return told(world.run(world.now_s + STRETCH_S), world.pods, STRETCH_S)


def test_the_same_seed_shows_the_same_and_another_something_else(world):
    first, again, other = (stretch(world(seed=seed)) for seed in (1, 1, 2))

    assert first == again
    assert first != other


def test_turns_stay_on_their_pod_and_pods_share_while_nothing_is_overloaded(world):
    one = world()
    stretch(one)
    seen = stretch(one)

    assert seen["stayed"] >= 0.95
    assert seen["served_skew"] < 2
    assert seen["refused"] == seen["lost"] == 0
    assert sum(seen["restores"].values()) == pytest.approx(1, abs=0.01)


def test_a_zone_that_goes_costs_turns_that_are_restored_from_the_store_if_there_is_one(world):
    found = []
    for has_store in (True, False):
        one = world(has_store=has_store)
        stretch(one)
        happen(one, "zone", STRETCH_S)
        found.append(stretch(one))
        assert sum(pod.is_up for pod in one.pods) == 4
    kept, gone = found

    assert kept["restores"]["store"] > 0.01
    assert "store" not in gone["restores"]
    assert kept["lost"] > 0
    assert kept["hit_rate"] > gone["hit_rate"]


def test_after_a_rolling_restart_all_pods_are_back_and_serve(world):
    one = world()
    stretch(one)
    happen(one, "restart", STRETCH_S)
    seen = stretch(one)

    assert all(pod.is_up and pod.served and pod.life == 1 for pod in one.pods)
    assert seen["requests"] > 0
    assert seen["reasons"]["holder_draining"] > 0


def test_a_tier_holds_what_was_used_last():
    tier = Tier(10 * BYTES_PER_TOKEN)
    for name, num_tokens in ((1, 4), (2, 4), (1, 5), (3, 3)):
        tier.touch(name, num_tokens)

    assert (tier.held, tier.num_tokens) == ({1: 5, 3: 3}, 8)


def test_rates_and_costs_are_those_of_the_kept_results():
    rates = measured_rates()

    assert rates.host_bytes_per_s > rates.disk_bytes_per_s > rates.sealed_bytes_per_s == rates.fetched_bytes_per_s
    assert control_costs().gateway_s > control_costs().redis_s > 0


def test_a_report_has_every_event_and_what_the_control_plane_takes():
    rows = rows_of(3, 1, seconds=30.0)
    idle, busy = (control_row(rows[0], probe_s) for probe_s in (0.001, 0.4))

    assert [row["when"] for row in rows] == ["steady", *EVENTS]
    assert idle["gateways"] == 1
    assert (busy["core that a gateway probes with"], busy["gateways"]) == (1.2, None)
    assert {"hit_rate", "served_skew"} <= rows[0].keys()
