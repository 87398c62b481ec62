"""A conversation of twenty turns, three ways: what it costs in seconds and computed tokens, added up turn by turn.

- stateless: everything is sent again each turn, and the engine has forgotten it since (others used its cache, or the
  request came to another pod);
- prefix cache: the same, and the engine still has all of it: the best a stateless client can hope for;
- context: only the new text is sent, and the engine has forgotten here too: the sidecar's memory has it.

A stack of its own, whole conversations one after the other, each round in another order and over new texts. Seconds are
those a client waits for whole answers; medians over the rounds.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.engines import forget_prefixes, running
from benchmarks.result import parser_of, write_result
from deploy.local.demo import wait_sealed
from deploy.local.gateway_client import Answer, GatewayClient
from deploy.local.model import MODEL_NAME
from deploy.local.plain_text import plain_text
from deploy.local.progress import Step, exit_code
from deploy.local.stack import Stack
from deploy.local.state import API_KEYS
from deploy.local.table import render

STACK_DIRECTORY = Path(__file__).resolve().parents[1] / ".build" / "bench-stack"
WAYS = ("stateless", "prefix cache", "context")
_ANSWER_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Turn:
    """What one turn took."""

    seconds: float
    ttft_ms: float
    computed_tokens: int


@exit_code
def main() -> int:
    """Measure, print the table, write the JSON; exit 1 when a part of the stack failed."""
    parser = parser_of(__file__, __doc__, has_stack=True)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--turn-tokens", type=int, default=300, help="new text of a turn, about")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    stack = Stack(STACK_DIRECTORY, port=options.port, dtype=options.dtype, dev=True)
    taken: dict[str, list[list[Turn]]] = {way: [] for way in WAYS}
    with running(stack):
        talks = Conversations(stack, turns=options.turns, turn_tokens=options.turn_tokens)
        for number in range(options.rounds + 1):
            for way in WAYS[number % 3 :] + WAYS[: number % 3]:
                with Step(f"round {number}, {way}"):
                    turns = talks.take(way)
                if number:  # the first answers of a process are slow
                    taken[way].append(turns)
    rows = [row for way in WAYS for row in rows_of(way, taken[way])]
    last = [row for row in rows if row["turn"] == options.turns]
    print(
        render(("way", "turns", "seconds", "computed tokens"), [[str(cell) for cell in row.values()] for row in last])
    )
    shape = {"turns": options.turns, "turn_tokens": options.turn_tokens, "rounds": options.rounds}
    write_result(options.out, {"dtype": options.dtype, **shape, "rows": rows})
    return 0


class Conversations:
    """A running stack, and conversations with it over texts that were never seen."""

    def __init__(self, stack: Stack, *, turns: int, turn_tokens: int) -> None:
        self._client = GatewayClient(stack.url, next(iter(API_KEYS)))
        self._engine_url = stack.engine_urls[0]
        self._turns, self._turn_tokens = turns, turn_tokens
        self._seed = time.time_ns() // 1_000_000 % 900_000_000

    def take(self, way: str) -> list[Turn]:
        """Have one conversation."""
        history, session_id, turns = "", "", []
        for _ in range(self._turns):
            if way != "prefix cache":
                forget_prefixes(self._engine_url)
            self._seed += 1
            new = " " + plain_text(self._turn_tokens, seed=self._seed)
            if way != "context":
                answer = self._asked("/v1/completions", prompt=history + new)
            elif session_id:
                answer = self._asked("/v1/completions", prompt=new, session_id=session_id)
            else:
                answer = self._asked("/v1/context", prompt=new, ttl=3600)
                session_id = answer.session_id
            history += new + answer.text
            turns.append(Turn(answer.total_ms / 1000, answer.ttft_ms, answer.computed_tokens))
            if session_id:
                wait_sealed(self._client, session_id)
        return turns

    def _asked(self, path: str, **fields: Any) -> Answer:
        body = {"model": MODEL_NAME, "max_tokens": _ANSWER_TOKENS, "temperature": 0, "ignore_eos": True, **fields}
        return self._client.stream(path, body)


def rows_of(way: str, conversations: list[list[Turn]]) -> list[Mapping[str, Any]]:
    """Return one row a turn: medians of what all turns up to it took together."""
    rows = []
    for number in range(1, len(conversations[0]) + 1):
        so_far = [turns[:number] for turns in conversations]
        seconds = statistics.median(sum(turn.seconds for turn in turns) for turns in so_far)
        tokens = statistics.median(sum(turn.computed_tokens for turn in turns) for turns in so_far)
        rows.append({"way": way, "turn": number, "seconds": round(seconds, 3), "computed_tokens": int(tokens)})
    return rows


if __name__ == "__main__":
    sys.exit(main())
