"""Where new contexts go, and what follows them: many that begin alike share the pods, and a conversation stays."""

from collections import Counter

import pytest

from contextcache.identity import IDENTITY_HEADER
from gateway.kept import Plain
from gateway.paths import Kind
from gateway.pods.endpoints import Health
from gateway.pods.state import EngineLoad
from gateway.tenants.keys import Caller, SingleTenant
from tests.kit.gateway_parts import SECRET, GatewayParts
from tests.kit.identities import verify_identity
from tests.unit.gateway.test_flows_choice import MODELS, route, set_health

SYSTEM = "You are brief. " * 400
PODS = tuple(f"pod-{number}" for number in range(8))


@pytest.fixture
async def parts():
    found = GatewayParts(SingleTenant(), pods=PODS)
    await found.endpoints.probe_all()
    for name in PODS:
        found.endpoints.note_sidecar(name, fingerprint="f", tiers={"disk": 0.1})
    return found


async def send(parts, body, kind=Kind.COMPLETION):
    """Do what a front does with a request that it sends on and hears no more of."""
    forward = await route(parts, body, kind)
    parts.endpoints.note_routed(forward.endpoint.name)
    parts.gateway.sent(forward)
    return forward


async def create(parts, number, system=SYSTEM):
    """Send a create and return its pod, and the pod that it may have the beginning from."""
    forward = await send(parts, {"model": "stub-model", "prompt": f"{system}{number}"}, Kind.CREATE)
    identity = verify_identity(forward.set_headers[IDENTITY_HEADER], SECRET, now_ms=parts.clock.now_ms())
    return forward.endpoint.name, identity.prefix_at


@pytest.mark.parametrize("is_probed", [True, False], ids=["one after the other", "at once"])
async def test_many_contexts_with_one_system_prompt_share_idle_pods_and_each_but_the_first_finds_it(parts, is_probed):
    computed = 0
    knows = set()
    counts = Counter()
    for number in range(64):
        pod, prefix_at = await create(parts, number)
        computed += pod not in knows and not prefix_at
        knows.add(pod)
        counts[pod] += 1
        if is_probed:
            await parts.endpoints.probe_all()

    assert max(counts.values()) <= 2 * 64 / 8
    assert computed == 1


async def test_few_contexts_that_begin_alike_stay_together(parts):
    assert len({(await create(parts, number))[0] for number in range(4)}) == 1


async def test_a_conversation_stays_on_its_pod_while_new_ones_come(parts):
    parts.gateway.parts.keys.caller_of = lambda headers: Caller("keeper", None, Plain.KEEP)
    pods = {}
    for turn in range(5):
        for number in range(100):
            said = [{"role": "user", "content": f"{number} {SYSTEM}"}, {"role": "assistant", "content": "x" * turn}]
            forward = await send(parts, {"model": "stub-model", "messages": said})
            pods.setdefault(number, []).append(forward.endpoint.name)
            if number % 10 == 0:
                await parts.endpoints.probe_all()

    assert all(len(set(names)) == 1 for names in pods.values())
    assert max(Counter(names[0] for names in pods.values()).values()) <= 2 * 100 / 8


async def test_a_turn_leaves_its_holder_where_waiting_costs_more_than_bringing_its_kv(parts):
    """Three tokens of KV cost nothing; twenty waiting behind four cost forty seconds."""
    await parts.directory.add("ctx_1", holder="pod-0", tenant="default")
    queued = Health(healthy=True, models=MODELS, load=EngineLoad(running=4, waiting=20, kv_usage=0.5))
    await set_health(parts, queued, "pod-0")
    forward = await route(parts, {"session_id": "ctx_1"})

    assert forward.endpoint.name != "pod-0"
    assert len(parts.sidecars[forward.endpoint.name].pulls) == 1
