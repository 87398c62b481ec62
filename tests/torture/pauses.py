"""The pause of one stream whose engine breaks off, with a context of 4 000 tokens and a second pod.

One stream at a time. In every fourth round the engine is killed, and starts again before the next. In the others its
connection is reset, which the turn process sees of a kill. The text must be that of the same turn without a break.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from pathlib import Path
from typing import Any

import httpx

from deploy.local.progress import say
from tests.kit.stack import KEY, MODEL, Stack
from tests.torture.report import Options, Report
from tests.torture.takeovers import ENV, STREAM_S, WORDS, Asked, World

ROUNDS = 12
"""By default (`--turns 500`)."""
CONTEXT_TOKENS = 4_000
BAR_MS = 2_000
_ANSWER_TOKENS = 60
_SEAL_S = 30
"""Seconds after which KV that is not durable never will be."""


def run(options: Options) -> Report:
    """Run all rounds."""
    report, rng = Report("pauses"), options.random("pauses")
    pauses_ms: list[int] = []
    with (
        tempfile.TemporaryDirectory(prefix="pauses-", ignore_cleanup_errors=True) as directory,
        Stack(
            Path(directory),
            engines=2,
            proxied=["turn-engine", "turn-engine-1"],
            env=ENV,
            connector={"early_saves": "on"},
        ) as stack,
    ):
        world = World(stack, rng, report, pauses_ms)
        for number in range(max(ROUNDS * options.turns // 500, 1)):
            asyncio.run(_round(world, "reset" if number % 4 else "kill"))
        world.count_outcomes()
    report.rows["pauses, ms"] = " ".join(map(str, sorted(pauses_ms)))
    if pauses_ms:
        report.rows["median pause, ms"] = median_ms = round(statistics.median(pauses_ms))
        report.rows["pauses over the bar"] = sum(pause_ms > BAR_MS for pause_ms in pauses_ms)
        if median_ms > BAR_MS:
            report.failures.append(f"the median pause is over {BAR_MS} ms")
    return report


async def _round(world: World, fault: str) -> None:
    """Make a context, and have the engine of its next turn break off."""
    stack = world.stack
    async with httpx.AsyncClient(
        base_url=stack.url, headers={"authorization": f"Bearer {KEY}"}, timeout=STREAM_S, trust_env=False
    ) as http:
        words = " ".join(world.rng.choice(WORDS) for _ in range(CONTEXT_TOKENS))
        first = {"model": MODEL, "temperature": 0, "max_tokens": 1, "prompt": words}
        session_id = (await http.post("/v1/context", json=first)).raise_for_status().json()["session_id"]

        holder: dict[str, Any] = {}
        for _ in range(_SEAL_S):
            found = (await http.get(f"/v1/context/{session_id}")).raise_for_status().json()
            if (holder := found["holder"])["state"] == "sealed":
                break
            await asyncio.sleep(1)
        else:
            world.report.count("contexts that a busy engine did not save")
            return
        engine = stack.engine_named(holder["endpoint"])
        body = {**first, "session_id": session_id, "stream": True, "context_mode": "append", "prompt": " river stone"}
        asked = Asked("completions", "/v1/completions", body | {"max_tokens": _ANSWER_TOKENS})
        before = await world.stream(http, asked, commit=False)
        reached = asyncio.Event()
        reading = asyncio.create_task(
            world.stream(http, asked, commit=True, at_event=world.rng.randrange(2, 30), reached=reached.set)
        )
        await asyncio.wait_for(reached.wait(), STREAM_S)
        link = stack.links.proxies[engine.replace("engine", "turn-engine")]
        if fault == "kill":
            await asyncio.to_thread(stack.kill, engine)
        link.reset()
        after = await reading
        world.judge(fault, [asked], [before], [after])
        say(f"  {after.usage.get('context')}")
        if fault == "kill":
            await asyncio.to_thread(stack.start, engine)
            await asyncio.to_thread(stack.wait_ready)
