"""Recorded sessions of coding agents, cut to the length that a small model takes. `coding_agents.json` holds them.

The sessions come from kv-cache-tester (https://github.com/callanjfox/kv-cache-tester, Apache-2.0), which recorded the
prompts of real coding agents as numbers of 64-token blocks, without their text. Two prompts share a block where both
have its number. The file names the commit and the digest of each session.

`python -m benchmarks.traces DIRECTORY` makes the file anew from the `traces` directory of a checkout.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).parent / "coding_agents.json"
SCALE = 32
"""Tokens of a recorded session for each token here."""
BLOCK_TOKENS = 64 // SCALE
_TOKEN_IDS = range(1_000, 40_000)
"""Ids of plain tokens in SmolLM2's vocabulary of 49 152."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a session."""

    blocks: Sequence[int]
    """Numbers of the prompt's blocks, in order."""
    answer_tokens: int


@dataclass(frozen=True, slots=True)
class Session:
    """One recorded session."""

    name: str
    requests: Sequence[Request]

    def prompt(self, number: int) -> list[int]:
        """Return the token ids of a request's prompt: BLOCK_TOKENS for each block, equal where its number is."""
        return [token for block in self.requests[number].blocks for token in _tokens(self.name, block)]


def sessions(limit: int) -> list[Session]:
    """Return the first `limit` sessions of the file."""
    told = json.loads(FILE.read_text())["sessions"]
    return [
        Session(one["name"], [Request(_whole(request["blocks"]), request["out"]) for request in one["requests"]])
        for one in told[:limit]
    ]


def _tokens(session: str, block: int) -> list[int]:
    return random.Random(f"{session} {block}").choices(_TOKEN_IDS, k=BLOCK_TOKENS)  # no secret


def _whole(runs: Sequence[Sequence[int]]) -> list[int]:
    return [number for first, last in runs for number in range(first, last + 1)]
