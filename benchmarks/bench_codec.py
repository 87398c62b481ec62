"""What a codec saves and what it costs: bytes on disk, answers after a restore, time to restore, speed.

For each of none, q8 and q4 a kv-sidecar with an empty disk and a vLLM engine with the connector (SmolLM2, real
processes). First conversations grow turn by turn, and each turn's KV is saved; its answer is greedy and keeps the
log-probability of each token. The sidecar is killed with SIGKILL and started again. Then every turn is asked again,
with the engine's own prefix cache emptied and the KV of the turn before restored. Eight requests are under way at a
time, both times; `none` shows what other company in a batch changes in bfloat16.

- restored: turns of which all was loaded that could be; `not_loaded` in the JSON says why others were not;
- agree: turns whose whole answer is the same text; tokens: how many of an answer's are, up to the first other one;
- log-probability: how far that of the first run's token is off, over all tokens up to the first other one;
- restore: a long context with one token more, from its request to its first token: from the disk, from the arena;
- numbers: the same KV, taken from the files that `none` wrote, with groups of 32, 64 and 128: error relative to its
  root mean square, and speed of one thread. Pages are as a CPU engine orders them.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.engines import forget_prefixes, start_engine
from benchmarks.estimates import cell, interval, percentile
from benchmarks.processes import Processes
from benchmarks.result import parser_of, write_result
from contextcache.errors import ContextCacheError
from contextcache.identity import KV_TRANSFER_KEY, KVTransfer, sign_kv_transfer
from contextcache.model import Manifest
from contextcache.names import new_cache_ref
from deploy.local.model import MODEL_NAME
from deploy.local.plain_text import plain_text
from deploy.local.progress import StepFailed, say
from deploy.local.readiness import grpc_serves
from deploy.local.table import render
from kv_sidecar.client import EngineSidecarClient, parse_block_file
from vllm_plugin.connector.copies.codec import DTYPES, STEPS, PageCodec

TENANT, SECRET = "demo", "a secret for benchmarks, 32 bytes"
EXPIRES_AT_MS = 4_000_000_000_000
CODECS = ("none", *STEPS)
GROUPS = (32, 64, 128)
PAGE_NUMBERS = 3 * 32 * 2 * 64
"""SmolLM2's: three heads of 64 for 32 tokens, K and V."""
TURN_TOKENS, ANSWER_TOKENS = 40, 16
BARS: Mapping[str, Mapping[str, float]] = {
    "none": {"bytes": 1.0},
    "q8": {"bytes": 0.56},
    "q4": {"bytes": 0.31},
}
"""Bytes a token against none's, at most."""
ARENA_BYTES = 1 << 30
AT_ONCE = 8
"""Requests, so that they share batches as in use."""
_EVENTS, _NOT_LOADED = "contextcache_connector_events_total", ("missed_loads", "unneeded_loads", "failed_loads")
_ROUNDS_SPEED = 15
_SPEED_BYTES = 16 << 20


@dataclass(slots=True)
class Answer:
    """One turn's."""

    token_ids: list[int]
    logprobs: list[float]
    cached_tokens: int
    taken_s: float


@dataclass(slots=True)
class Conversation:
    """What was asked, and under which names its KV is."""

    prompts: list[list[int]] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    refs: list[str] = field(default_factory=list)


def main() -> int:
    """Measure, print the tables, write the JSON; with --check, exit 1 when a bar is not met."""
    parser = parser_of(__file__, __doc__, has_bars=True)
    parser.add_argument("--conversations", type=int, default=50)
    parser.add_argument("--turns", type=int, default=4, help="of each, beside its first")
    parser.add_argument("--first-tokens", type=int, default=150, help="of the first turn, about")
    parser.add_argument("--long-tokens", type=int, default=4000, help="of the context whose restore is timed, about")
    parser.add_argument("--restores", type=int, default=3, help="of it, from each tier")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES)
    parser.add_argument("--port", type=int, default=8190, help="of the engine")
    options = parser.parse_args()
    load, rows, numbers = os.getloadavg(), [], []
    try:
        for codec in CODECS:
            say(f"{codec} …")
            with (
                tempfile.TemporaryDirectory(prefix="bench-codec-") as directory,
                Processes(Path(directory)) as processes,
            ):
                bench = Bench(processes, codec, options)
                rows.append({"codec": codec} | bench.measure())
                say(json.dumps(rows[-1]))
                numbers = numbers or numbers_of(bench.pages(), options.dtype)
    except StepFailed as failure:
        say(f"error: {failure}")
        return 1
    for row in rows:
        row["bytes_ratio"] = round(row["bytes_a_token"] / rows[0]["bytes_a_token"], 4)
        row["met"] = row["bytes_ratio"] <= BARS[row["codec"]]["bytes"] and row["restored"] == row["turns"]
    asked = {
        name: getattr(options, name) for name in ("dtype", "conversations", "turns", "first_tokens", "long_tokens")
    }
    write_result(options.out, asked | {"load": [load, os.getloadavg()], "rows": rows, "numbers": numbers})
    show(rows, numbers)
    return 1 if options.check and not all(row["met"] for row in rows) else 0


class Bench:
    """One codec's engine and sidecar."""

    def __init__(self, processes: Processes, codec: str, options: argparse.Namespace) -> None:
        self._processes, self._options = processes, options
        self._data = processes.directory / "data"
        secret = processes.directory / "secret"
        secret.write_text(SECRET)
        socket = processes.directory / "sidecar.sock"
        self._address = f"unix://{socket}"
        env = {"SIDECAR_UNIX_SOCKET": str(socket), "SIDECAR_LISTEN": "", "SIDECAR_DATA_DIR": str(self._data)}
        env |= {"SIDECAR_MEMORY_LIMIT_BYTES": str(ARENA_BYTES)}
        processes.start("sidecar", (sys.executable, "-m", "kv_sidecar"), partial(grpc_serves, self._address), env=env)
        transfer = {
            "kv_connector": "ContextCacheConnector",
            "kv_connector_module_path": "vllm_plugin.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "sidecar": self._address,
                "secret_file": str(secret),
                "codec": codec,
                # Asked is what a restored turn says: none is computed because that is expected to be faster.
                "load_always_ms": 60_000,
                "deadline_factor": 10,
            },
        }
        arguments = ("--kv-transfer-config", json.dumps(transfer))
        env = {"VLLM_SERVER_DEV_MODE": "1"}
        start_engine(processes, "engine", arguments, port=options.port, dtype=options.dtype, env=env)
        self._url = processes.url("engine")
        self._client = httpx.Client(base_url=self._url, timeout=300, trust_env=False)
        self._sidecar = EngineSidecarClient(self._address, timeout_s=60)
        self._num_asked = 0
        self._small: tuple[list[int], str] = ([], "")
        """A context by which it is seen that restores work again."""

    def measure(self) -> dict[str, Any]:
        """Let conversations grow, kill everything, ask again; return the figures."""
        conversations = [self._grown(seed) for seed in range(self._options.conversations)]
        for number in range(self._options.turns + 1):
            self._turn(conversations, number)
        long = self._tokens(plain_text(self._options.long_tokens, seed=1_000))
        long_ref = new_cache_ref()
        cold = self._ask(long, save=long_ref, num_tokens=1)
        manifests = [self._sealed(ref) for conversation in conversations for ref in conversation.refs]
        whole = self._sealed(long_ref)
        self._small = conversations[0].prompts[0], conversations[0].refs[0]
        figures = self._restores([*long, *cold.token_ids], long_ref)
        figures |= {"cold_ms": round(cold.taken_s * 1000, 1)}
        figures |= {"bytes_a_token": round(whole.size_bytes / len(whole.token_ids), 1)}
        stored = [manifest.size_bytes / len(manifest.token_ids) for manifest in manifests]
        figures |= {"bytes_a_token_of_turns": round(statistics.mean(stored), 1)}
        return figures | self._asked_again(conversations)

    def pages(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return pages of whole blocks as the engine had them, `[pages, page bytes]`; of an engine without codec."""
        found, taken = [], 0
        for path in sorted((self._data / "blocks").rglob("*.safetensors")):
            block = parse_block_file(path.read_bytes())
            found.append(block.pages.reshape(-1, PAGE_NUMBERS * DTYPES[self._options.dtype].itemsize))
            taken += block.pages.nbytes
            if taken >= _SPEED_BYTES:
                break
        return np.concatenate(found)

    def _grown(self, seed: int) -> Conversation:
        return Conversation([self._tokens(plain_text(self._options.first_tokens, seed=seed))])

    def _turn(self, conversations: Sequence[Conversation], number: int) -> None:
        """Ask one turn of all, and save it."""

        def ask(conversation: Conversation, seed: int) -> None:
            if number:
                asked = self._tokens(" " + plain_text(TURN_TOKENS, seed=10_000 * number + seed))
                conversation.prompts.append([*conversation.prompts[-1], *conversation.answers[-1].token_ids, *asked])
            conversation.refs.append(new_cache_ref())
            prompt, save = conversation.prompts[-1], conversation.refs[-1]
            conversation.answers.append(self._ask(prompt, save=save))

        _at_once(ask, conversations)

    def _asked_again(self, conversations: Sequence[Conversation]) -> dict[str, Any]:
        """Ask every turn but the first once more, after a restore; return how near the answers are."""
        agreed, same_tokens, restored, off = [], [], [], list[float]()
        before_loads = self._not_loaded()
        for number in range(1, self._options.turns + 1):

            def ask(conversation: Conversation, _seed: int, number: int = number) -> Answer:
                return self._ask(conversation.prompts[number], load=conversation.refs[number - 1])

            forget_prefixes(self._url)
            for conversation, answer in zip(conversations, _at_once(ask, conversations), strict=True):
                before, first = conversation.prompts[number - 1], conversation.answers[number]
                restored.append(answer.cached_tokens >= len(before) + ANSWER_TOKENS - 1)
                same = same_until(first, answer)
                agreed.append(same == len(first.token_ids))
                same_tokens.append(same)
                off += [abs(first.logprobs[at] - answer.logprobs[at]) for at in range(same)]
        return {
            "turns": len(agreed),
            "restored": sum(restored),
            "not_loaded": dict(self._not_loaded() - before_loads),
            "agree": round(sum(agreed) / len(agreed), 4),
            "same_tokens": round(statistics.mean(same_tokens) / ANSWER_TOKENS, 4),
            "logprob_off_mean": round(statistics.mean(off), 5),
            "logprob_off_p95": percentile(off, 95, digits=5),
            "logprob_off_max": round(max(off), 5),
        }

    def _not_loaded(self) -> Counter[str]:
        return not_loaded(self._client.get("/metrics").raise_for_status().text)

    def _restores(self, prompt: list[int], ref: str) -> dict[str, Any]:
        """Restore a long context, from the disk and from memory; return how long until the first token."""
        found: dict[str, Any] = {}
        for tier in ("disk", "memory"):
            taken_ms = []
            for _ in range(self._options.restores):
                if tier == "disk":
                    self._crash()
                forget_prefixes(self._url)
                answer = self._ask(prompt, load=ref, num_tokens=1)
                if answer.cached_tokens < len(prompt) - 2:
                    raise StepFailed("the context was not restored")
                taken_ms.append(answer.taken_s * 1000)
            found |= {f"{tier}_ms": percentile(taken_ms), f"{tier}_ms_95": interval(taken_ms)}
        return found

    def _ask(self, prompt: list[int], *, load: str = "", save: str | None = None, num_tokens: int = 0) -> Answer:
        """Generate greedily. The prompt goes as it is: nothing is tokenised twice."""
        self._num_asked += 1
        name, load_refs = f"request-{self._num_asked}", (load,) if load else ()
        order = KVTransfer(TENANT, "ctx_1", name, load_refs, save, EXPIRES_AT_MS)
        body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": num_tokens or ANSWER_TOKENS, "temperature": 0}
        body |= {"logprobs": 1, "ignore_eos": True, "return_token_ids": True}
        if load or save:
            body["kv_transfer_params"] = {KV_TRANSFER_KEY: sign_kv_transfer(order, SECRET.encode())}
        began_s = time.perf_counter()
        answer = self._client.post("/v1/completions", json=body).raise_for_status().json()
        taken_s = time.perf_counter() - began_s
        (choice,) = answer["choices"]
        cached = (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return Answer(choice["token_ids"], choice["logprobs"]["token_logprobs"], cached, taken_s)

    def _tokens(self, text: str) -> list[int]:
        answer = self._client.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).raise_for_status()
        ids: list[int] = answer.json()["tokens"]
        return ids

    def _sealed(self, ref: str) -> Manifest:
        for _ in range(600):
            with suppress(ContextCacheError):
                return self._sidecar.get_manifest(TENANT, ref, 5)[0]
            time.sleep(0.05)
        raise StepFailed("a context was not saved")

    def _crash(self) -> None:
        """Kill the sidecar and start it again; wait until the engine restores what it is asked."""
        os.kill(self._processes.pid("sidecar"), signal.SIGKILL)
        self._processes.end("sidecar")
        self._processes.start_again("sidecar")
        prompt, ref = self._small
        for _ in range(200):
            forget_prefixes(self._url)
            if self._ask(prompt, load=ref, num_tokens=1).cached_tokens:
                return
            time.sleep(0.1)
        raise StepFailed("the engine does not find the sidecar again")


def not_loaded(metrics_page: str) -> Counter[str]:
    """Return how often an engine loaded nothing, by what it says of why."""
    found: Counter[str] = Counter()
    for family in text_string_to_metric_families(metrics_page):
        for sample in family.samples:
            if sample.name == _EVENTS and sample.labels["event"] in _NOT_LOADED:
                found[f"{sample.labels['event']} {sample.labels['reason']}".strip()] += int(sample.value)
    return found


def same_until(first: Answer, answer: Answer) -> int:
    """Return how many tokens two answers have in common, up to the first that is another."""
    pairs = enumerate(zip(first.token_ids, answer.token_ids, strict=True))
    return next((at for at, (one, other) in pairs if one != other), len(first.token_ids))


def _at_once(ask: Any, conversations: Sequence[Conversation]) -> list[Any]:
    with ThreadPoolExecutor(AT_ONCE) as threads:
        return list(threads.map(ask, conversations, range(len(conversations))))


def numbers_of(pages: np.ndarray[Any, np.dtype[np.uint8]], dtype: str) -> list[dict[str, Any]]:
    """Return error and speed by codec and size of groups."""
    exact = torch.from_numpy(pages.copy()).view(DTYPES[dtype]).double()
    rows = []
    for name, group in _all():
        codec = PageCodec(name, dtype, pages.shape[1], group)
        coded, back = np.empty((len(pages), codec.coded_bytes), dtype=np.uint8), np.empty_like(pages)
        source = pages.copy()
        encode_s = _median_s(partial(codec.encode, source, coded))
        decode_s = _median_s(partial(codec.decode, coded, back))
        off = torch.from_numpy(back).view(DTYPES[dtype]).double() - exact
        row = {"codec": name, "group": group, "bits": round(8 * codec.coded_bytes / exact.shape[1], 3)}
        row |= {"error": round(float(off.square().mean().sqrt() / exact.square().mean().sqrt()), 5)}
        row |= {"encode_gb_s": round(pages.nbytes / encode_s / 1e9, 2)}
        rows.append(row | {"decode_gb_s": round(pages.nbytes / decode_s / 1e9, 2)})
    return rows


def _all() -> Iterator[tuple[str, int]]:
    return ((name, group) for name in STEPS for group in GROUPS)


def _median_s(work: Any) -> float:
    taken_s = []
    for _ in range(_ROUNDS_SPEED):
        began_s = time.perf_counter()
        work()
        taken_s.append(time.perf_counter() - began_s)
    return statistics.median(taken_s)


def show(rows: Sequence[Mapping[str, Any]], numbers: Sequence[Mapping[str, Any]]) -> None:
    """Print the tables."""
    names = {"bytes_a_token": "bytes/token", "bytes_ratio": "of none", "bytes_a_token_of_turns": "short contexts"}
    names |= {"restored": "restored", "agree": "agree", "same_tokens": "tokens", "logprob_off_mean": "logprob off"}
    names |= {"logprob_off_p95": "p95", "logprob_off_max": "max", "cold_ms": "cold ms", "disk_ms": "disk ms"}
    names |= {"memory_ms": "memory ms", "met": "met"}
    cells = [[row["codec"], *(_cell(name, row[name]) for name in names)] for row in rows]
    print(render(["codec", *names.values()], cells))
    heads = ("codec", "group", "bits", "error", "encode GB/s", "decode GB/s")
    print(f"\n{render(heads, [[cell(value, '.4g') for value in row.values()] for row in numbers])}")


def _cell(name: str, value: Any) -> str:
    return cell(value, ".1f" if name.endswith(("ms", "token", "turns")) else ".4f")


if __name__ == "__main__":
    sys.exit(main())
