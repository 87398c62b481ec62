"""What a turn takes when many agents share an engine that cannot hold all their contexts: sessions against resending.

Each agent has a long context and goes on by turns of 600 tokens, prompt and answer, with a pause of random length
before each. All contexts together are over twice what the engine's KV holds. Two ways, each with an engine of its own
with the same model, KV space and threads, of which one works at a time:

- sessions: a context each; a turn sends what is new, through Envoy and the gateway, and waits for its commit;
- stateless: plain vLLM without anything of ours, asked straight; a turn sends the whole conversation again.

Both play the same texts and pauses, all agents one turn by one way, then the same turn by the other; who is first
alternates. A turn is timed from its sending to the end of its answer. An agent waits for its answer before it pauses
again, and a round waits for all its turns: a way that is overloaded queues, but does not pile up for ever. The
intervals take turns for independent, which those in one queue are not: they are narrow.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.engines import AFTER_STACK, running, start_engine
from benchmarks.estimates import cell, interval, percentile, ratio_row
from benchmarks.processes import Processes
from benchmarks.result import parser_of, write_result
from deploy.local.gateway_client import Answer, GatewayClient
from deploy.local.model import MODEL_NAME
from deploy.local.plain_text import plain_text
from deploy.local.progress import Step, exit_code
from deploy.local.stack import Stack
from deploy.local.state import API_KEYS
from deploy.local.table import render

ROOT = Path(__file__).resolve().parents[1]
STACK_DIRECTORY = ROOT / ".build" / "bench-stack"
WAYS = ("sessions", "stateless")
BARS = {("turn", 50): None, ("turn", 95): 0.5, ("ttft", 50): None, ("ttft", 95): None}
"""What of an answer, and which percentile → the largest ratio of sessions to stateless."""
TURN_TOKENS, ANSWER_TOKENS = 600, 32
BLOCK_TOKENS = 32
TIMES_KV = 2
"""How often the contexts would fill the engine's KV, at least, before their first turn."""
MEMORY_BYTES = 2 << 30
"""Of the sidecar: 93 000 tokens of SmolLM2, about all contexts before their last turn; the rest comes from disk."""
_TURN_HEADS = ("what", "percentile", "sessions ms", "95 %", "stateless ms", "95 %", "ratio", "95 %", "at most", "met")
_WAY_HEADS = ("way", "turns", "computed tokens a turn", "cached tokens a turn", "from")


@dataclass(frozen=True, slots=True)
class Turn:
    """One measured turn."""

    way: str
    number: int
    agent: int
    ttft_ms: float
    turn_ms: float
    computed_tokens: int
    cached_tokens: int
    source: str


@dataclass(slots=True)
class Agent:
    """One conversation, as both ways know it."""

    number: int
    session_id: str
    text: str
    """What a client without a session sends again."""


@exit_code
def main() -> int:
    """Measure, print the tables, write the JSON; exit 1 when that failed, with --check also when a bar is missed."""
    parser = parser_of(__file__, __doc__, has_stack=True, has_bars=True)
    parser.add_argument("--agents", type=int, default=32)
    parser.add_argument("--turns", type=int, default=3, help="of each agent, by each way")
    parser.add_argument("--context", type=int, default=2400, help="about so many tokens before the first turn")
    parser.add_argument("--kv-tokens", type=int, default=35_200, help="that the engine's KV holds")
    parser.add_argument("--pause-s", type=float, default=20.0, help="mean; each is between 0 and twice that")
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    if options.agents * options.context < TIMES_KV * options.kv_tokens:
        parser.error(f"all contexts together must be {TIMES_KV} times the engine's KV, or more")
    os.environ.setdefault("SIDECAR_MEMORY_LIMIT_BYTES", str(MEMORY_BYTES))
    space = ("--num-gpu-blocks-override", str(options.kv_tokens // BLOCK_TOKENS))
    stack = Stack(STACK_DIRECTORY, port=options.port, dtype=options.dtype, engine_args=space)
    load, began_s = os.getloadavg(), time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="bench-turns-") as directory,
        Processes(Path(directory)) as processes,
        running(stack),
    ):
        start_engine(processes, "plain", space, port=options.port + AFTER_STACK, dtype=options.dtype)
        bench = Bench(stack.url, processes.url("plain"), mean_pause_s=options.pause_s)
        turns = bench.measure(options.agents, options.context, options.turns)
    rows = compared(turns)
    asked = ("agents", "turns", "context", "kv_tokens", "pause_s", "dtype")
    report = {
        **{name: getattr(options, name) for name in asked},
        "load": [load, os.getloadavg()],
        "took_s": round(time.monotonic() - began_s),
        "rows": rows,
        "ways": ways(turns),
    }
    show(rows, report["ways"])
    write_result(options.out, report)
    return 1 if options.check and any(row["met"] is False for row in rows) else 0


class Bench:
    """The two ways, and what their agents say."""

    def __init__(self, gateway_url: str, plain_url: str, *, mean_pause_s: float) -> None:
        key = next(iter(API_KEYS))
        self._clients = {"sessions": GatewayClient(gateway_url, key), "stateless": GatewayClient(plain_url, key)}
        self._mean_pause_s = mean_pause_s
        self._seed = time.time_ns() // 1_000_000 % 900_000_000

    def measure(self, num_agents: int, context_tokens: int, num_turns: int) -> list[Turn]:
        """Create the contexts, then let all agents take their turns by each way."""
        with Step(f"{num_agents} contexts") as step:
            agents = []
            for number in range(num_agents):
                agents.append(self._created(number, context_tokens))
                step.beat(lambda: f"{len(agents)} created")
        turns: list[Turn] = []
        for number in range(1, num_turns + 1):
            said = [self._text(TURN_TOKENS - ANSWER_TOKENS) for _ in agents]
            pauses_s = [
                random.Random(f"{number} {agent.number}").uniform(0, 2 * self._mean_pause_s) for agent in agents
            ]
            for way in WAYS if number % 2 else reversed(WAYS):
                take = {"sessions": self._by_session, "stateless": self._by_resending}[way]
                with Step(f"turn {number}, {way}"):
                    turns += _round(way, number, take, list(zip(agents, said, pauses_s, strict=True)))
        return turns

    def _created(self, number: int, num_tokens: int) -> Agent:
        prompt = self._text(num_tokens - ANSWER_TOKENS)
        session_id = self._asked("sessions", "/v1/context", prompt, ttl=3600).session_id
        return Agent(number, session_id, prompt + self._asked("stateless", "/v1/completions", prompt).text)

    def _by_session(self, agent: Agent, said: str) -> Answer:
        return self._asked("sessions", "/v1/completions", said, session_id=agent.session_id)

    def _by_resending(self, agent: Agent, said: str) -> Answer:
        answer = self._asked("stateless", "/v1/completions", agent.text + said)
        agent.text += said + answer.text
        return answer

    def _asked(self, way: str, path: str, prompt: str, **more: Any) -> Answer:
        asked = {"max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
        return self._clients[way].stream(path, {"model": MODEL_NAME, "prompt": prompt, **asked, **more})

    def _text(self, num_tokens: int) -> str:
        self._seed += 1
        return " " + plain_text(num_tokens, seed=self._seed)


def _round(
    way: str, number: int, take: Callable[[Agent, str], Answer], due: Sequence[tuple[Agent, str, float]]
) -> list[Turn]:
    """Let each agent pause and take its turn, all at once; return when the last one is done."""

    def taken(agent: Agent, said: str, pause_s: float) -> Turn:
        time.sleep(pause_s)
        answer = take(agent, said)
        times_ms = (round(answer.ttft_ms, 1), round(answer.total_ms, 1))
        return Turn(way, number, agent.number, *times_ms, answer.computed_tokens, answer.cached_tokens, answer.source)

    with ThreadPoolExecutor(len(due)) as pool:
        return list(pool.map(taken, *zip(*due, strict=True)))


def compared(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """Return one row for each thing and percentile; a bar on what was not measured is missed."""
    of = {way: [turn for turn in turns if turn.way == way] for way in WAYS}
    rows = []
    for (what, q), bar in BARS.items():
        row: dict[str, Any] = {"what": what, "percentile": q}
        times_ms = {way: [getattr(turn, f"{what}_ms") for turn in taken] for way, taken in of.items()}
        for way, values in times_ms.items():
            row |= {f"{way}_ms": percentile(values, q), f"{way}_ms_95": interval(values, q)}
        rows.append(row | ratio_row(times_ms["sessions"], times_ms["stateless"], bar, q=q))
    return rows


def ways(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """Return by way what was computed, and where the rest came from."""
    rows = []
    for way, taken in ((way, [turn for turn in turns if turn.way == way]) for way in WAYS):
        row: dict[str, Any] = {"way": way, "n": len(taken)}
        row |= {
            f"{what}_tokens": percentile([getattr(t, f"{what}_tokens") for t in taken])
            for what in ("computed", "cached")
        }
        rows.append(row | {"sources": dict(Counter(turn.source for turn in taken).most_common())})
    return rows


def show(rows: Sequence[dict[str, Any]], of_ways: Sequence[dict[str, Any]]) -> None:
    """Print the tables."""
    cells = [
        [cell(value, ".3f" if name in {"ratio", "ratio_95", "bar"} else ".1f") for name, value in row.items()]
        for row in rows
    ]
    print(render(_TURN_HEADS, cells))
    shown = [row | {"sources": ", ".join(f"{source} {n}" for source, n in row["sources"].items())} for row in of_ways]
    print(f"\n{render(_WAY_HEADS, [[cell(value) for value in row.values()] for row in shown])}")


if __name__ == "__main__":
    sys.exit(main())
