"""What clients that resend everything gain from `plain: keep`, and what it costs them, on two engines.

1. One request at a time: a prompt never seen by an engine (`cold`), then, when both engines have forgotten theirs, the
   same prompt with another question (`again`); kept, and with `X-Context-Keep: off`, of which one is first in turn.
2. Contexts of 4 096 tokens that share their first half: what they take on the disk beside what they should; then twenty
   forks of one of them, by one client, each timed.
3. Agents, each with a conversation that it resends whole and that grows by each turn, one request at a time. After each
   round it is looked up on which pods a conversation is kept: a turn counts as on its pod until a second one has any
   of it.
4. As many agents at once; all together they are over twice what both engines' KV holds. Kept ones and others take
   rounds in turn. Here a conversation leaves a queue that costs more than its KV (ADR 0075): how often, is told.
5. In the middle of a round one engine is killed with SIGKILL; clients try again, as SDKs do. It is started again after.
6. Silence, ten minutes unless told otherwise. Turns after it, one at a time, must not be computed again.

Loads that failed are counted by the engines themselves.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.engines import REST_S, forget_prefixes, running
from benchmarks.estimates import cell, interval, paired_row, percentile
from benchmarks.result import parser_of, write_result
from deploy.local.demo import wait_sealed
from deploy.local.gateway_client import Answer, GatewayClient
from deploy.local.model import MODEL_NAME
from deploy.local.plain_text import plain_text
from deploy.local.progress import Step, StepFailed, exit_code
from deploy.local.stack import Stack
from deploy.local.state import KEEPING_KEY
from deploy.local.table import render

ROOT = Path(__file__).resolve().parents[1]
STACK_DIRECTORY = ROOT / ".build" / "bench-stack"
WAYS = {"keep": {}, "off": {"x-context-keep": "off"}}
"""Headers of each."""
BARS = {"cold": 1.03, "again": 0.5}
"""What is asked alone → the largest ratio of kept to not kept."""
ON_ITS_POD_MIN = 0.95
ALONE_TOKENS = 1200
SAID_TOKENS, ANSWER_TOKENS, BLOCK_TOKENS = 300, 32, 32
SHARED_CONTEXTS, SHARED_TOKENS = 8, 2048
"""So many contexts begin with the same tokens, and have as many of their own."""
SHARED_MAX = 1.02
"""Bytes of all of them, of what their different tokens would take."""
FORKS, FORK_MS_MAX = 20, 20.0
TIMES_KV = 2
TRIES = 3
_ALONE_HEADS = ("alone", "n", "kept ms", "95 %", "not kept ms", "95 %", "ratio", "95 %", "at most", "met")
_ROUND_HEADS = ("round", "way", "turns", "ttft p50 ms", "p95 ms", "computed tokens", "cached tokens", "tries", "from")


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of an agent."""

    part: str
    """`calm`: alone; `steady`, `killed`: at once; `silent`: alone, after the silence; `after`: at once, then."""
    number: int
    way: str
    agent: int
    ttft_ms: float
    computed_tokens: int
    cached_tokens: int
    known_tokens: int
    """Of the prompt and answer before it; they need not be computed again."""
    source: str
    tries: int


@dataclass(slots=True)
class Agent:
    """A conversation, as its client knows it."""

    number: int
    way: str
    text: str
    known_tokens: int = 0


@exit_code
def main() -> int:
    """Measure, print the tables, write the JSON; exit 1 when that failed, with --check also when a bar is missed."""
    parser = parser_of(__file__, __doc__, has_stack=True, has_bars=True)
    parser.add_argument("--pairs", type=int, default=15, help="of requests alone")
    parser.add_argument("--agents", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=6, help="of all agents, before one engine is killed")
    parser.add_argument("--context", type=int, default=2400, help="about so many tokens before the first turn")
    parser.add_argument(
        "--kv-tokens",
        type=int,
        default=9_000,
        help="that each engine's KV holds; it takes no less than one prompt's most",
    )
    parser.add_argument("--silence-s", type=float, default=600.0)
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    if 2 * options.agents * options.context < TIMES_KV * 2 * options.kv_tokens:
        parser.error(f"all conversations together must be {TIMES_KV} times what both engines' KV holds, or more")
    space = ("--num-gpu-blocks-override", str(options.kv_tokens // BLOCK_TOKENS))
    stack = Stack(STACK_DIRECTORY, port=options.port, dtype=options.dtype, engines=2, dev=True, engine_args=space)
    load, began_s = os.getloadavg(), time.monotonic()
    with running(stack):
        bench = Bench(stack)
        pairs = bench.alone(options.pairs)
        stored, forks_ms = bench.shared()
        calm = [Agent(number, "keep", bench.text(options.context)) for number in range(options.agents)]
        turns, on_pods = bench.in_turn(calm, options.rounds)
        crowd, on_pods_then = bench.together(options.agents, options.context, options.rounds)
        turns += crowd + bench.silent(calm, options.rounds, options.silence_s)
        failed_loads = bench.failed_loads()
    asked = ("pairs", "agents", "rounds", "context", "kv_tokens", "silence_s", "dtype")
    report = {
        **{name: getattr(options, name) for name in asked},
        "load": [load, os.getloadavg()],
        "took_s": round(time.monotonic() - began_s),
        "alone": compared(pairs),
        "rounds_taken": by_round(turns),
        "counts": counts(turns, on_pods, on_pods_then, failed_loads, stored, forks_ms),
    }
    show(report)
    write_result(options.out, report)
    missed = [row for row in (*report["alone"], *report["counts"]) if row["met"] is False]
    return 1 if options.check and missed else 0


class Bench:
    """A stack of two engines, its client, and texts that were never seen."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._client = GatewayClient(stack.url, KEEPING_KEY)
        self._seed = time.time_ns() // 1_000_000 % 900_000_000
        self._failed_before = 0
        self._crowd: dict[str, list[Agent]] = {}

    def alone(self, num_pairs: int) -> dict[str, list[dict[str, float]]]:
        """Return the times of what was asked alone; the first pair is not counted: a process's first are slow.

        Raises StepFailed where KV came back that should not have, or did not that should.
        """
        found: dict[str, list[dict[str, float]]] = {what: [] for what in BARS}
        for number in range(num_pairs + 1):
            order = list(WAYS) if number % 2 else list(reversed(WAYS))
            texts = {way: self.text(ALONE_TOKENS) for way in WAYS}
            with Step(f"pair {number}, alone"):
                for what in BARS:
                    times_ms = {}
                    for way in order:
                        answer = self._asked(way, texts[way] + f"\nQuestion, {what}: why?", max_tokens=4)
                        is_warm = answer.cached_tokens >= ALONE_TOKENS / 2
                        if is_warm != (what == "again" and way == "keep"):
                            raise StepFailed(f"{what}, {way}: {answer.cached_tokens} tokens were cached")
                        times_ms[way] = round(answer.ttft_ms, 1)
                        time.sleep(REST_S)
                    for url in self._stack.engine_urls:
                        forget_prefixes(url)
                    found[what] += [times_ms] if number else []
        return found

    def shared(self) -> tuple[list[int], list[float]]:
        """Return the bytes on the disk after each context was made that shares its first half with the others.

        And the time of each fork of the last one, in ms.
        """
        engine = self._stack.names_of("engine")[1]
        self._stack.drain(engine)
        shared, before = self._ids(), self._stored_bytes()
        stored, last = [], ""
        with Step(f"{SHARED_CONTEXTS} contexts that share"):
            for _ in range(SHARED_CONTEXTS):
                body = {"model": MODEL_NAME, "prompt": [*shared, *self._ids()], "max_tokens": 1, "ttl": 3600}
                last = self._client.stream("/v1/context", body).session_id
                wait_sealed(self._client, last)
                stored.append(self._stored_bytes() - before)
        forks_ms = []
        time.sleep(REST_S)  # the engine's spinning after the last create is no part of a fork
        for _ in range(FORKS):
            began_s = time.monotonic()
            status, _ = self._client.try_call("POST", f"/v1/context/{last}/fork", {})
            forks_ms.append(round(1000 * (time.monotonic() - began_s), 1))
            if status != httpx.codes.CREATED:
                raise StepFailed(f"a fork: HTTP {status}")
        self._stack.drain(engine, draining=False)
        return stored, forks_ms

    def in_turn(self, agents: Sequence[Agent], num_rounds: int) -> tuple[list[Turn], list[int]]:
        """Return the turns of agents that never wait for each other, and on how many pods each was after each round."""
        turns: list[Turn] = []
        on_pods: list[int] = []
        for number in range(num_rounds):
            turns += self._one_by_one("calm", number, agents)
            on_pods += self._pods_of_last(len(agents))
        return turns, on_pods

    def together(self, num_agents: int, context_tokens: int, num_rounds: int) -> tuple[list[Turn], list[int]]:
        """Return all turns, and on how many pods each of the kept conversations was, after each steady round."""
        self._crowd = {way: [Agent(n, way, self.text(context_tokens)) for n in range(num_agents)] for way in WAYS}
        turns: list[Turn] = []
        on_pods: list[int] = []
        for number in range(num_rounds):
            for way in WAYS if number % 2 else reversed(WAYS):
                turns += self._round("steady", number, self._crowd[way])
            on_pods += self._pods_of_last(num_agents)
        for way in WAYS:
            turns += self._round("killed", num_rounds, self._crowd[way], meanwhile=lambda: self._kill("engine-1"))
            self._stack.start("engine-1")
        return turns, on_pods

    def silent(self, calm: Sequence[Agent], num_rounds: int, silence_s: float) -> list[Turn]:
        """Return the turns after nobody asked anything for so long: of these one by one, then of the crowd."""
        with Step(f"silence of {silence_s:.0f} s") as step:
            ends_s = time.monotonic() + silence_s
            while (left_s := ends_s - time.monotonic()) > 0:
                time.sleep(min(left_s, 5))
                step.beat(lambda: f"{left_s:.0f} s to go")
        turns = self._one_by_one("silent", num_rounds, calm)
        for way in WAYS:
            turns += self._round("after", num_rounds + 1, self._crowd[way])
        return turns

    def failed_loads(self) -> int:
        """Return how many loads of KV failed, of engines that were killed too."""
        return self._failed_before + sum(map(_failed_loads, self._stack.engine_urls))

    def _kill(self, name: str) -> None:
        number = self._stack.names_of("engine").index(name)
        self._failed_before += _failed_loads(self._stack.engine_urls[number])
        self._stack.kill(name)

    def _round(
        self, part: str, number: int, agents: Sequence[Agent], meanwhile: Callable[[], None] | None = None
    ) -> list[Turn]:
        """Let each agent take a turn, all within some seconds; return when the last one is done."""
        said = [self.text(SAID_TOKENS) for _ in agents]

        def taken(agent: Agent, text: str) -> Turn:
            time.sleep(random.Random(f"{number} {agent.number}").uniform(0, 4))
            return self._taken(part, number, agent, text)

        with Step(f"round {number}, {agents[0].way}, {part}"), ThreadPoolExecutor(len(agents)) as pool:
            going = [pool.submit(taken, agent, text) for agent, text in zip(agents, said, strict=True)]
            if meanwhile is not None:
                time.sleep(2)
                meanwhile()
            return [turn.result() for turn in going]

    def _one_by_one(self, part: str, number: int, agents: Sequence[Agent]) -> list[Turn]:
        """Let each agent take a turn, in an order of the round's own."""
        order = random.Random(number).sample(agents, len(agents))
        with Step(f"round {number}, one by one, {part}"):
            return [self._taken(part, number, agent, self.text(SAID_TOKENS)) for agent in order]

    def _taken(self, part: str, number: int, agent: Agent, said: str) -> Turn:
        tries, answer = 1, None
        while answer is None:
            try:
                answer = self._asked(agent.way, agent.text + said, max_tokens=ANSWER_TOKENS, ignore_eos=True)
            except StepFailed:
                if tries == TRIES:
                    raise
                tries += 1
                time.sleep(1)
        figures = (answer.computed_tokens, answer.cached_tokens, agent.known_tokens, answer.source, tries)
        agent.text += said + answer.text
        agent.known_tokens = int(answer.usage["total_tokens"])
        return Turn(part, number, agent.way, agent.number, round(answer.ttft_ms, 1), *figures)

    def _asked(self, way: str, prompt: str, **more: Any) -> Answer:
        body = {"model": MODEL_NAME, "prompt": prompt, "temperature": 0, **more}
        return self._client.stream("/v1/completions", body, headers=WAYS[way])

    def _pods_of_last(self, num_agents: int) -> list[int]:
        """Return on how many pods each of the conversations is kept that were used last."""
        time.sleep(REST_S)
        listed = self._client.call("GET", f"/v1/context?kind=kept&limit={num_agents}")["data"]
        return [len(kept["pods"]) for kept in listed]

    def _stored_bytes(self) -> int:
        directories = [self._stack.paths.sidecar_data(name) for name in self._stack.names_of("sidecar")]
        return sum(file.stat().st_size for directory in directories for file in directory.rglob("*") if file.is_file())

    def _ids(self) -> list[int]:
        self._seed += 1
        return random.Random(self._seed).choices(range(1000, 40_000), k=SHARED_TOKENS)

    def text(self, num_tokens: int) -> str:
        """Return a text of about so many tokens that nobody has seen."""
        self._seed += 1
        return " " + plain_text(num_tokens, seed=self._seed)


def _failed_loads(url: str) -> int:
    text = httpx.get(f"{url}/metrics", timeout=30, trust_env=False).raise_for_status().text
    return sum(
        int(sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "contextcache_connector_events_total" and sample.labels["event"] == "failed_loads"
    )


def compared(pairs: dict[str, list[dict[str, float]]]) -> list[dict[str, Any]]:
    """Return one row for each thing that was asked alone."""
    rows = []
    for what, times_ms in pairs.items():
        of = {way: [pair[way] for pair in times_ms] for way in WAYS}
        row: dict[str, Any] = {"what": what, "n": len(times_ms)}
        for way, values in of.items():
            row |= {f"{way}_ms": percentile(values), f"{way}_ms_95": interval(values)}
        rows.append(row | paired_row(of["keep"], of["off"], BARS[what]))
    return rows


def by_round(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """Return one row for each kind of round and way."""
    rows = []
    for part, way in dict.fromkeys((turn.part, turn.way) for turn in turns):
        taken = [turn for turn in turns if (turn.part, turn.way) == (part, way)]
        ttfts_ms = [turn.ttft_ms for turn in taken]
        row: dict[str, Any] = {"part": part, "way": way, "turns": len(taken)}
        row |= {f"ttft_ms_p{q}": percentile(ttfts_ms, q) for q in (50, 95)}
        row |= {
            f"{what}_tokens": percentile([getattr(t, f"{what}_tokens") for t in taken])
            for what in ("computed", "cached")
        }
        row["tries"] = sum(turn.tries for turn in taken)
        rows.append(row | {"sources": dict(Counter(turn.source for turn in taken).most_common())})
    return rows


def counts(
    turns: Sequence[Turn],
    on_pods: Sequence[int],
    on_pods_then: Sequence[int],
    failed_loads: int,
    stored: Sequence[int],
    forks_ms: Sequence[float],
) -> list[dict[str, Any]]:
    """Return what must be so: a count, of how many, and whether that is enough; None: that is not asked."""
    kept = [turn for turn in turns if turn.way == "keep"]
    silent = [turn for turn in kept if turn.part == "silent"]
    # Text that is resent may be cut into other tokens where an answer begins or ends: a block or two are lost with it.
    warm = [turn for turn in silent if turn.cached_tokens >= turn.known_tokens - 3 * BLOCK_TOKENS]
    # The first has both halves; each half of one takes as much as any other.
    expected = stored[0] * (1 + len(stored)) // 2 if stored else 0
    on_its_pod = sum(pods == 1 for pods in on_pods)
    return [
        {
            "what": "turns on the conversation's one pod",
            "n": on_its_pod,
            "of": len(on_pods),
            "met": bool(on_pods) and on_its_pod >= ON_ITS_POD_MIN * len(on_pods),
        },
        {
            "what": "so with queues worth leaving",
            "n": sum(pods == 1 for pods in on_pods_then),
            "of": len(on_pods_then),
            "met": None,
        },
        {"what": "loads that failed", "n": failed_loads, "of": len(kept), "met": failed_loads == 0},
        {
            "what": "bytes of contexts that share a half",
            "n": stored[-1] if stored else 0,
            "of": expected,
            "met": bool(stored) and stored[-1] <= SHARED_MAX * expected,
        },
        {
            "what": f"forks below {FORK_MS_MAX:.0f} ms",
            "n": sum(took_ms < FORK_MS_MAX for took_ms in forks_ms),
            "of": len(forks_ms),
            "met": max(forks_ms, default=FORK_MS_MAX) < FORK_MS_MAX,
        },
        {"what": "warm after the silence", "n": len(warm), "of": len(silent), "met": warm == silent != []},
    ]


def show(report: dict[str, Any]) -> None:
    """Print the tables."""
    cells = [
        [cell(value, ".3f" if name in {"ratio", "ratio_95", "bar"} else ".1f") for name, value in row.items()]
        for row in report["alone"]
    ]
    print(render(_ALONE_HEADS, cells))
    shown = [
        row | {"sources": ", ".join(f"{source} {n}" for source, n in row["sources"].items())}
        for row in report["rounds_taken"]
    ]
    print(f"\n{render(_ROUND_HEADS, [[cell(value) for value in row.values()] for row in shown])}")
    rows = [[cell(value) for value in row.values()] for row in report["counts"]]
    print(f"\n{render(('what', 'found', 'of', 'met'), rows)}")


if __name__ == "__main__":
    sys.exit(main())
