"""CPU that the turn takes for a streamed token: from the engine's bytes to the client's `send`, of each dialect.

The whole middleware runs over a toy engine without a socket. The engine hands it the events of vLLM 0.32, byte for
byte. A round streams the same number of tokens in each dialect, on each version of the code in turn. The cost is the
thread's CPU less that of the same loop with a `send` that does nothing. With `--base`, a git worktree of another commit
is measured beside this one, each in a process of its own. Figures are medians over the rounds, in microseconds.

- in a row: tokens follow each other, as in a busy process;
- alone: before each token, other work takes the core's caches. Programs beside the benchmark make it dearer.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from typing_extensions import override

ROOT = Path(__file__).resolve().parents[1]
TOKENS = 500
_ONE, _OTHER = bytearray(4 << 20), bytearray(4 << 20)
"""Twice a core's own cache."""
WAYS = ("in a row", "alone")
BAR_US = 25.0
PIECES = (" the", " context", " of", " caf\u00e9", ",\n", " \u4e16\u754c", ' "so"', "")
"""Texts of tokens, one of them empty, as with characters that are cut."""
HI = [{"role": "user", "content": "Hi"}]

Events = list[bytes]


def main() -> int:
    """Measure, print the table, write the JSON; exit 1 when this version misses the bar."""
    from benchmarks.result import parser_of, write_result
    from deploy.local.table import render

    parser = parser_of(__file__, __doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--base", type=Path, help="worktree of a commit to compare with")
    parser.add_argument("--only", nargs="*", choices=CASES, default=tuple(CASES))
    options = parser.parse_args()
    versions = {"now": ROOT} | ({"base": options.base.resolve()} if options.base else {})
    rows = _measured(versions, options.only, options.rounds)
    report = {"rounds": options.rounds, "tokens": TOKENS, "bar_us": BAR_US, "load": os.getloadavg(), "rows": rows}
    if options.base:
        named = ["git", "-C", str(options.base), "rev-parse", "--short", "HEAD"]
        report["base"] = subprocess.run(named, capture_output=True, text=True, timeout=60, check=True).stdout.strip()
    write_result(options.out, report)
    columns, met = _columns(versions), {True: "pass", False: "FAIL"}
    heads = ["us a streamed token", *columns, f"bar {BAR_US:g}"]
    print(render(heads, [[row["what"], *(f"{row[name]:.1f}" for name in columns), met[row["met"]]] for row in rows]))
    return 0 if all(row["met"] for row in rows) else 1


def _measured(versions: dict[str, Path], cases: Sequence[str], rounds: int) -> list[dict[str, Any]]:
    with ExitStack() as stack:
        asked = {name: stack.enter_context(_asking(root)) for name, root in versions.items()}
        taken: dict[tuple[str, str], list[float]] = {}
        for number in range(rounds + 1):
            for case in cases:
                for name in versions if number % 2 else reversed(versions):
                    costs_us = asked[name](case)
                    for way, cost_us in zip(WAYS, costs_us, strict=True):
                        if number:  # the first answers of a process are slow
                            taken.setdefault((case, f"{name}, {way}"), []).append(cost_us)
    columns = _columns(versions)
    rows: list[dict[str, Any]] = []
    for case in cases:
        medians_us = {column: round(statistics.median(taken[case, column]), 1) for column in columns}
        rows.append({"what": case, **medians_us, "met": max(medians_us[f"now, {way}"] for way in WAYS) <= BAR_US})
    return rows


def _columns(versions: Iterable[str]) -> list[str]:
    return [f"{name}, {way}" for way in WAYS for name in versions]


@contextmanager
def _asking(root: Path) -> Iterator[Callable[[str], list[float]]]:
    """Start a process with the code of a worktree, and return what has it stream an answer."""
    command = [sys.executable, __file__, "--serve"]
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONHASHSEED": "0"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=root, env=environment, stdin=pipe, stdout=pipe, text=True) as process:
        told, answers = process.stdin, process.stdout
        assert told is not None
        assert answers is not None

        def ask(case: str) -> list[float]:
            told.write(f"{case}\n")
            told.flush()
            return [float(cost_us) for cost_us in answers.readline().split()]

        yield ask
        told.close()


async def _serve() -> None:
    """Stream an answer for each case named on stdin, and print its cost a token."""
    from tests.kit.turn_bench import Pod

    logging.disable(logging.WARNING)  # each answer is cut off
    engine = _engine()
    with tempfile.TemporaryDirectory(prefix="bench-streaming-") as directory:
        pod = Pod(Path(directory), engine)
        session_id = (await pod.create(prompt="Hello")).json["session_id"]
        for line in iter(sys.stdin.readline, ""):
            path, body, engine.events = CASES[line.strip()]
            engine.costs_us = []
            await pod.ask(session_id, path=path, stream=True, context_commit=False, **body)
            print(*engine.costs_us, flush=True)


def _engine() -> Any:
    from tests.kit import vllm_words
    from tests.kit.fake_vllm import FakeVllm

    class Engine(FakeVllm):
        """Sends given events, and takes the time. No end follows: nothing but tokens is measured."""

        events: Callable[[], Events]
        costs_us: list[float]

        @override
        async def _complete(self, scope: Any, request: Any, send: Any) -> None:
            if request.get("stream"):
                await self._send_all(send, self.events())
            else:
                await super()._complete(scope, request, send)

        @override
        async def _respond(self, scope: Any, request: Any, send: Any) -> None:
            await self._send_all(send, _response())  # a version that asks vLLM's own route

        async def _send_all(self, send: Any, events: Events) -> None:
            first, *middle = events
            await send(
                {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
            )
            await send({"type": "http.response.body", "body": first, "more_body": True})
            for spent_us in (_in_a_row, _alone):
                self.costs_us.append((await spent_us(send, middle) - await spent_us(_nothing, middle)) / TOKENS)

    engine = Engine()
    if hasattr(vllm_words, "anthropic_state"):  # a version that asks vLLM's own converters
        made = [getattr(vllm_words, name)() for name in ("anthropic_state", "responses_state")]
        vars(engine)["state"] = SimpleNamespace(**vars(made[0]), **vars(made[1]))
    return engine


async def _in_a_row(send: Any, middle: Events) -> float:
    began_ns = time.thread_time_ns()
    for event in middle:
        await send({"type": "http.response.body", "body": event, "more_body": True})
    return (time.thread_time_ns() - began_ns) / 1000


async def _alone(send: Any, middle: Events) -> float:
    spent_ns = 0
    for event in middle:
        _ONE[:] = _OTHER
        began_ns = time.thread_time_ns()
        await send({"type": "http.response.body", "body": event, "more_body": True})
        await asyncio.sleep(0)  # and wakes the loop
        spent_ns += time.thread_time_ns() - began_ns
    return spent_ns / 1000


async def _nothing(message: Any) -> None:
    pass


def _event(told: dict[str, Any], name: str = "") -> bytes:
    data = json.dumps(told, separators=(",", ":"), ensure_ascii=False)
    return (f"event: {name}\n" * bool(name) + f"data: {data}\n\n").encode()


def _completion(*, together: int = 1) -> Events:
    head = {"id": "cmpl-0123456789abcdef0123456789abcdef", "object": "text_completion", "created": 1, "model": "m"}

    def event(number: int, prompt_ids: list[int] | None = None) -> bytes:
        choice = {"index": 0, "text": PIECES[number % len(PIECES)], "logprobs": None, "finish_reason": None}
        more = {"stop_reason": None, "prompt_token_ids": prompt_ids, "token_ids": [1000 + number]}
        return _event({**head, "choices": [choice | more]})

    events = [event(number) for number in range(TOKENS)]
    return [event(0, [1, 2]), *(b"".join(events[at : at + together]) for at in range(0, TOKENS, together))]


def _chat(
    delta: Callable[[str], dict[str, Any]] = lambda piece: {"content": piece},
    *,
    logprobs: Any = None,
    usage: dict[str, Any] | None = None,
) -> Events:
    head = {"id": "chatcmpl-0123456789abcdef0123456789abcdef", "object": "chat.completion.chunk", "created": 1}
    head |= {"model": "m"}
    counts = {} if usage is None else {"usage": usage}

    def event(told: dict[str, Any], **more: Any) -> bytes:
        choice = {"index": 0, "delta": told, "logprobs": more.pop("logprobs", None), "finish_reason": None}
        return _event({**head, "choices": [choice | more], **counts})

    first = _event(
        {**head, "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None}]}
        | {"prompt_token_ids": [1, 2]}
    )
    deltas = [delta(PIECES[number % len(PIECES)]) for number in range(TOKENS)]
    return [first, *(event(told, logprobs=logprobs, token_ids=[1000 + at]) for at, told in enumerate(deltas))]


def _tool_call(piece: str) -> dict[str, Any]:
    return {"tool_calls": [{"index": 0, "function": {"arguments": piece or " "}}]}


def _response() -> Events:
    kind = "response.output_text.delta"
    told = {"item_id": "msg_0123456789abcdef", "output_index": 0, "content_index": 0, "logprobs": [], "type": kind}

    def event(number: int) -> bytes:
        delta = PIECES[number % len(PIECES)]
        return _event({"content_index": 0, "delta": delta, **told, "sequence_number": number}, kind)

    begun = {"type": "response.created", "response": {"id": "resp_1", "output": [], "usage": None}}
    return [_event(begun, "response.created"), *(event(number) for number in range(TOKENS))]


_LOGPROB = {"token": " the", "logprob": -0.125, "bytes": [32, 116, 104, 101]}
_LOGPROBS = {"content": [{**_LOGPROB, "top_logprobs": [_LOGPROB] * 5}]}
_USAGE = {"prompt_tokens": 5, "total_tokens": 6, "completion_tokens": 1}
CASES: dict[str, tuple[str, dict[str, Any], Callable[[], Events]]] = {
    "completions": ("/v1/completions", {"prompt": "x"}, _completion),
    "completions, 8 events at once": ("/v1/completions", {"prompt": "x"}, lambda: _completion(together=8)),
    "chat": ("/v1/chat/completions", {"messages": HI}, _chat),
    "chat with token ids": ("/v1/chat/completions", {"messages": HI, "return_token_ids": True}, _chat),
    "chat with 5 logprobs": ("/v1/chat/completions", {"messages": HI}, lambda: _chat(logprobs=_LOGPROBS)),
    "a chat's tool call": ("/v1/chat/completions", {"messages": HI}, lambda: _chat(_tool_call)),
    "messages": ("/v1/messages", {"messages": HI, "max_tokens": 9000}, lambda: _chat(usage=_USAGE)),
    "responses": ("/v1/responses", {"input": "Hi"}, _chat),
}

if __name__ == "__main__":
    if sys.argv[1:] == ["--serve"]:
        asyncio.run(_serve())
        sys.exit(0)
    sys.exit(main())
