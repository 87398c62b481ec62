"""Which pod takes a request: by readiness, subset, model, room, holder, affinity, load, in this order."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contextcache.errors import EndpointsSaturated, NoReadyEndpoint
from gateway.pods.routing import (
    LoadLimits,
    Reason,
    RouteQuery,
    Strategy,
    choose_endpoint,
    is_saturated,
    load_of,
    rendezvous_order,
    strategy_of,
    waiting_at,
)
from gateway.ports import Endpoint, EndpointState, EngineLoad
from tests.kit.seed import random_of

LIMITS = LoadLimits()
SATURATED = EngineLoad(running=8, waiting=40, kv_usage=0.5)
FULL = EngineLoad(running=8, waiting=256, kv_usage=0.5)


def pod(name, *, ready=True, models=("m",), in_flight=0, routed_at=0, draining=False, **more):
    endpoint = Endpoint(name, f"http://{name}:8000", draining=draining)
    return EndpointState(endpoint, ready, frozenset(models), in_flight, routed_at, **more)


def choose(states, *, limits=LIMITS, seed=0, **query):
    return choose_endpoint(states, RouteQuery(**query), limits=limits, rng=Random(seed))


def name_of(states, **query):
    return choose(states, **query).endpoint.name


def test_a_ready_holder_is_chosen_though_others_have_less_to_do():
    choice = choose([pod("a"), pod("b", in_flight=9, load=EngineLoad(9, 31, 0.97))], model="m", holder="b")

    assert (choice.endpoint.name, choice.reason) == ("b", Reason.HOLDER)


@pytest.mark.parametrize(
    ("holder", "reason"),
    [
        (pod("b", ready=False), Reason.AWAY),
        (pod("b", models=["other"]), Reason.AWAY),
        (pod("c"), Reason.AWAY),
        (pod("b", draining=True), Reason.DRAINING),
        (pod("b", load=SATURATED), Reason.SATURATED),
        (pod("b", load=FULL), Reason.SATURATED),
        (pod("b", load=EngineLoad(8, 1, 0.99)), Reason.SATURATED),
    ],
)
def test_a_turn_leaves_a_holder_that_cannot_take_it(holder, reason):
    states = [pod("a", in_flight=9), holder]
    choice = choose([state for state in states if state.endpoint.name != "c"], model="m", holder="b")

    assert (choice.endpoint.name, choice.reason) == ("a", reason)


def test_a_saturated_holder_is_as_good_as_any_where_all_are_saturated():
    assert name_of([pod("a", load=SATURATED), pod("b", load=SATURATED, in_flight=60)], holder="b") == "b"


def test_a_full_holder_is_left_even_for_a_saturated_pod():
    assert name_of([pod("a", load=SATURATED), pod("b", load=FULL)], holder="b") == "a"


def test_a_turn_moves_to_a_pod_that_can_use_its_kv():
    states = [
        pod("a"),
        pod("b", ready=False, fingerprint="f1"),
        pod("c", in_flight=9, fingerprint="f1", tiers=frozenset({"host"})),
        pod("d", fingerprint="f1"),
        pod("e", fingerprint="f2", tiers=frozenset({"host"})),
    ]

    assert name_of(states, holder="b") == "c"
    assert name_of(states[:2], holder="b") == "a"


def test_without_a_holder_the_least_loaded_pod_is_chosen():
    assert name_of([pod("a", in_flight=2), pod("b", in_flight=1)], model="m") == "b"
    assert name_of([pod("a", load=EngineLoad(2, 0, 0)), pod("b", load=EngineLoad(1, 0, 0))], model="m") == "b"


def test_what_came_and_went_since_the_probe_counts():
    busy = EngineLoad(running=8, waiting=30, kv_usage=0.5)

    assert load_of(pod("a", load=busy, since_probe=5)) == 43
    assert load_of(pod("a", load=busy, since_probe=-8)) == 30
    assert load_of(pod("a", load=busy, since_probe=-60, in_flight=3)) == 3
    assert waiting_at(pod("a", load=busy, since_probe=5)) == 35
    assert waiting_at(pod("a", load=busy, since_probe=-60)) == 0
    assert waiting_at(pod("a", load=EngineLoad(8, 0, 0.5), since_probe=60)) == 0
    assert name_of([pod("a", load=busy, since_probe=5), pod("b")], holder="a") == "b"


def test_equally_loaded_pods_take_turns():
    assert name_of([pod("a", routed_at=5), pod("b", routed_at=4)], model="m") == "b"
    assert name_of([pod("a", routed_at=5), pod("b")], model="m") == "b"


def test_equals_share_evenly():
    routed_at = dict.fromkeys("abcde", 0)
    counts = dict.fromkeys("abcde", 0)
    rng = random_of("equals")
    for number in range(1, 1001):
        states = [pod(name, routed_at=at) for name, at in routed_at.items()]
        chosen = choose_endpoint(states, RouteQuery(), limits=LIMITS, rng=rng).endpoint.name
        routed_at[chosen] = number
        counts[chosen] += 1

    assert min(counts.values()) > 160


def test_a_pod_that_serves_the_model_comes_before_an_idle_one_that_does_not():
    assert name_of([pod("a", in_flight=9), pod("b", models=["other"])], model="m") == "a"


def test_a_pod_that_keeps_its_models_to_itself_may_serve_any():
    assert name_of([pod("a", in_flight=9), pod("b", models=[])], model="m") == "b"


def test_a_model_nobody_serves_goes_to_any_ready_pod():
    assert name_of([pod("a", ready=False, models=["x"]), pod("b")], model="x") == "b"


def test_a_draining_pod_is_used_where_it_alone_serves():
    states = [pod("a", draining=True), pod("b", models=["other"])]

    assert name_of(states, model="m") == "a"
    assert name_of(states) == "b"
    assert name_of(states[:1], holder="a") == "a"


def test_no_ready_pod_is_an_error_to_retry():
    with pytest.raises(NoReadyEndpoint) as caught:
        choose([pod("a", ready=False)], model="m")

    assert caught.value.retry_after_s == 2


def test_a_subset_that_holds_no_ready_pod_is_the_same_error():
    for subset in (frozenset(), frozenset({"x:8000"})):
        with pytest.raises(NoReadyEndpoint):
            choose([pod("a")], subset=subset)

    assert name_of([pod("a"), pod("b", in_flight=9)], subset=frozenset({"b:8000"}), holder="a") == "b"


def test_where_every_queue_is_full_new_work_is_refused_and_light_requests_are_not():
    states = [pod("a", load=FULL), pod("b", load=FULL)]
    with pytest.raises(EndpointsSaturated) as caught:
        choose(states, holder="a")

    assert (caught.value.http_status, caught.value.retry_after_s) == (429, 2)
    assert name_of(states, light=True) in {"a", "b"}
    assert name_of(states, limits=LoadLimits(shed_waiting=0), holder="a") == "a"
    assert name_of([*states, pod("c", load=SATURATED)]) == "c"


def test_a_strategy_of_the_clients_comes_before_the_holder_where_it_says_so():
    states = [pod("a"), pod("b", in_flight=9)]

    assert choose(states, holder="b", strategy=Strategy.LEAST_REQUEST).endpoint.name == "a"
    assert choose(states, holder="b", strategy=Strategy.LEAST_REQUEST).reason is Reason.STRATEGY
    assert {name_of(states, holder="b", strategy=Strategy.RANDOM, seed=seed) for seed in range(20)} == {"a", "b"}
    for strategy in (Strategy.PREFIX_CACHE, Strategy.SESSION_AFFINITY):
        assert name_of(states, holder="b", strategy=strategy) == "b"


def test_random_leaves_saturated_pods_alone_while_others_are_not():
    states = [pod("a"), pod("b", load=SATURATED)]

    assert {name_of(states, strategy=Strategy.RANDOM, seed=seed) for seed in range(20)} == {"a"}


@pytest.mark.parametrize("header", [None, "", "bogus", "prefix-cache,random", "prefix_cache"])
def test_an_unknown_strategy_is_none(header):
    assert strategy_of(header) is None


def test_a_strategy_is_read_whatever_its_case():
    assert [strategy_of(name) for name in ("random", "Least-Request", " prefix-cache ", "session-affinity")] == [
        Strategy.RANDOM,
        Strategy.LEAST_REQUEST,
        Strategy.PREFIX_CACHE,
        Strategy.SESSION_AFFINITY,
    ]


def test_what_begins_alike_meets_until_the_pod_is_overloaded():
    idle = [pod(name) for name in "abcd"]
    first = name_of(idle, affinity="x")
    busy = [pod(name, in_flight=4 if name == first else 1) for name in "abcd"]
    loaded = [pod(name, in_flight=9 if name == first else 1) for name in "abcd"]
    kv_full = EngineLoad(running=0, waiting=1, kv_usage=0.99)
    saturated = [pod(name, load=kv_full if name == first else EngineLoad()) for name in "abcd"]
    second = rendezvous_order(idle, "x")[1].endpoint.name

    assert name_of(busy, affinity="x") == second
    assert name_of([pod(name, in_flight=1 if name == first else 0) for name in "abcd"], affinity="x") == first
    assert name_of(loaded, affinity="x") == name_of(saturated, affinity="x") == second
    assert choose(idle, affinity="x").reason is Reason.AFFINITY


def test_what_begins_alike_goes_where_it_was_before_and_elsewhere_is_told_where_that_is():
    def knowing(name, **more):
        state = pod(name, tiers=frozenset({"disk"}), **more)
        return replace(state, endpoint=replace(state.endpoint, sidecar=f"{name}:9001"))

    last = rendezvous_order([pod(name) for name in "abcd"], "x")[-1].endpoint.name
    states = [knowing(name, beginnings={"x": 1} if name == last else {}) for name in "abcd"]
    busy = [replace(state, in_flight=9) if state.endpoint.name == last else state for state in states]
    gone = [replace(state, ready=False) if state.endpoint.name == last else state for state in states]
    silent = [replace(state, tiers=frozenset()) for state in gone]

    assert (name_of(states, affinity="x"), choose(states, affinity="x").prefix_at) == (last, "")
    assert name_of(states, affinity="y") == rendezvous_order(states, "y")[0].endpoint.name
    for elsewhere in (busy, gone):
        assert name_of(elsewhere, affinity="x") != last
        assert choose(elsewhere, affinity="x").prefix_at == f"{last}:9001"
    assert choose(silent, affinity="x").prefix_at == choose(states, affinity="y").prefix_at == ""


def test_of_pods_that_know_a_beginning_the_one_asked_last_is_first_since_the_conversation_moved_there():
    order = [state.endpoint.name for state in rendezvous_order([pod(name) for name in "abcd"], "x")]
    heard = dict(zip(order, (3, 4, 0, 4), strict=True))
    states = [
        replace(pod(name, beginnings={"x": heard[name]} if heard[name] else {}), tiers=frozenset({"disk"}))
        for name in "abcd"
    ]
    states = [replace(state, endpoint=replace(state.endpoint, sidecar=state.endpoint.name)) for state in states]
    busy = [replace(state, in_flight=9) if heard[state.endpoint.name] == 4 else state for state in states]

    assert (name_of(states, affinity="x"), choose(states, affinity="x").prefix_at) == (order[1], "")
    assert (name_of(busy, affinity="x"), choose(busy, affinity="x").prefix_at) == (order[0], order[1])
    assert name_of([state for state in states if state.endpoint.name != order[1]], affinity="x") == order[3]


def test_pods_whose_long_names_begin_alike_share_too():
    states = [pod("x" * 120 + str(number)) for number in range(4)]
    chosen = [rendezvous_order(states, str(key))[0].endpoint.name for key in range(64)]

    assert set(chosen) == {state.endpoint.name for state in states}


NAMES = [f"pod-{number}" for number in range(6)]
loads = st.builds(EngineLoad, st.integers(0, 300), st.integers(0, 300), st.floats(0, 1))
pods_ = st.builds(
    lambda name, more, draining: pod(name, draining=draining, **more),
    st.sampled_from(NAMES),
    st.fixed_dictionaries(
        {
            "ready": st.booleans(),
            "models": st.sampled_from([(), ("m",), ("n",), ("m", "n")]),
            "in_flight": st.integers(0, 300),
            "routed_at": st.integers(0, 1000),
            "load": loads,
            "since_probe": st.integers(-300, 300),
            "fingerprint": st.sampled_from(["", "f1", "f2"]),
            "tiers": st.sampled_from([frozenset(), frozenset({"host"})]),
        }
    ),
    st.booleans(),
)
states_ = st.lists(pods_, max_size=6, unique_by=lambda state: state.endpoint.name)
queries = st.builds(
    RouteQuery,
    model=st.sampled_from([None, "m", "n", "unknown"]),
    holder=st.sampled_from(["", "pod-gone", *NAMES]),
    affinity=st.sampled_from(["", "x", "y"]),
    strategy=st.sampled_from([None, *Strategy]),
    subset=st.none() | st.frozensets(st.sampled_from([f"{name}:8000" for name in NAMES])),
    light=st.booleans(),
)
limits_ = st.builds(LoadLimits, st.integers(1, 64), st.floats(0.5, 1), st.sampled_from([0, 64, 256]))


def fitting(states, query):
    """Pods that may take the request at all, and of those the ones that should."""
    allowed = [s for s in states if s.ready and (query.subset is None or s.endpoint.address in query.subset)]
    serving = [s for s in allowed if query.model is None or not s.models or query.model in s.models]
    return allowed, [s for s in serving or allowed if not s.endpoint.draining] or serving or allowed


@settings(deadline=None)
@given(states_, queries, limits_, st.integers())
def test_only_a_pod_that_fits_is_chosen_and_errors_come_only_when_none_does(states, query, limits, seed):
    allowed, fit = fitting(states, query)
    open_ = [s for s in fit if query.light or not limits.shed_waiting or waiting_at(s) < limits.shed_waiting]
    try:
        chosen = choose(states, limits=limits, seed=seed, **{name: getattr(query, name) for name in query.__slots__})
    except NoReadyEndpoint:
        assert not allowed
    except EndpointsSaturated:
        assert allowed
        assert not open_
    else:
        assert chosen.endpoint in [s.endpoint for s in open_]


@settings(deadline=None)
@given(states_, queries, st.sampled_from([None, Strategy.PREFIX_CACHE]), limits_, st.integers(0, 5))
def test_a_holder_that_fits_is_chosen_unless_the_client_asked_for_another(states, query, strategy, limits, number):
    query = replace(query, strategy=strategy, light=not limits.shed_waiting)
    fit = [s for s in fitting(states, query)[1] if query.light or waiting_at(s) < limits.shed_waiting]
    if not fit:
        return
    holder = fit[number % len(fit)]
    query = replace(query, holder=holder.endpoint.name)
    chosen = choose_endpoint(states, query, limits=limits, rng=Random(0))
    better = [s for s in fit if not is_saturated(s, limits)]

    if is_saturated(holder, limits) and better:
        assert chosen.endpoint in [s.endpoint for s in better]
        assert chosen.reason is Reason.SATURATED
    else:
        assert (chosen.endpoint, chosen.reason) == (holder.endpoint, Reason.HOLDER)


@settings(deadline=None)
@given(states_, queries, st.integers())
def test_the_same_seed_chooses_the_same_pod(states, query, seed):
    def chosen():
        try:
            return choose_endpoint(states, query, limits=LIMITS, rng=Random(seed))
        except (NoReadyEndpoint, EndpointsSaturated) as exc:
            return type(exc)

    assert chosen() == chosen()


@settings(deadline=None)
@given(st.sets(st.sampled_from(NAMES), min_size=2), st.text(min_size=1, max_size=32), st.data())
def test_a_pod_that_goes_moves_only_its_own_requests(names, affinity, data):
    states = [pod(name) for name in names]
    lost = data.draw(st.sampled_from(sorted(names)))
    before = rendezvous_order(states, affinity)
    after = rendezvous_order([state for state in states if state.endpoint.name != lost], affinity)

    assert [state for state in before if state.endpoint.name != lost] == after


@settings(deadline=None)
@given(st.lists(st.integers(0, 200), min_size=1, max_size=6), st.text(min_size=1, max_size=8))
def test_affinity_overloads_no_pod_beyond_its_bound(in_flight, affinity):
    states = [pod(NAMES[number], in_flight=value) for number, value in enumerate(in_flight)]
    chosen = choose(states, affinity=affinity).endpoint.name
    load = next(state.in_flight for state in states if state.endpoint.name == chosen)

    assert load <= LIMITS.affinity_overload * (sum(in_flight) / len(in_flight) + 1)


@settings(deadline=None)
@given(states_, st.sampled_from([None, Strategy.LEAST_REQUEST]))
def test_the_least_loaded_is_never_more_loaded_than_another_that_fits(states, strategy):
    query = RouteQuery(strategy=strategy, light=True)
    fit = [s for s in fitting(states, query)[1] if not is_saturated(s, LIMITS)]
    if not fit:
        return
    states = fit
    chosen = choose_endpoint(states, query, limits=LIMITS, rng=Random(0)).endpoint

    assert load_of(next(s for s in fit if s.endpoint == chosen)) == min(map(load_of, fit))
