"""The holder, else the least loaded pod that serves the model."""

import pytest

from contextcache.errors import NoReadyEndpoint
from gateway.ports import Endpoint, EndpointState
from gateway.routing import choose_endpoint, model_matters


def pod(name, *, ready=True, models=("m",), in_flight=0, num_routed=0):
    return EndpointState(Endpoint(name, f"http://{name}"), ready, frozenset(models), in_flight, num_routed)


def test_a_ready_holder_is_chosen_however_loaded():
    assert choose_endpoint([pod("a"), pod("b", in_flight=9)], model="m", holder="b").name == "b"


def test_a_holder_that_is_not_ready_is_passed_over():
    assert choose_endpoint([pod("a", in_flight=9), pod("b", ready=False)], model="m", holder="b").name == "a"


def test_without_a_holder_the_least_loaded_pod_is_chosen():
    assert choose_endpoint([pod("a", in_flight=2), pod("b", in_flight=1)], model="m").name == "b"


def test_equally_loaded_pods_take_turns():
    assert choose_endpoint([pod("a", num_routed=5), pod("b", num_routed=4)], model="m").name == "b"


def test_a_pod_that_serves_the_model_comes_before_an_idle_one_that_does_not():
    assert choose_endpoint([pod("a", in_flight=9), pod("b", models=["other"])], model="m").name == "a"


def test_a_pod_that_keeps_its_models_to_itself_may_serve_any():
    assert choose_endpoint([pod("a", in_flight=9), pod("b", models=[])], model="m").name == "b"


def test_a_model_nobody_serves_goes_to_any_ready_pod():
    assert choose_endpoint([pod("a", ready=False, models=["x"]), pod("b")], model="x").name == "b"


def test_no_ready_pod_is_an_error_to_retry():
    with pytest.raises(NoReadyEndpoint) as caught:
        choose_endpoint([pod("a", ready=False)], model="m")

    assert caught.value.retry_after_s == 2


def test_the_model_matters_only_where_ready_pods_differ():
    assert not model_matters([pod("a"), pod("b"), pod("c", ready=False, models=["other"])])
    assert model_matters([pod("a"), pod("b", models=["other"])])
