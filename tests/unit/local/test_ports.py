"""Port plans: one number chooses all."""

import pytest

from deploy.local.ports import plan_ports
from deploy.local.progress import StepFailed


def test_the_gateway_gets_the_port_asked_for_and_the_others_follow_ten_above():
    plan = plan_ports(8000)

    assert dict(plan.items()) == {"gateway": 8000, "redis": 8010, "manager": 8011, "sidecar": 8012, "engine": 8013}


def test_two_stacks_twenty_apart_share_no_port():
    first = {port for _, port in plan_ports(8000).items()}
    second = {port for _, port in plan_ports(8020).items()}

    assert not first & second


@pytest.mark.parametrize("port", [0, -1, 80, 1023, 65523, 70000])
def test_a_port_without_room_for_the_others_is_refused(port):
    with pytest.raises(StepFailed, match=f"PORT={port} is out of range"):
        plan_ports(port)


@pytest.mark.parametrize("port", [1024, 65522])
def test_the_bounds_are_allowed(port):
    assert plan_ports(port).gateway == port
