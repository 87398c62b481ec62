"""Recorded sessions of coding agents, with an engine killed after a third and a pod lost after two thirds.

Four systems with the same model, threads and KV space, of which one works at a time: plain vLLM; vLLM's tiering and
LMCache in multi-process mode, as in bench_beside; and ours, asked through Envoy and the gateway. Clients are the same
for all: they send each prompt whole, as `benchmarks/traces` has it, with `X-Session-ID`; our key keeps plain requests.
The sessions take turns, and together are over twice what an engine's KV holds. Each request goes to each system in
turn.

- After a third of the requests the engine gets SIGKILL while it answers, and is started again at once.
- After two thirds all processes of the pod get SIGKILL, and its own disk is emptied: for ours, the sidecar's data. The
  directories of LMCache's and vLLM's file tiers and of our shared store stay, as a mount would.

A client whose request fails tries again each second, and each failure counts. Its time runs from the first try.
Tokens of a prompt that no earlier prompt of its session begins with are new, and each system computes them. Others that
are computed are recomputed.
At the end plain vLLM computes some prompts again, each with an empty prefix cache: an answer that differs is wrong.
All is greedy, in float32.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from operator import eq
from pathlib import Path
from typing import Any, Protocol

from benchmarks.bench_beside import NEEDED_BYTES, PINS, free_shared, start_lmcache, start_tiering
from benchmarks.engines import AFTER_STACK, forget_prefixes, running, start_engine
from benchmarks.estimates import cell, percentile
from benchmarks.processes import Processes
from benchmarks.result import parser_of, write_result
from benchmarks.traces import BLOCK_TOKENS, SCALE, Session, sessions
from deploy.local.environments import made
from deploy.local.gateway_client import Answer, GatewayClient
from deploy.local.model import MODEL_NAME
from deploy.local.progress import Step, StepFailed, exit_code
from deploy.local.stack import Stack
from deploy.local.state import KEEPING_KEY
from deploy.local.table import render

ROOT = Path(__file__).resolve().parents[1]
STACK_DIRECTORY = ROOT / ".build" / "bench-stack"
ENGINE_BLOCK_TOKENS, WINDOW_TOKENS = 32, 4096
MEMORY_BYTES = 1 << 30
KILL_AFTER_S, KILLED_TOKENS = 0.7, 64
"""Time from a request to the kill of its engine, and the tokens of that answer: no engine is done by then."""
RETRY_S, GIVE_UP_S = 1.0, 300.0
PHASES = ("calm", "killed", "lost")
"""Before the kill; from it on; from the loss of the pod on."""
_HEADS = (
    "system",
    "from",
    "requests",
    "failures",
    "wrong",
    "computed",
    "again",
    "TTFT p50 ms",
    "p99 ms",
    "turn p50 ms",
    "p95 ms",
)


@dataclass(frozen=True, slots=True)
class Asked:
    """One request of the schedule."""

    session: Session
    number: int
    phase: str
    kills: bool = False
    """The engine is killed while it answers."""

    @property
    def new_tokens(self) -> int:
        """Tokens of the prompt behind the longest beginning that it shares with an earlier one of its session."""
        blocks = self.session.requests[self.number].blocks
        earlier = (self.session.requests[number].blocks for number in range(self.number))
        shared = (sum(1 for _ in takewhile(bool, map(eq, blocks, one))) for one in earlier)
        return BLOCK_TOKENS * (len(blocks) - max(shared, default=0))

    @property
    def body(self) -> dict[str, Any]:
        """The request's body."""
        tokens = KILLED_TOKENS if self.kills else self.session.requests[self.number].answer_tokens
        greedy = {"temperature": 0, "ignore_eos": True, "max_tokens": tokens}
        return {"model": MODEL_NAME, "prompt": self.session.prompt(self.number), **greedy}


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer."""

    asked: Asked
    text: str
    waited_ms: float
    """Time to the first token, from the first try."""
    computed_tokens: int
    failures: int
    took_ms: float
    """Time to the last token, from the first try."""

    @property
    def recomputed_tokens(self) -> int:
        """Computed tokens beyond the new ones."""
        return max(0, self.computed_tokens - self.asked.new_tokens)


class System(Protocol):
    """A pod with an engine."""

    client: GatewayClient

    def kill_engine(self) -> None:
        """Kill the engine with SIGKILL and start it again."""
        ...

    def lose_pod(self) -> None:
        """Kill all processes of the pod, empty its disk, start it again."""
        ...


class Ours:
    """A stack with a shared store."""

    def __init__(self, stack: Stack) -> None:
        self._stack, self.client = stack, GatewayClient(stack.url, KEEPING_KEY)

    def kill_engine(self) -> None:
        """Kill the engine alone."""
        self._stack.kill("engine")
        self._stack.start("engine")

    def lose_pod(self) -> None:
        """Kill engine, sidecar and turn process, and remove the sidecar's data."""
        for part in ("engine", "turn", "sidecar"):
            self._stack.kill(part)
        shutil.rmtree(self._stack.paths.sidecar_data("sidecar"))
        for part in ("sidecar", "engine", "turn"):
            self._stack.start(part)


class Other:
    """Plain vLLM, or vLLM with another connector."""

    def __init__(self, processes: Processes, *names: str) -> None:
        """`names`: the engine, then the processes that it needs."""
        self._processes, self._names = processes, names
        self.client = GatewayClient(processes.url(names[0]), "none")

    def kill_engine(self) -> None:
        """Kill the engine alone."""
        self._processes.kill(self._names[0])
        self._processes.start_again(self._names[0])

    def lose_pod(self) -> None:
        """Kill all; no file of theirs is on the pod's own disk."""
        for name in self._names:
            self._processes.kill(name)
        free_shared()
        for name in reversed(self._names):
            self._processes.start_again(name)


def scheduled(taken: Sequence[Session], *, calm: bool = False) -> list[Asked]:
    """Return the requests: each session's next one in turn, until all are asked. `calm`: no failure among them."""
    longest = max(len(session.requests) for session in taken)
    order = [(one, number) for number in range(longest) for one in taken if number < len(one.requests)]
    kill_at, lose_at = (len(order),) * 2 if calm else (len(order) // 3, 2 * len(order) // 3)
    return [
        Asked(one, number, PHASES[(at >= kill_at) + (at >= lose_at)], kills=at == kill_at)
        for at, (one, number) in enumerate(order)
    ]


@exit_code
def main() -> int:
    """Measure, print the table, write the JSON; exit 1 when a part failed."""
    parser = parser_of(__file__, __doc__, has_stack=True)
    parser.add_argument("--sessions", type=int, default=6, help="recorded sessions, 14 at most")
    parser.add_argument("--kv-tokens", type=int, default=4_608, help="tokens that an engine's KV holds")
    parser.add_argument("--cold", type=int, default=12, help="prompts that are computed again, cold")
    parser.add_argument("--calm", action="store_true", help="without failures; the JSON gets _calm in its name")
    options = parser.parse_args()
    os.environ.setdefault("SIDECAR_MEMORY_LIMIT_BYTES", str(MEMORY_BYTES))
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    space = engine_space(options.kv_tokens)
    schedule = scheduled(sessions(options.sessions), calm=options.calm)
    load, began_s = os.getloadavg(), time.monotonic()
    try:
        for name, pins in PINS.items():
            made(f"bench-{name}", pins, needed_bytes=NEEDED_BYTES)
        stack = Stack(STACK_DIRECTORY, port=options.port, dtype="float32", dev=True, engine_args=space, store="dir")
        with (
            tempfile.TemporaryDirectory(prefix="bench-trace-", dir=ROOT / ".build") as directory,
            Processes(Path(directory)) as processes,
            running(stack),
        ):
            systems = dict(systems_of(stack, processes, options.port, space))
            samples = {name: list[Sample]() for name in systems}
            for at, asked in enumerate(schedule, 1):
                with Step(f"request {at} of {len(schedule)}, {asked.phase}"):
                    _ask_all(systems, asked, samples, loses=asked.phase == "lost" and schedule[at - 2].phase != "lost")
            cold = _cold_answers(systems["plain"], processes.url("plain"), schedule, options.cold)
    finally:
        free_shared()
    rows = [row for name in samples for row in rows_of(name, samples[name], cold)]
    print(render(_HEADS, [[cell(value, ".0f") for value in row.values()] for row in rows]))
    shape = {"sessions": options.sessions, "scale": SCALE, "kv_tokens": options.kv_tokens, "cold": len(cold)}
    taken = {"load": [load, os.getloadavg()], "took_s": round(time.monotonic() - began_s)}
    versions = {name: list(pins) for name, pins in PINS.items()}
    series = {name: [[one.recomputed_tokens, round(one.waited_ms, 1)] for one in samples[name]] for name in samples}
    phases = [asked.phase for asked in schedule]
    write_result(
        options.out.with_stem(options.out.stem + "_calm" * options.calm),
        {"dtype": "float32", **shape, **taken, "versions": versions, "rows": rows, "phases": phases, "series": series},
    )
    return 0


def engine_space(kv_tokens: int) -> tuple[str, ...]:
    """Return vLLM's arguments for an engine whose KV holds so many tokens."""
    return ("--max-model-len", f"{WINDOW_TOKENS}", "--num-gpu-blocks-override", f"{kv_tokens // ENGINE_BLOCK_TOKENS}")


def systems_of(stack: Stack, processes: Processes, port: int, space: Sequence[str]) -> Iterator[tuple[str, System]]:
    """Yield each system by its name, ours first; start the others."""
    yield "ours", Ours(stack)
    first = port + AFTER_STACK
    start_engine(processes, "plain", space, port=first, dtype="float32", env={"VLLM_SERVER_DEV_MODE": "1"})
    yield "plain", Other(processes, "plain")
    start_tiering(processes, first + 2, "float32", space)
    yield "tiering", Other(processes, "tiering")
    start_lmcache(processes, first + 4, "float32", space)
    yield "lmcache", Other(processes, "lmcache", "lmcache server")


def _ask_all(systems: dict[str, System], asked: Asked, samples: dict[str, list[Sample]], *, loses: bool) -> None:
    """Have each system answer a request; each is first in turn."""
    names = list(systems)
    first = len(samples[names[0]]) % len(names)
    for name in names[first:] + names[:first]:
        if loses:
            systems[name].lose_pod()
        samples[name].append(_answered(systems[name], asked))


def _answered(system: System, asked: Asked) -> Sample:
    began_s, failures = time.perf_counter(), 0
    killing = _Killing(system.kill_engine) if asked.kills else None
    try:
        while True:
            sent_s = time.perf_counter()
            try:
                answer = system.client.stream("/v1/completions", asked.body, {"x-session-id": asked.session.name})
                break
            except StepFailed as exc:
                failures += 1
                if sent_s - began_s > GIVE_UP_S:
                    raise StepFailed(f"a request failed for {GIVE_UP_S:.0f} s: {exc}") from exc
                time.sleep(RETRY_S)
    finally:
        if killing is not None:
            killing.end()
    tried_ms = (sent_s - began_s) * 1000
    took_ms = tried_ms + answer.total_ms
    return Sample(asked, answer.text, tried_ms + answer.ttft_ms, answer.computed_tokens, failures, took_ms)


@dataclass
class _Killing:
    """A kill, and the start after it, while a client waits."""

    kill: Callable[[], None]
    _fault: list[BaseException] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Wait for the start. Raises StepFailed as it did."""
        self._thread.join()
        if self._fault:
            raise self._fault[0]

    def _run(self) -> None:
        time.sleep(KILL_AFTER_S)
        try:
            self.kill()
        except StepFailed as exc:
            self._fault.append(exc)


def _cold_answers(plain: System, url: str, schedule: Sequence[Asked], limit: int) -> dict[int, str]:
    """Return the texts of some requests, by their place, each computed with an empty prefix cache."""
    places = [at for at, asked in enumerate(schedule) if asked.kills]
    places += [at for at in range(len(schedule) - 1, -1, -max(1, len(schedule) // limit)) if at not in places]
    texts = {}
    for number, at in enumerate(places, 1):
        with Step(f"cold answer {number} of {len(places)}"):
            forget_prefixes(url)
            answer: Answer = plain.client.stream("/v1/completions", schedule[at].body)
            texts[at] = answer.text
    return texts


def rows_of(name: str, samples: Sequence[Sample], cold: dict[int, str]) -> Iterator[dict[str, Any]]:
    """Yield a system's rows: one for each phase, and one for all."""
    for phase in (*PHASES, "all"):
        of_phase = [at for at, sample in enumerate(samples) if phase in (sample.asked.phase, "all")]
        whole = [samples[at] for at in of_phase if not samples[at].asked.kills]
        waited_ms, took_ms = [one.waited_ms for one in whole], [one.took_ms for one in whole]
        yield {
            "system": name,
            "phase": phase,
            "requests": len(of_phase),
            "failures": sum(samples[at].failures for at in of_phase),
            "wrong": sum(samples[at].text != cold[at] for at in of_phase if at in cold),
            "computed_tokens": sum(samples[at].computed_tokens for at in of_phase),
            "recomputed_tokens": sum(samples[at].recomputed_tokens for at in of_phase),
            "ttft_ms_median": percentile(waited_ms),
            "ttft_ms_p99": percentile(waited_ms, 99.0),
            "turn_ms_median": percentile(took_ms),
            "turn_ms_p95": percentile(took_ms, 95.0),
        }


if __name__ == "__main__":
    sys.exit(main())
