"""Port plans: one number chooses all."""

import pytest

from deploy.local.ports import MAX_ENGINES, plan_ports
from deploy.local.progress import StepFailed


def ports_of(plan):
    single = [plan.envoy, plan.gateway, plan.ext_proc, plan.envoy_admin, plan.gateway_metrics, plan.redis, plan.manager]
    kinds = (plan.sidecar, plan.engine, plan.turn)
    return [*single, *(port_of(number) for number in range(MAX_ENGINES) for port_of in kinds)]


def test_envoy_gets_the_port_asked_for_the_gateway_follows_and_the_others_begin_ten_above():
    plan = plan_ports(8000)

    assert (plan.envoy, plan.gateway, plan.ext_proc, plan.envoy_admin) == (8000, 8001, 8002, 8003)
    assert (plan.redis, plan.manager) == (8010, 8011)
    assert [(plan.sidecar(number), plan.engine(number)) for number in (0, 1)] == [(8012, 8013), (8014, 8015)]
    assert [plan.turn(number) for number in (0, 1)] == [8020, 8021]


def test_two_stacks_24_apart_share_no_port():
    ports = ports_of(plan_ports(8000)) + ports_of(plan_ports(8024))

    assert len(set(ports)) == len(ports)


@pytest.mark.parametrize("port", [0, -1, 80, 1023, 65513, 70000])
def test_a_port_without_room_for_the_others_is_refused(port):
    with pytest.raises(StepFailed, match=f"PORT={port} is out of range"):
        plan_ports(port)


@pytest.mark.parametrize("port", [1024, 65512])
def test_the_bounds_are_allowed(port):
    assert max(ports_of(plan_ports(port))) <= 65535
