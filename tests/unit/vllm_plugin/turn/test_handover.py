"""Large bodies reach the engine one at a time; a tenant that sends many does not hold up another one's."""

import asyncio
import gc

import pytest

from contextcache.identity import tenant_tag
from contextcache.requests import QUEUED_BYTES
from tests.kit.fake_vllm import FakeVllm
from tests.kit.turn_bench import SECRET, Pod
from vllm_plugin.turn.admission import BodyQueue

LARGE = b"x" * QUEUED_BYTES


class World:
    """A clock that moves when the engine reads, or a rest is taken."""

    def __init__(self, cost_s):
        self.now_s = 100.0
        self.cost_s = cost_s
        self.events = []
        self.handover = BodyQueue(clock_s=lambda: self.now_s, sleep=self.rest)

    async def rest(self, seconds):
        await asyncio.sleep(0)
        self.now_s += seconds
        self.events.append("rest")

    async def send(self, tenant, *pieces):
        """Be the engine for one request: receive its body, and read it at once."""
        left = list(pieces)

        async def receive():
            await asyncio.sleep(0)
            return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

        handed = self.handover.receive(tenant, receive)
        while (await handed())["more_body"]:
            pass
        self.now_s += self.cost_s
        self.events.append(tenant)


async def test_between_two_bodies_the_loop_has_as_long_as_the_engine_took():
    """Seen failing without it: sixteen bodies of one tenant were read in a row, and nothing else meanwhile."""
    world = World(0.4)
    await asyncio.gather(*(world.send("a", LARGE) for _ in range(3)))

    assert world.events == ["a", "rest", "a", "rest", "a"]
    assert world.now_s == pytest.approx(100 + 5 * 0.4)


async def test_a_tenant_with_many_does_not_hold_up_the_other():
    world = World(0.4)
    await asyncio.gather(*(world.send("a", LARGE) for _ in range(9)), world.send("b", LARGE))
    order = [event for event in world.events if event != "rest"]

    assert order.index("b") <= 2
    assert sorted(order) == ["a"] * 9 + ["b"]


async def test_what_is_read_soon_costs_no_rest_and_small_bodies_wait_for_nobody():
    quick, slow = World(0.001), World(0.4)
    await asyncio.gather(*(quick.send("a", LARGE) for _ in range(3)))
    await slow.send("a", LARGE)
    await slow.send("b", b"x" * (QUEUED_BYTES - 1))

    assert quick.events == ["a"] * 3
    assert slow.events == ["a", "b"]


async def test_a_body_in_pieces_is_as_large_as_all_of_them():
    world = World(0.4)
    await asyncio.gather(*(world.send("a", *[LARGE[:-1]] * 2) for _ in range(2)))

    assert world.events == ["a", "rest", "a"]


async def test_one_that_leaves_while_it_waits_holds_up_nobody():
    world = World(0.4)
    tasks = [asyncio.create_task(world.send(tenant, LARGE)) for tenant in "aaab"]
    for _ in range(3):
        await asyncio.sleep(0)
    for task in tasks[1:3]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await world.send("a", LARGE)
    await asyncio.sleep(0)
    del task, tasks  # their tracebacks hold locks
    gc.collect()

    assert [event for event in world.events if event != "rest"] == ["a", "b", "a"]
    assert not world.handover._of_tenant
    assert not world.handover._engine.locked()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/embeddings"])
@pytest.mark.parametrize("signed", [True, False])
async def test_every_request_of_a_pod_is_handed_over_so(tmp_path, path, signed):
    class Asked:
        def receive(self, tenant, receive):
            asked.append(tenant)
            return receive

    asked = []
    pod = Pod(tmp_path, FakeVllm())
    pod.app._body_queue = Asked()
    tag = tenant_tag("demo", SECRET)
    body = {"model": "m", "prompt": "x", "messages": [{"role": "user", "content": "x"}]}
    await pod.post(path, body, pod.identity() if signed else None, [(b"x-context-tenant", tag.encode())])

    assert asked == [tag]
