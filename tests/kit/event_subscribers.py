"""Routers of other projects that subscribe to a sidecar's events: vLLM's own decoder, and Dynamo's indexer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import zmq

from tests.kit.ports import free_port
from tests.kit.until import wait_until

Listing = dict[str, set[int]]
"""Hashes by medium."""
MODEL, WORKER = "model", 7
_END = (-1).to_bytes(8, "big", signed=True)
_DYNAMO_TIERS = {"host_pinned": "CPU", "disk": "STORAGE"}


class Fold:
    """What a router knows after events. It asserts that every parent is known first, as llm-d wants it."""

    def __init__(self) -> None:
        self.listing: Listing = {"STORAGE": set(), "CPU": set()}
        self.num_events = 0

    def apply(self, events: Iterable[dict[str, Any]]) -> None:
        for event in events:
            self.num_events += 1
            if event["type"] == "AllBlocksCleared":
                self.listing = {"STORAGE": set(), "CPU": set()}
                continue
            found, hashes = self.listing[event["medium"]], set(event["block_hashes"])
            assert event["locality"] == "LOCAL"
            if event["type"] == "BlockRemoved":
                assert hashes <= found, "a removed block was not known"
                found -= hashes
            else:
                assert not hashes & found, "a stored block was known already"
                assert event["parent_block_hash"] in {None, *self.listing["STORAGE"]}
                assert len(event["token_ids"]) == event["block_size"] * len(hashes)
                found |= hashes


def vllms_decoder() -> msgspec.msgpack.Decoder[Any]:
    """Return a decoder of vLLM's own event classes; the import takes ten seconds."""
    from vllm.distributed.kv_events import KVEventBatch

    return msgspec.msgpack.Decoder(type=KVEventBatch)


class Subscriber:
    """Follows a stream in a thread; asks for a replay as vLLM's example and llm-d do."""

    def __init__(
        self,
        port: int,
        decoder: msgspec.msgpack.Decoder[Any] | None = None,
        *,
        last: int = -1,
        known: int | None = None,
    ) -> None:
        """`last`, `known`: number of the last batch, and a block, from a process before."""
        self._port, self._ends = port, threading.Event()
        self._decoder: Any = decoder or msgspec.msgpack.Decoder()
        self.fold = Fold()
        if known is not None:
            self.fold.listing["STORAGE"].add(known)
        self.last = last
        self.num_replays = 0
        self.error: BaseException | None = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ends.set()
        self._thread.join(30)
        assert not self._thread.is_alive()
        if self.error is not None:
            raise self.error

    def listing(self) -> Listing:
        with self._lock:
            return {medium: set(hashes) for medium, hashes in self.fold.listing.items()}

    def _run(self) -> None:
        try:
            with zmq.Context() as context, context.socket(zmq.SUB) as events:
                events.setsockopt(zmq.LINGER, 0)
                events.subscribe(b"")
                events.connect(f"tcp://127.0.0.1:{self._port}")
                while not self._ends.is_set():
                    if events.poll(50):
                        _, number, payload = events.recv_multipart()
                        self._take(context, int.from_bytes(number, "big"), payload)
        except BaseException as exc:  # noqa: BLE001  # the test's thread raises it
            self.error = exc

    def _take(self, context: zmq.Context[Any], number: int, payload: bytes) -> None:
        if number > self.last + 1:
            self._replay(context)
        if number == self.last + 1:
            self._apply(number, payload)

    def _replay(self, context: zmq.Context[Any]) -> None:
        with context.socket(zmq.DEALER) as replays:
            replays.setsockopt(zmq.LINGER, 0)
            replays.connect(f"tcp://127.0.0.1:{self._port + 1}")
            replays.send_multipart([b"", (self.last + 1).to_bytes(8, "big")])
            while replays.poll(5_000):
                *_, number, payload = replays.recv_multipart()
                if number == _END:
                    self.num_replays += 1
                    return
                self._apply(int.from_bytes(number, "big"), payload)
            # The process has ended meanwhile; its next batch is a gap again.

    def _apply(self, number: int, payload: bytes) -> None:
        _, events, data_parallel_rank = msgspec.to_builtins(self._decoder.decode(payload))
        assert (number > self.last, data_parallel_rank) == (True, 0)
        with self._lock:
            self.fold.apply(events)
            self.last = number


class DynamoIndexer:
    """`python -m dynamo.indexer` of ai-dynamo-runtime, 75 MB: not installed with our tests.

    `DYNAMO_PYTHON` names an interpreter that has it. It listens on all addresses, and has no setting for that.
    """

    PYTHON = os.environ.get("DYNAMO_PYTHON", sys.executable)

    def __init__(self, log: Path) -> None:
        self._port = free_port()
        with log.open("wb") as file:
            command = [self.PYTHON, "-m", "dynamo.indexer", "--port", str(self._port)]
            self._process = subprocess.Popen(command, stdout=file, stderr=file)
        wait_until(
            lambda: self._call("/workers"), what="it answers", is_so=lambda it: it is not None, despite=(OSError,)
        )

    @classmethod
    def is_installed(cls) -> bool:
        command = [cls.PYTHON, "-c", "import dynamo.indexer"]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def subscribe(self, port: int, *, block_tokens: int) -> None:
        self._call(
            "/register",
            instance_id=WORKER,
            endpoint=f"tcp://127.0.0.1:{port}",
            replay_endpoint=f"tcp://127.0.0.1:{port + 1}",
            model_name=MODEL,
            block_size=block_tokens,
        )

    def listing(self) -> Listing:
        found: Listing = {"STORAGE": set(), "CPU": set()}
        (index,) = self._call("/dump").values()
        for it in index["events"]:
            blocks = it["event"]["data"]["stored"]["blocks"]
            found[_DYNAMO_TIERS[it["storage_tier"]]] |= {block["block_hash"] for block in blocks}
        return found

    def tokens_found(self, token_ids: Iterable[int]) -> dict[str, int]:
        """Return how many tokens of a prompt it finds, by tier."""
        instances = self._call("/query", token_ids=list(token_ids), model_name=MODEL)["instances"]
        found = instances.get(str(WORKER), {"cpu": 0, "disk": 0})
        return {tier: found[tier] for tier in ("cpu", "disk")}

    def _call(self, path: str, **body: object) -> Any:
        data = json.dumps(body).encode() if body else None
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}{path}", data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.loads(answer.read())
