"""Turns against the fault stack, each compared with a cold answer, and every fault of the matrix as one function.

A case makes a context, lets something happen to it, asks the next turn and heals; it returns one row of a table.
Cold: the same engine over the whole token ids, straight, under a salt nobody else has: nothing stored, nothing shared.
"""

from __future__ import annotations

import random
import re
import secrets
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from contextcache.model import Manifest
from deploy.local.progress import StepFailed
from kv_sidecar.format.manifest import decode_manifest, rank_keys
from kv_sidecar.format.safetensors_header import decode_header
from tests.kit.faults.arena import Onlooker
from tests.kit.faults.files import Kind, StoredFiles
from tests.kit.stack import KEY, MODEL, Stack
from tests.kit.tiny_stack import BLOCK_TOKENS
from tests.kit.until import wait_until
from tests.kit.vllm_answers import LOGPROB_TOLERANCE

BOUND_S = 10.0
"""What a fault may cost beyond computing the whole again."""
NOISE_S = 20.0
"""What a busy machine of two cores may add to that before a test fails; tables show what it really was."""
HANG_S = 120.0
"""An answer that takes this long has hung."""
START_S = 180.0
"""What setting up a case may take on a machine whose processes need a minute to start."""
NUM_TOKENS = 2 * BLOCK_TOKENS + 22
"""Of a context's first prompt: two whole blocks and a tail."""


@dataclass
class Answer:
    """What came back for one call, whatever it was."""

    status: int
    """0: the connection broke."""
    duration_s: float
    body: dict[str, Any] = field(default_factory=dict)
    retry_after: str | None = None

    @property
    def code(self) -> str:
        """The error's code, empty for an answer."""
        error = self.body.get("error")
        return str(error.get("code")) if isinstance(error, dict) else ""

    @property
    def tokens(self) -> list[int]:
        return self.body["choices"][0]["token_ids"]

    @property
    def logprobs(self) -> list[float]:
        return self.body["choices"][0]["logprobs"]["token_logprobs"]

    @property
    def prompt_ids(self) -> list[int]:
        choice = self.body["choices"][0]
        return choice.get("prompt_token_ids") or self.body["prompt_token_ids"]

    @property
    def context(self) -> dict[str, Any]:
        return self.body["usage"]["context"]


@dataclass
class Told:
    """One conversation, as its client knows it."""

    session_id: str
    history: list[int]
    """Token ids of every acknowledged prompt and answer."""
    unsure: list[tuple[list[int], int]] = field(default_factory=list)
    """Prompts whose answer never arrived, with its `max_tokens`: they may have been committed."""


@dataclass
class Row:
    """One case of the matrix."""

    case: str
    outcome: str
    """`cold` or `restored` (where the tokens came from), or the code of a documented error."""
    beyond_s: float
    """Seconds beyond computing the whole cold."""
    cold_s: float = field(default=0.0, kw_only=True)
    """How long computing it cold took."""
    moved: str = ""
    """Counters that grew."""
    faults: list[str] = field(default_factory=list)
    """What was wrong; empty: it held."""
    recovery_s: float = 0.0
    """From healing to the first answer."""
    was_passed: bool = True
    """Of a crash point: whether the conversation came by."""
    context: dict[str, Any] = field(default_factory=dict)
    """What the answer says of its KV."""


class World:
    """One stack and what is asked of it."""

    def __init__(self, stack: Stack, *, seed: int, idle_timeout_s: float = 20.0) -> None:
        """`idle_timeout_s`: how long both fronts of the stack wait for a pod that is silent."""
        self.stack = stack
        self.rng = random.Random(seed)
        self.files = StoredFiles(stack.data())
        self._sidecar = f"unix://{stack.paths.sidecar_socket('sidecar')}"
        self.http = httpx.Client(
            base_url=stack.url, headers={"authorization": f"Bearer {KEY}"}, timeout=httpx.Timeout(HANG_S)
        )
        self.engine_pids = stack.engine_pids()
        self.idle_timeout_s = idle_timeout_s
        self.patience_s = HANG_S
        """After how long the client itself hangs up."""
        self.bound_s = BOUND_S
        """Of the case at hand, beyond the recompute; more where the answer is owed after a longer time-out."""

    def close(self) -> None:
        self.http.close()

    # Calls.

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Answer:
        """Call through the front; a broken connection is an answer of status 0."""
        began_s = time.monotonic()
        try:
            response = self.http.request(method, path, json=body, timeout=self.patience_s)
        except httpx.TransportError:
            return Answer(0, time.monotonic() - began_s)
        duration_s = time.monotonic() - began_s
        try:
            parsed = response.json()
        except ValueError:
            parsed = {}
        return Answer(response.status_code, duration_s, parsed, response.headers.get("retry-after"))

    def ids(self, count: int) -> list[int]:
        return [self.rng.randrange(1, 250) for _ in range(count)]

    def new(self, num_tokens: int = NUM_TOKENS, *, sealed: bool = True, prompt: list[int] | None = None) -> Told:
        """Create a context; `sealed`: its KV is durable when this returns."""
        prompt = prompt or self.ids(num_tokens)
        deadline_s = time.monotonic() + START_S
        # What the case before has left behind ends by itself.
        while (answer := self.create(prompt)).status != 200 and time.monotonic() < deadline_s:
            time.sleep(0.5)
        assert answer.status == 200, answer
        told = Told(answer.body["session_id"], answer.prompt_ids + answer.tokens)
        if sealed:
            self.wait_sealed(told)
        return told

    def create(self, prompt: list[int] | None = None) -> Answer:
        """Create a context, well or badly."""
        return self.call("POST", "/v1/context", _body(prompt or self.ids(NUM_TOKENS)))

    def wait_sealed(self, told: Told) -> None:
        def is_sealed() -> bool:
            answer = self.call("GET", f"/v1/context/{told.session_id}")
            return answer.status == 200 and answer.body["holder"]["state"] == "sealed"

        deadline_s = time.monotonic() + START_S
        while True:
            try:
                return wait_until(is_sealed, deadline_s=12, what="the KV is sealed")
            except AssertionError:
                # A connector that has just lost its sidecar skips saves for up to ten seconds; the next turn is saved.
                assert time.monotonic() < deadline_s, "the KV is never sealed"
                self.turn(told, self.ids(3))

    def turn(self, told: Told, new: list[int], *, max_tokens: int = 4) -> Answer:
        """Ask the next turn; remember it as the client would."""
        body = _body(new) | {"session_id": told.session_id, "context_mode": "append", "max_tokens": max_tokens}
        answer = self.call("POST", "/v1/completions", body)
        if answer.status == 200 and answer.context.get("committed", True):
            told.history = answer.prompt_ids + answer.tokens
            told.unsure = []
        elif answer.status != 409:
            # The one before may be what it follows, or not; two in doubt are as many as a case makes.
            told.unsure.append((told.history + new, max_tokens))
        return answer

    def drop_stream(self, told: Told) -> int:
        """Begin a streamed turn and hang up after a few pieces; return the status."""
        new = self.ids(3)
        told.unsure.append((told.history + new, 300))
        body = _body(new) | {"session_id": told.session_id, "context_mode": "append", "stream": True, "max_tokens": 300}
        try:
            with self.http.stream("POST", "/v1/completions", json=body) as response:
                for number, _ in enumerate(response.iter_lines()):
                    if number > 6:
                        break
                return response.status_code
        except httpx.TransportError:
            return 0

    def cold(self, prompt: list[int], *, max_tokens: int = 4) -> Answer:
        """Compute an answer to whole token ids, past everything of ours."""
        began_s = time.monotonic()
        response = httpx.post(
            f"{self.stack.engine_urls[0]}/v1/completions",
            json=_body(prompt) | {"cache_salt": secrets.token_hex(16), "max_tokens": max_tokens},
            timeout=HANG_S,
        )
        return Answer(response.status_code, time.monotonic() - began_s, response.raise_for_status().json())

    def revive(self, part: str) -> None:
        """Start a part whose first process was killed, or follows one that was."""
        self.stack.sweep_out(part)
        self.start(part)
        if part == "engine":
            self.engine_pids = self.stack.engine_pids()
        self.wait_ready()

    def start(self, part: str) -> None:
        """Start a part that is gone; again where it was not ready in time."""
        deadline_s = time.monotonic() + START_S
        while True:
            try:
                return self.stack.start(part)
            except StepFailed as exc:
                print(f"{part} did not start: {exc}")
                if time.monotonic() > deadline_s:
                    raise

    def wait_ready(self) -> None:
        """Return when the whole answers."""
        deadline_s = time.monotonic() + START_S
        while True:
            try:
                return self.stack.wait_ready()
            except (AssertionError, httpx.HTTPError):
                if time.monotonic() > deadline_s:
                    raise

    def drop_memory(self) -> None:
        """Empty the memory tier: what is asked for next is read from disk."""
        with Onlooker(self._sidecar) as seen:
            seen.drop_all()

    def files_of(self, told: Told, kind: Kind) -> list[Path]:
        """Return the files of a context's newest manifest: whole blocks in order, the tails, or the manifest."""
        if kind == "manifest":
            return self._manifests_of(told)[-1:]
        by_name = {path.name: path for path in self.files.on_disk(kind)}
        return [by_name[key.file_name] for key in rank_keys(self._manifest_of(told), 0) if key.kind == kind]

    @contextmanager
    def copies_of(self, told: Told, kind: Kind) -> Iterator[list[memoryview]]:
        """Give the slots in which a context's newest blocks or tails lie."""
        with Onlooker(self._sidecar) as seen, seen.copies(self._manifest_of(told)) as copies:
            yield [copy for key, copy in copies.items() if key.kind == kind]

    def _manifests_of(self, told: Told) -> list[Path]:
        return [path for path in self.files.on_disk("manifest") if _metadata(path).get("session_id") == told.session_id]

    def _manifest_of(self, told: Told) -> Manifest:
        return decode_manifest(self._manifests_of(told)[-1].read_bytes())

    # Judging.

    def judge(self, case: str, told: Told, answer: Answer, *, errors: frozenset[str] = frozenset()) -> Row:
        """Compare an answer with the cold one. `errors`: codes that are right too, with 503 and Retry-After."""
        if answer.status != 200:
            return self._judged_error(case, answer, errors)
        cold = self.cold(answer.prompt_ids, max_tokens=len(answer.tokens))
        row = Row(case, _source(answer), answer.duration_s - cold.duration_s)
        row.cold_s, row.context = cold.duration_s, answer.context
        if answer.tokens != cold.tokens:
            row.faults.append(f"WRONG ANSWER {answer.tokens} not {cold.tokens}")
        elif (off := _farthest(answer.logprobs, cold.logprobs)) > LOGPROB_TOLERANCE:
            row.faults.append(f"WRONG LOG-PROBABILITIES by {off:.4f}")
        whole = answer.context["computed_tokens"] + answer.context["cached_tokens"]
        if whole != len(answer.prompt_ids):
            row.faults.append(f"cached + computed = {whole}, not {len(answer.prompt_ids)}")
        self._check_time(row)
        self._check_engine(row)
        return row

    def _judged_error(self, case: str, answer: Answer, errors: frozenset[str]) -> Row:
        row = Row(case, answer.code or f"status {answer.status}", answer.duration_s)
        if row.outcome not in errors:
            row.faults.append(f"status {answer.status} {answer.code} {str(answer.body)[:200]}")
        elif answer.status in (503, 409) and not answer.retry_after:
            row.faults.append("no Retry-After")
        self._check_time(row)
        self._check_engine(row)
        return row

    def _check_time(self, row: Row) -> None:
        # And noise as the cold answer has seen it: a machine that computes four tokens a second is slow at all.
        if row.beyond_s > self.bound_s + NOISE_S + 2 * row.cold_s:
            row.faults.append(f"took {row.beyond_s:.1f} s beyond the recompute")

    def _check_engine(self, row: Row) -> None:
        if self.stack.engine_pids() != self.engine_pids:
            row.faults.append("the engine is not what it was")

    def ask(self, case: str, told: Told, *, errors: frozenset[str] = frozenset(), num_new: int = 5) -> Row:
        """Ask one turn and judge it; its prompt must be what the client knows, and the new tokens."""
        new = self.ids(num_new)
        known, unsure = told.history, list(told.unsure)
        answer = self.turn(told, new)
        row = self.judge(case, told, answer, errors=errors)
        if answer.status == 200 and answer.prompt_ids[: -len(new)] != known:
            self._check_history(row, answer.prompt_ids[: -len(new)], known, unsure)
        return row

    def _check_history(self, row: Row, found: list[int], known: list[int], unsure: list[tuple[list[int], int]]) -> None:
        """A transcript with a turn more than was acknowledged must be that turn, with its cold answer."""
        for prompt, max_tokens in unsure:
            if found == prompt + self.cold(prompt, max_tokens=max_tokens).tokens:
                return
        row.faults.append(f"LOST OR FOREIGN TURN: {len(found)} tokens, {len(known)} known, {len(unsure)} in doubt")

    def counters(self) -> dict[str, float]:
        """Return every counter of sidecar, manager, turn and connector that says something went wrong."""
        found: Counter[str] = Counter()
        for part in ("sidecar", "manager", "gateway", "turn", "engine"):
            try:
                samples = self.stack.metrics(part)
            except httpx.HTTPError:
                continue
            for (name, labels), value in samples.items():
                reason = "/".join(value for key, value in sorted(labels) if key not in ("engine", "model_name"))
                if counted := _COUNTER.fullmatch(name):
                    found[f"{counted[1]} {reason}".strip()] += value
        return dict(found)

    def moved(self, before: dict[str, float]) -> list[str]:
        """Return the counters of faults that grew."""
        return [name for name, value in self.counters().items() if value > before.get(name, 0) and _FAULTS.search(name)]

    def wait_moved(self, before: dict[str, float], row: Row, *, within_s: float = 30) -> None:
        """Note which counters of faults grew; none is a fault of its own. The engine tells its own every second."""
        deadline_s = time.monotonic() + within_s
        while not (names := self.moved(before)) and time.monotonic() < deadline_s:
            time.sleep(0.2)
        row.moved = ", ".join(names)
        if not names:
            row.faults.append("no counter moved")


_COUNTER = re.compile(r"contextcache_(\w+?)(?:_total|_duration_seconds_count)")
_FAULTS = re.compile(
    r"^connector_events (failed|missed|skipped|refused|lost)|^sidecar_(quarantined|misses|bad|failed)"
    r"|^sidecar_collector_failures|^turn_(refused|aborts|unsealed|tenant)|^gateway_.*(failures|broken|unreachable)"
    r"|^gateway_(request|refusals)\b.*\b50[0-9]\b|^manager_.*(failures|errors|aborted)"
)
"""Counters that say that something went wrong."""


def _body(prompt: list[int]) -> dict[str, Any]:
    return {
        "model": MODEL,
        "prompt": prompt,
        "temperature": 0,
        "max_tokens": 4,
        "ignore_eos": True,
        "logprobs": 1,
        "return_token_ids": True,
    }


def _metadata(path: Path) -> dict[str, str]:
    try:
        header, _ = decode_header(memoryview(path.read_bytes()))
    except FileNotFoundError:  # of a case before: the sidecar removes it meanwhile, or it became a dangling link
        return {}
    return dict(header.metadata)


def _source(answer: Answer) -> str:
    source = answer.context.get("source")
    return "cold" if source in ("none", "recompute") else str(source)


def _farthest(left: list[float], right: list[float]) -> float:
    return max((abs(a - b) for a, b in zip(left, right, strict=True)), default=0.0)


def describe(rows: list[Row]) -> str:
    """Return a table of rows, the slowest last, and what was wrong."""
    lines = [
        f"{row.case:<58} {row.outcome:<20} {row.beyond_s:7.2f} s  {row.moved}  {'; '.join(row.faults)}"
        for row in sorted(rows, key=lambda row: row.beyond_s)
    ]
    return "\n".join(lines)
