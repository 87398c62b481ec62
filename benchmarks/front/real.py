"""The fronts beside a real engine: vLLM with SmolLM2 on the CPU, which takes every core that a front leaves it.

A stack of its own; the same fixed work (streams of as many tokens) again and again, through each way in turn, so that
a ratio compares neighbours in time. The prompts are equal and short: what is measured is decoding and the streams.
"""

from __future__ import annotations

import base64
import json
import statistics
import urllib.parse
from pathlib import Path
from typing import Any

from benchmarks.front.load import Job, Outcome
from benchmarks.front.measure import DIRECT, Load
from deploy.local.model import MODEL_NAME
from deploy.local.processes import session_members
from deploy.local.progress import Step, StepFailed
from deploy.local.stack import Stack
from deploy.local.state import API_KEYS, read_state

NUM_STREAMS = 8
NUM_EACH = 4
NUM_TOKENS = 64
_WORK_S = 20.0
"""What one way's work may take, more or less: some 6 s on two cores that do nothing else."""


def measure_real(directory: Path, load: Load, *, port: int, rounds: int) -> dict[str, Any]:
    """Start a stack, measure, stop it. Raises StepFailed."""
    stack = Stack(directory, port=port)
    try:
        stack.clean()
        stack.up()
        ways = {DIRECT: stack.engine_urls[0], "envoy+plugin": stack.url, "http front": stack.front_url}
        state = read_state(stack.paths)
        pids = {part: session_members(state[part].name) for part in ("gateway", "envoy", "engine")}
        outcomes: dict[str, list[Outcome]] = {way: [] for way in ways}
        for number in range(rounds + 1):  # number 0 warms everything up and is not counted
            with Step(f"real vLLM, round {number} of {rounds}"):
                for way in _turned(list(ways), number):
                    outcome = load.do(_job(ways[way], pids, num_each=NUM_EACH if number else 1))
                    if outcome.num_errors:
                        raise StepFailed(f"{way}: {outcome.errors[0]}")
                    outcomes[way] += [outcome] if number else []
    finally:
        stack.clean()
    rows = [_row(way, found, outcomes[DIRECT]) for way, found in outcomes.items()]
    return {"streams": NUM_STREAMS, "tokens_each": NUM_TOKENS, "rounds": rounds, "rows": rows}


def _turned(ways: list[str], number: int) -> list[str]:
    at = number % len(ways)
    return ways[at:] + ways[:at]


def _job(url: str, pids: dict[str, list[int]], *, num_each: int) -> Job:
    asked = {
        "model": MODEL_NAME,
        "prompt": "The cat sat on the warm stone wall and watched",
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    body = json.dumps(asked).encode()
    address = urllib.parse.urlsplit(url)
    assert address.port is not None
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {address.netloc}\r\nauthorization: Bearer {next(iter(API_KEYS))}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return Job(
        kind="streams",
        port=address.port,
        request=base64.b64encode(head.encode() + body).decode(),
        connections=NUM_STREAMS,
        pids=pids,
        seconds=_WORK_S,
        num_events=1,  # the engine puts several tokens into an event when it is ahead
        num_each=num_each,
    )


def _row(way: str, own: list[Outcome], direct: list[Outcome]) -> dict[str, Any]:
    speeds = [_tokens_per_s(found) for found in own]
    shares = [mine / _tokens_per_s(base) for mine, base in zip(speeds, direct, strict=True)]
    return {
        "way": way,
        "tokens_per_s": round(statistics.median(speeds), 1),
        "tokens_per_s_min": round(min(speeds), 1),
        "tokens_per_s_max": round(max(speeds), 1),
        "of_direct": round(statistics.median(shares), 4),
        "of_direct_min": round(min(shares), 4),
        "of_direct_max": round(max(shares), 4),
        "cpu_share": {
            part: round(statistics.median(found.cpu_s[part] / found.seconds for found in own), 3)
            for part in own[0].cpu_s
        },
    }


def _tokens_per_s(outcome: Outcome) -> float:
    return NUM_STREAMS * NUM_EACH * NUM_TOKENS / outcome.seconds
