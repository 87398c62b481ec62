"""SIGTERM to gateway, manager and pod under load: what runs ends well, what comes is refused or goes elsewhere.

vLLM itself: test_vllm_ends.py. Seen failing: with a toy pod that ends at once (`os._exit` in `Draining`) its streams
broke off.
"""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from random import Random

import pytest

from tests.kit.faults.races_model import Attempt, Told, explain
from tests.kit.faults.races_world import send
from tests.kit.stack import KEY
from tests.kit.until import until

pytestmark = pytest.mark.timeout(300)


class Load:
    """Clients that ask without a pause, one on each session."""

    def __init__(self, world, name, *, sessions=6):
        self.world, self.name = world, name
        self.attempts = {f"drain-{name}-{number}": [] for number in range(sessions)}
        self.is_over = False

    async def run(self, http, session_id, attempts):
        random = Random(session_id)
        while not self.is_over:
            attempt = Attempt(f"<{len(attempts)}>", is_create=not any(a.told is Told.COMMITTED for a in attempts))
            attempts.append(attempt)
            base = random.choice(self.world.gateway_urls)
            await send(http, base, session_id, attempt, stream=random.random() < 0.7)
            if attempt.told is not Told.COMMITTED:
                await asyncio.sleep(0.1)

    def all(self):
        return [attempt for attempts in self.attempts.values() for attempt in attempts]

    async def busiest_pod(self, http):
        """Return the pod that holds most of the sessions."""
        holders = Counter()
        for session_id in self.attempts:
            url = f"{self.world.gateway_urls[0]}/v1/context/{session_id}"
            async with http.get(url, headers={"authorization": f"Bearer {KEY}"}) as answer:
                if answer.status == 200:  # who has not got through yet has no pod
                    holders[(await answer.json())["holder"]["endpoint"]] += 1
        return holders.most_common(1)[0][0]

    async def until_committed(self, count):
        await until(lambda: self.num_committed() >= count, what=f"{count} turns are committed", deadline_s=180)

    def num_committed(self):
        return sum(attempt.told is Told.COMMITTED for attempt in self.all())


@pytest.mark.parametrize(
    "kind", ["pod", *(pytest.param(kind, marks=pytest.mark.thorough) for kind in ("manager", "gateway"))]
)
async def test_a_part_that_is_told_to_end_under_load_finishes_what_it_has_and_loses_no_turn(toys, http, kind):
    world, load = toys, Load(toys, kind)
    async with asyncio.TaskGroup() as group:
        for session in load.attempts.items():
            group.create_task(load.run(http, *session))
        await load.until_committed(12)
        process = {"gateway": world.gateways[0], "manager": world.managers[0]}.get(kind)
        if process is None:
            process = world.pods[await load.busiest_pod(http)]
        process.signal(signal.SIGTERM)
        returned = await asyncio.to_thread(process.process.wait, 60)
        ended_with = len(load.all())
        process.launch()
        await asyncio.to_thread(process.await_ready)
        await load.until_committed(load.num_committed() + 12)
        load.is_over = True

    told = Counter(attempt.why for attempt in load.all())
    print(f"{kind}: {len(load.all())} turns, {ended_with} when it had ended: {dict(told)}")
    assert returned in {0, -signal.SIGTERM}, process.log.read_text()[-2000:]
    # An answer that has begun comes to its end; what has not begun may find nobody there.
    assert [attempt for attempt in load.all() if attempt.why.startswith(("200", "a stream"))] == []
    for session_id, attempts in load.attempts.items():
        generation, text = await world.transcript(session_id)
        assert explain(attempts, life=0, generation=generation, text=text) == ""
