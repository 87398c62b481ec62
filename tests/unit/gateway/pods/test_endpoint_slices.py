"""EndpointSlices and Pods in, endpoints out: one a pod, draining when it leaves, with a sidecar when it has one."""

from __future__ import annotations

from copy import deepcopy
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.pods.kubernetes import SliceRules, addresses_of, endpoints_of, pod_of
from gateway.pods.state import Endpoint
from tests.kit.kube_objects import pod_object, slice_entry, slice_object

A = Endpoint("a", "http://10.0.0.1:8000", "10.0.0.1:50061")
DRAINING_A = Endpoint("a", A.url, A.sidecar, draining=True)


def discovered(*slices, pods=(), **rules):
    addresses = [address for each in slices for address in addresses_of(each)]
    return endpoints_of(addresses, {pod["metadata"]["name"]: pod_of(pod) for pod in pods}, rules=SliceRules(**rules))


def test_a_pod_of_a_slice_is_an_endpoint_of_its_name():
    found = discovered(slice_object("s", slice_entry("a", "10.0.0.1")), pods=[pod_object("a")])

    assert found == (A,)


def test_endpoints_are_in_order_of_their_names():
    slices = [slice_object(name, slice_entry(name, f"10.0.0.{ord(name)}")) for name in "cab"]

    assert [found.name for found in discovered(*slices)] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("conditions", "draining"),
    [
        ({"ready": True, "serving": True, "terminating": False}, False),
        ({"ready": None, "serving": None, "terminating": None}, False),
        ({"ready": True, "serving": None, "terminating": None}, False),
        ({"ready": False, "serving": None, "terminating": None}, True),
        ({"ready": False, "serving": False, "terminating": False}, True),
        ({"ready": False, "serving": True, "terminating": True}, True),
        ({"ready": False, "serving": False, "terminating": True}, True),
        # publishNotReadyAddresses: ready is true whatever the pod says.
        ({"ready": True, "serving": False, "terminating": False}, True),
    ],
)
def test_conditions_decide_whether_it_drains(conditions, draining):
    found = discovered(slice_object("s", slice_entry("a", "10.0.0.1", **conditions)))

    assert found == (DRAINING_A if draining else A,)


def test_an_endpoint_without_conditions_serves():
    entry = slice_entry("a", "10.0.0.1")
    del entry["conditions"]

    assert discovered(slice_object("s", entry)) == (A,)


def test_a_pod_that_was_deleted_drains_before_its_slice_says_so():
    pod = pod_object("a")
    pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"

    assert discovered(slice_object("s", slice_entry("a", "10.0.0.1")), pods=[pod]) == (DRAINING_A,)


@pytest.mark.parametrize(("value", "draining"), [("true", True), ("false", False), ("", False)])
def test_the_annotation_drains_a_pod(value, draining):
    pod = pod_object("a", annotations={"context-cache.io/drain": value})
    found = discovered(slice_object("s", slice_entry("a", "10.0.0.1")), pods=[pod])

    assert found == (DRAINING_A if draining else A,)


def test_a_pod_without_a_sidecar_has_none_whatever_the_service_says():
    found = discovered(slice_object("s", slice_entry("a", "10.0.0.1")), pods=[pod_object("a", sidecar=False)])

    assert found == (Endpoint("a", A.url),)


def test_a_sidecar_is_a_container_of_that_name_or_what_was_injected():
    plain = pod_object("a", sidecar=False)
    plain["spec"]["containers"].append({"name": "kv-sidecar"})
    injected = pod_object("b", sidecar=False, annotations={"context-cache.io/injected": "0.1.0"})
    entries = slice_entry("a", "10.0.0.1"), slice_entry("b", "10.0.0.2")
    found = discovered(slice_object("s", *entries), pods=[plain, injected])

    assert [endpoint.sidecar for endpoint in found] == ["10.0.0.1:50061", "10.0.0.2:50061"]


def test_a_service_without_the_sidecars_port_has_no_sidecars():
    found = discovered(slice_object("s", slice_entry("a", "10.0.0.1"), sidecar_port=None), pods=[pod_object("a")])

    assert found == (Endpoint("a", A.url),)


def test_a_pod_not_seen_yet_is_as_its_slices_say():
    assert discovered(slice_object("s", slice_entry("a", "10.0.0.1"))) == (A,)


def test_ports_have_the_names_they_are_told():
    found = slice_object("s", slice_entry("a", "10.0.0.1"))
    found["ports"] = [{"name": "vllm", "port": 9000}, {"name": "http", "port": 80}, {"name": "kv", "port": 5}]

    assert discovered(found, port_name="vllm", sidecar_port_name="kv", scheme="https") == (
        Endpoint("a", "https://10.0.0.1:9000", "10.0.0.1:5"),
    )


def with_turn_port(found, name="turn"):
    found["ports"].append({"name": name, "port": 8010})
    return found


def test_a_turn_process_has_its_own_port_in_the_slice():
    """Seen failing without `turn_url` in `_endpoint`."""
    found = discovered(with_turn_port(slice_object("s", slice_entry("a", "10.0.0.1")), "own"), turn_port_name="own")

    assert (found[0].url, found[0].turn_url) == (A.url, "http://10.0.0.1:8010")
    assert (found[0].address, found[0].turn_address) == ("10.0.0.1:8000", "10.0.0.1:8010")


def test_the_turn_process_may_be_in_another_service_and_speaks_the_scheme_of_the_pod():
    """Seen failing with the turn port of the best entry alone."""
    slices = slice_object("s", slice_entry("a", "10.0.0.1")), slice_object("t", slice_entry("a", "10.0.0.1"))
    del with_turn_port(slices[1])["ports"][1]

    assert discovered(*slices, scheme="https")[0].turn_url == "https://10.0.0.1:8010"


@pytest.mark.parametrize(("container", "turn_url"), [("turn", "http://10.0.0.1:8010"), ("proxy", A.url)])
def test_a_pod_without_the_container_has_no_turn_process_whatever_the_service_says(container, turn_url):
    """Seen failing: during an upgrade from 0.1.0 no old pod was healthy, as nothing answered at its turn port."""
    pod = pod_object("a")
    pod["spec"]["containers"].append({"name": container})
    found = discovered(with_turn_port(slice_object("s", slice_entry("a", "10.0.0.1"))), pods=[pod])

    assert [endpoint.turn_url for endpoint in found] == [turn_url]


def test_without_the_port_the_turn_runs_in_vllms_api_server():
    assert (A.turn_url, A.turn_address, A.has_turn_process) == (A.url, A.address, False)
    assert Endpoint("a", A.url, turn_url="http://10.0.0.1:8010").has_turn_process


def test_a_slice_without_the_port_lists_nobody():
    assert discovered(slice_object("s", slice_entry("a", "10.0.0.1")), port_name="other") == ()


UDP = {"name": "http", "protocol": "UDP", "port": 8000}


@pytest.mark.parametrize(
    "ports", [None, [], *([{"name": "http", "port": port}] for port in (None, True, -1, 0, 65536, "8000")), [UDP]]
)
def test_a_port_without_a_number_or_of_another_protocol_is_none(ports):
    assert discovered(slice_object("s", slice_entry("a", "10.0.0.1")) | {"ports": ports}) == ()


def test_ipv6_is_in_brackets():
    found = discovered(slice_object("s", slice_entry("a", "2001:db8::1"), address_type="IPv6"))

    assert found == (Endpoint("a", "http://[2001:db8::1]:8000", "[2001:db8::1]:50061"),)
    assert found[0].address == "[2001:db8::1]:8000"


def test_a_dual_stack_pod_is_one_endpoint_by_ipv4_in_whatever_order_the_slices_come():
    slices = [
        slice_object("s6", slice_entry("a", "2001:db8::1"), address_type="IPv6"),
        slice_object("s4", slice_entry("a", "10.0.0.1")),
    ]

    assert {discovered(*order) for order in permutations(slices)} == {(A,)}


def test_ipv4_is_preferred_also_where_only_the_other_family_has_the_sidecar():
    slices = [
        slice_object("s6", slice_entry("a", "2001:db8::1"), address_type="IPv6"),
        slice_object("s4", slice_entry("a", "10.0.0.1"), sidecar_port=None),
    ]

    assert discovered(*slices) == (Endpoint("a", A.url, "[2001:db8::1]:50061"),)


def test_a_pod_in_two_services_is_one_endpoint_with_the_sidecar_that_one_of_them_knows():
    slices = [
        slice_object("plain", slice_entry("a", "10.0.0.1"), sidecar_port=None),
        slice_object("headless", slice_entry("a", "10.0.0.1")),
    ]

    assert {discovered(*order) for order in permutations(slices)} == {(A,)}


def test_of_two_entries_for_one_pod_the_one_that_serves_counts():
    """Between two slices an endpoint may be in both for a moment, with conditions of different times."""
    slices = [
        slice_object("old", slice_entry("a", "10.0.0.9", ready=False, serving=False)),
        slice_object("new", slice_entry("a", "10.0.0.1")),
    ]

    assert {discovered(*order) for order in permutations(slices)} == {(A,)}


@pytest.mark.parametrize(
    "change",
    [
        {"targetRef": None},
        {"targetRef": {"kind": "Node", "name": "n"}},
        {"targetRef": {"kind": "Pod"}},
        {"addresses": []},
        {"addresses": None},
        {"addresses": ["pod.example"]},
        {"addresses": ["169.254.169.254"]},
        {"addresses": ["::ffff:169.254.169.254"]},
        {"addresses": ["fe80::1"]},
        {"addresses": ["0.0.0.0"]},
        {"addresses": ["224.0.0.1"]},
    ],
)
def test_what_is_no_address_of_a_pod_is_left_out(change):
    entries = slice_entry("b", "10.0.0.2") | change, slice_entry("a", "10.0.0.1")

    assert discovered(slice_object("s", *entries)) == (A,)


@given(st.data())
def test_an_object_with_any_field_absent_is_understood(data):
    """What a server of another version leaves out, or says as null, removes no more than what it is about."""
    found = deepcopy(slice_object("s", slice_entry("a", "10.0.0.1")))
    pod = deepcopy(pod_object("a", annotations={"x": "y"}))
    for subject in (found, pod):
        inside = [subject]
        while data.draw(st.booleans()):
            fields = inside[-1]
            options = list(range(len(fields))) if isinstance(fields, list) else sorted(fields)
            if not options:
                break
            name = data.draw(st.sampled_from(options))
            if isinstance(fields[name], dict | list) and data.draw(st.booleans()):
                inside.append(fields[name])
                continue
            if isinstance(fields, dict) and data.draw(st.booleans()):
                del fields[name]
            else:
                fields[name] = None

    addresses = addresses_of(found)
    assert len(endpoints_of(addresses, {"a": pod_of(pod)}, rules=SliceRules())) <= 1
