"""What a pod's pages say, whatever is on them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.pods.probe import clock_skew_s, engine_load, model_names
from gateway.pods.state import EngineLoad

PAGE = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
"""


def test_a_page_of_vllm_is_read():
    assert engine_load(PAGE) == EngineLoad(running=3, waiting=2, kv_usage=0.25)


def test_requests_that_wait_for_their_kv_are_told_from_those_that_wait_for_room():
    line = b'vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="deferred"} 1.0\n'
    pretending = b'vllm:num_requests_waiting_by_reason{model_name="\\",reason=\\"deferred\\"",reason="capacity"} 8.0\n'

    assert engine_load(PAGE + line).deferred == 1
    assert engine_load(PAGE + line + line.replace(b"1.0", b"2.0") + pretending).deferred == 3


def test_requests_of_all_engine_cores_add_up_and_the_fullest_one_counts():
    second = PAGE.replace(b'engine="0"', b'engine="1"').replace(b"0.25", b"0.75")

    assert engine_load(PAGE + second) == EngineLoad(running=6, waiting=4, kv_usage=0.75)


def test_a_sample_without_labels_and_one_with_a_time_are_read():
    assert engine_load(b"vllm:num_requests_running 7\nvllm:num_requests_waiting 1e1 1700000000\n") == EngineLoad(7, 10)


@pytest.mark.parametrize("value", [b"NaN", b"+Inf", b"-Inf", b"-3", b"x", b""])
def test_a_value_that_can_be_none_is_none(value):
    page = b"vllm:num_requests_running " + value + b"\nvllm:kv_cache_usage_perc " + value + b"\n"

    assert engine_load(page) == EngineLoad()


def test_a_label_cannot_pretend_to_be_a_sample():
    page = b'vllm:num_requests_running{model_name="a} 9 vllm:num_requests_running{ 8"} 3\n'

    assert engine_load(page) == EngineLoad(running=3)


def test_kv_usage_is_a_share():
    assert engine_load(b"vllm:kv_cache_usage_perc 97.5\n").kv_usage == 1.0


@settings(deadline=None)
@given(st.binary(max_size=200) | st.text(alphabet='vllm:num_requests_running{}" 0.9e\n', max_size=200).map(str.encode))
def test_no_page_is_an_error(page):
    load = engine_load(page)

    assert load.running >= 0
    assert load.waiting >= 0
    assert 0 <= load.kv_usage <= 1
    assert isinstance(model_names(page), frozenset)


@pytest.mark.parametrize(
    ("date", "skew_s"),
    [
        ("Sat, 28 Nov 2026 12:00:00 GMT", 0),
        ("Sat, 28 Nov 2026 12:01:30 GMT", 90),
        ("Sat, 28 Nov 2026 11:58:30 GMT", -90),
        ("", None),
        ("yesterday", None),
        ("Sat, 99 Nov 2026 12:00:00 GMT", None),
        ("Sat, 28 Nov 99999 12:00:00 GMT", None),
    ],
)
def test_a_pods_clock_is_compared_with_the_gateways(date, skew_s):
    assert clock_skew_s(date, now_ms=1_795_867_200_999) == skew_s


def test_model_names_are_read():
    assert model_names(b'{"data": [{"id": "a"}, {"id": "b"}]}') == {"a", "b"}


@pytest.mark.parametrize("body", [b"", b"[]", b'{"data": 7}', b'{"data": [{}]}', b"[" * 100_000, b"\xff"])
def test_what_is_no_list_of_models_names_none(body):
    assert model_names(body) == frozenset()
