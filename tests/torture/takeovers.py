"""Streams whose engine is killed, stopped or drained at a random token: each goes on, and its text is the same.

A real stack with one pod, then with two. All streams of a round run at once, in all dialects: turns of contexts with a
history. Before the fault the same turns are asked without one, and committed nothing: their text is the reference.
Greedy, float32.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpx

from deploy.local.progress import say
from tests.kit.patience import PARTS
from tests.kit.stack import KEY, MODEL, Stack
from tests.kit.until import wait_until
from tests.torture.report import Options, Report

STREAMS = 25
ROUNDS = {1: 6, 2: 6}
"""Rounds by number of pods: 300 streams by default (`--turns 500`)."""
FAULTS = ("kill", "stop", "drain")
DIALECTS = ("completions", "chat", "messages", "responses")
ANSWER_TOKENS = (40, 120)
STREAM_S = 240.0
"""Longest wait for one stream: a start of the engine is within it."""
_SILENCE_S = 12
"""Longer than any gap between two tokens of a busy engine: a gap that counts as a break uses up a take-over."""
ENV = PARTS | {"TURN_ENGINE_TIMEOUT_S": str(_SILENCE_S), "TURN_RESUME_TIMEOUT_S": "180"}
"""A stopped engine is noticed, one that starts on two busy cores is waited for, and so are Redis and the manager."""
WORDS = ("river", "stone", "lamp", "garden", "train", "winter", "paper", "glass", "letter", "harbour")


@dataclass(slots=True)
class Stream:
    """One stream, as its client saw it."""

    text: str = ""
    events: int = 0
    status: int = 0
    ended: bool = False
    usage: dict[str, Any] = field(default_factory=dict)
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Asked:
    """A turn of a context: its path and its body."""

    dialect: str
    path: str
    body: dict[str, Any]


def run(options: Options) -> Report:
    """Run all rounds."""
    report, rng = Report("takeovers"), options.random("takeovers")
    pauses: dict[int, list[int]] = {}
    for pods, rounds in ROUNDS.items():
        with (
            tempfile.TemporaryDirectory(prefix="takeovers-", ignore_cleanup_errors=True) as directory,
            Stack(Path(directory), engines=pods, env=ENV, connector={"early_saves": "on"}) as stack,
        ):
            world = World(stack, rng, report, pauses.setdefault(pods, []))
            for number in range(max(rounds * options.turns // 500, 1)):
                asyncio.run(world.round(FAULTS[number % len(FAULTS)]))
            world.count_outcomes()
    for pods, paused_ms in pauses.items():
        if paused_ms:
            report.rows[f"median pause with {pods} pods, ms"] = round(statistics.median(paused_ms))
            report.rows[f"longest pause with {pods} pods, ms"] = max(paused_ms)
    return report


class World:
    """A stack and what was seen there."""

    def __init__(self, stack: Stack, rng: Random, report: Report, pauses_ms: list[int]) -> None:
        self.stack, self.rng, self.report, self.pauses_ms = stack, rng, report, pauses_ms

    async def round(self, fault: str) -> None:
        """Ask all, let the engine suffer at a random event of one stream, and judge all."""
        limits = httpx.Limits(max_keepalive_connections=0)
        headers = {"authorization": f"Bearer {KEY}"}
        async with httpx.AsyncClient(
            base_url=self.stack.url, headers=headers, timeout=STREAM_S, limits=limits, trust_env=False
        ) as http:
            asked = [await self._asked(http, number) for number in range(STREAMS)]
            reference = await asyncio.gather(*(self.stream(http, one, commit=False) for one in asked))
            number, at_event = self.rng.randrange(STREAMS), self.rng.randrange(2, 30)
            reached = asyncio.Event()
            told = [reached.set if index == number else None for index in range(STREAMS)]
            streams = [
                asyncio.create_task(self.stream(http, one, commit=True, at_event=at_event, reached=heard))
                for one, heard in zip(asked, told, strict=True)
            ]
            await asyncio.wait_for(reached.wait(), STREAM_S)
            healing = asyncio.create_task(asyncio.to_thread(self._suffer, fault))
            seen = await asyncio.gather(*streams)
            await healing
        self.judge(fault, asked, reference, seen)

    def count_outcomes(self) -> None:
        """Count why answers went on, or did not, as the turn processes say it."""
        for turn in self.stack.names_of("turn"):
            for (name, labels), value in self.stack.metrics(turn).items():
                if name == "contextcache_turn_resumed_answers_total" and value:
                    self.report.count(f"outcome {dict(labels)['outcome']}", round(value))

    def _suffer(self, fault: str) -> None:
        engine = self.rng.choice(self.stack.engines)
        if fault == "stop":
            self.stack.stop(engine)
            # The fault itself lasts this long: every stream is given up within it.
            time.sleep(_SILENCE_S + 5)
            self.stack.cont(engine)
            return
        if fault == "kill":
            self.stack.kill(engine)
        else:
            os.kill(self.stack.pid(engine), signal.SIGTERM)
            wait_until(lambda: not self.stack.pids(engine), what="the drained engine has ended", deadline_s=STREAM_S)
        self.stack.start(engine)

    async def _asked(self, http: httpx.AsyncClient, number: int) -> Asked:
        """Make a context and return the next turn of it."""
        dialect = DIALECTS[number % len(DIALECTS)]
        words = " ".join(self.rng.choice(WORDS) for _ in range(self.rng.randrange(20, 200)))
        common: dict[str, Any] = {"model": MODEL, "temperature": 0}
        first: dict[str, Any] = {**common, "max_tokens": 4}
        question = f"Write a long story about the {self.rng.choice(WORDS)} and the {self.rng.choice(WORDS)}."
        first |= {"prompt": words} if dialect == "completions" else {"messages": [{"role": "user", "content": words}]}
        made = (await http.post("/v1/context", json=first)).raise_for_status().json()
        count = self.rng.randrange(*ANSWER_TOKENS)
        body = {**common, "session_id": made["session_id"], "stream": True, "context_mode": "append"}
        message = {"role": "user", "content": question}
        if dialect == "completions":
            return Asked(dialect, "/v1/completions", {**body, "prompt": f"\n{question}\n", "max_tokens": count})
        if dialect == "responses":
            return Asked(dialect, "/v1/responses", {**body, "input": question, "max_output_tokens": count})
        path = "/v1/messages" if dialect == "messages" else "/v1/chat/completions"
        return Asked(dialect, path, {**body, "messages": [message], "max_tokens": count})

    async def stream(
        self,
        http: httpx.AsyncClient,
        asked: Asked,
        *,
        commit: bool,
        at_event: int = 0,
        reached: Callable[[], None] | None = None,
    ) -> Stream:
        """Read a stream to its end or to where it breaks; call `reached` at its event `at_event`."""
        seen, body = Stream(), {**asked.body, "context_commit": commit}
        if asked.dialect in ("completions", "chat"):
            body["stream_options"] = {"include_usage": True}
        try:
            async with asyncio.timeout(STREAM_S), http.stream("POST", asked.path, json=body) as answer:
                seen.status = answer.status_code
                async for line in answer.aiter_lines():
                    if line.startswith("data:"):
                        _read(asked.dialect, line.removeprefix("data:").strip(), seen)
                        if reached is not None and seen.events >= at_event:
                            reached()
                    elif seen.status != httpx.codes.OK:
                        seen.failure += line
        except (httpx.HTTPError, TimeoutError) as exc:
            seen.failure = type(exc).__name__
        if reached is not None:
            reached()  # a stream that ends before its event
        return seen

    def judge(self, fault: str, asked: list[Asked], reference: list[Stream], seen: list[Stream]) -> None:
        """Count the streams, and report each that differs from its reference."""
        report, resumed = self.report, 0
        for one, before, after in zip(asked, reference, seen, strict=True):
            report.count("streams")
            case = f"{len(self.stack.engines)} pods, {fault}, {one.dialect}"
            told = (after.usage.get("context") or {}).get("resumed") or []
            resumed += bool(told)
            self.pauses_ms += [part["paused_ms"] for part in told]
            report.count("streams continued", bool(told))
            if before.failure or not before.ended:
                report.failures.append(f"{case}: the reference failed: {before.failure}")
            elif after.failure or not after.ended:
                report.count("streams failed")
                report.failures.append(f"{case}: {after.status} {after.failure} after {len(after.text)} characters")
            elif after.text != before.text:
                report.count("streams with another text")
                report.failures.append(f"{case}: {after.text!r}\n   not {before.text!r}, {told}")
            elif (counted := _output_tokens(after.usage)) != _output_tokens(before.usage):
                report.failures.append(f"{case}: {counted} tokens, not {_output_tokens(before.usage)}, {told}")
        say(f"  {len(self.stack.engines)} pods, {fault}: {resumed} of {len(seen)} streams continued")


def _read(dialect: str, data: str, seen: Stream) -> None:
    if data == "[DONE]":
        seen.ended = True
        return
    told = json.loads(data)
    seen.events += 1
    if told.get("error"):
        seen.failure = str(told["error"])
    if usage := told.get("usage") or (told.get("response") or {}).get("usage"):
        seen.usage = usage
    choice = (told.get("choices") or [{}])[0]
    if dialect in ("completions", "chat"):
        seen.text += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
    elif dialect == "messages":
        seen.text += (told.get("delta") or {}).get("text") or ""
        seen.ended = seen.ended or told["type"] == "message_stop"
    else:
        if told["type"] == "response.output_text.delta":
            seen.text += told["delta"]
        seen.ended = seen.ended or told["type"] in ("response.completed", "response.incomplete")


def _output_tokens(usage: dict[str, Any]) -> int:
    return int(usage.get("completion_tokens", usage.get("output_tokens", -1)))
