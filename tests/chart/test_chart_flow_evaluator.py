"""The evaluator of NetworkPolicies against the cases of the Kubernetes documentation."""

from __future__ import annotations

import pytest

from tests.chart.flows import allowed, outside, pod

NAMESPACE = "a"
SERVER = pod("server", NAMESPACE, {"app": "server"}, {"http": 8000})
FRIEND = pod("friend", NAMESPACE, {"app": "friend"})
STRANGER = pod("stranger", "b", {"app": "friend"})
INTERNET = outside("internet", "203.0.113.7")
CALLERS = [FRIEND, STRANGER, INTERNET]


def policy(spec: dict, selected: str = "server") -> dict:
    """Return a policy for one app."""
    return {"kind": "NetworkPolicy", "spec": {"podSelector": {"matchLabels": {"app": selected}}, **spec}}


def who_reaches(*policies: dict, ports=(8000, 22)) -> set:
    """Return caller and port of what reaches the server."""
    flows = allowed(policies, namespace=NAMESPACE, callers=CALLERS, called=[SERVER], ports=ports)
    return {(caller, port) for caller, _, port in flows}


def test_without_a_policy_everything_passes():
    assert len(who_reaches()) == 6


def test_a_policy_without_rules_closes_the_pod():
    assert who_reaches(policy({"policyTypes": ["Ingress"]})) == set()


def test_an_egress_policy_alone_leaves_callers_alone():
    assert len(who_reaches(policy({"policyTypes": ["Egress"], "egress": []}))) == 6


def test_a_rule_without_peers_lets_anybody_to_its_port_by_number_or_name():
    for port in (8000, "http"):
        rule = policy({"policyTypes": ["Ingress"], "ingress": [{"ports": [{"port": port}]}]})

        assert who_reaches(rule) == {("friend", 8000), ("stranger", 8000), ("internet", 8000)}


def test_a_pod_selector_alone_means_this_namespace():
    rule = policy({"ingress": [{"from": [{"podSelector": {"matchLabels": {"app": "friend"}}}]}]})

    assert who_reaches(rule) == {("friend", 8000), ("friend", 22)}


def test_a_namespace_selector_takes_all_of_its_pods_and_with_a_pod_selector_those():
    namespaces = {"matchExpressions": [{"key": "kubernetes.io/metadata.name", "operator": "In", "values": ["b"]}]}
    both = {"namespaceSelector": namespaces, "podSelector": {"matchLabels": {"app": "other"}}}

    assert who_reaches(policy({"ingress": [{"from": [{"namespaceSelector": namespaces}]}]}), ports=(1,)) == {
        ("stranger", 1)
    }
    assert who_reaches(policy({"ingress": [{"from": [both]}]})) == set()


@pytest.mark.parametrize(("hole", "passes"), [("203.0.113.0/24", False), ("198.51.100.0/24", True)])
def test_an_ip_block_takes_addresses_outside_the_cluster_but_its_holes(hole, passes):
    block = {"ipBlock": {"cidr": "0.0.0.0/0", "except": [hole]}}

    assert who_reaches(policy({"ingress": [{"from": [block]}]}), ports=(1,)) == ({("internet", 1)} if passes else set())


def test_both_ends_must_agree():
    open_server = policy({"ingress": [{}]})
    closed_friend = policy({"policyTypes": ["Egress"]}, selected="friend")

    assert ("friend", 8000) not in who_reaches(open_server, closed_friend)


def test_policies_add_up():
    by_pod = policy({"ingress": [{"from": [{"podSelector": {}}], "ports": [{"port": 22}]}]})
    by_port = policy({"ingress": [{"ports": [{"port": 8000, "endPort": 8010}]}]})

    assert who_reaches(by_pod, by_port) == {("friend", 22), *((caller.name, 8000) for caller in CALLERS)}


def test_dns_is_asked_over_udp():
    tcp = policy({"ingress": [{"ports": [{"port": 53}]}]})
    udp = policy({"ingress": [{"ports": [{"port": 53, "protocol": "UDP"}]}]})

    assert who_reaches(tcp, ports=(53,)) == set()
    assert len(who_reaches(udp, ports=(53,))) == 3
