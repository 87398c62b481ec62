"""A pod goes with its disk: the next turn restores on another one, from a store that both share, and equals cold."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from anyio.from_thread import start_blocking_portal

from deploy.local import s3_server
from tests.kit.caller import Caller
from tests.kit.lying_store import FAULTS, LyingStore
from tests.kit.ports import free_port
from tests.kit.stack import Stack
from tests.kit.until import wait_until
from tests.kit.vllm_answers import LOGPROB_TOLERANCE, ids_of_length, logprobs, prompt_ids, tokens
from tests.vllm.conftest import IDLE

pytestmark = [pytest.mark.timeout(900), pytest.mark.thorough]


class Store:
    """What both pods share: a directory, or an S3 server behind one that lies."""

    def __init__(self, kind: str, directory: Path, ends: ExitStack) -> None:
        self.directory = directory / kind
        self.env = {"SIDECAR_STORE_URL": f"file://{self.directory}"}
        self.lying: LyingStore | None = None
        if kind == "s3":
            port = free_port()
            log = ends.enter_context((directory / "s3.log").open("wb"))
            command = [s3_server.installed(), "-H", "127.0.0.1", "-p", str(port)]
            process = subprocess.Popen(command, stdout=log, stderr=log)
            ends.callback(process.wait)
            ends.callback(process.kill)
            wait_until(lambda: s3_server.has_bucket(port), what="the S3 server answers")
            portal = ends.enter_context(start_blocking_portal())
            running = LyingStore(f"http://127.0.0.1:{port}").running()
            self.lying = ends.enter_context(portal.wrap_async_context_manager(running))
            self.env = {"SIDECAR_STORE_URL": f"s3://{s3_server.BUCKET}/pods", **s3_server.environment(self.lying.port)}

    @contextmanager
    def failing(self, fault: str = "slow") -> Iterator[None]:
        """Fail for the length of the block: as a directory, be none any more."""
        if self.lying is not None:
            self.lying.fault = fault
        else:
            self.directory.rename(self.directory.with_suffix(".away"))
            self.directory.touch()
        yield
        if self.lying is not None:
            self.lying.fault = ""
        else:
            self.directory.unlink()
            self.directory.with_suffix(".away").rename(self.directory)


@pytest.fixture(scope="module", params=["dir", "s3"])
def store(stack: Stack, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """The store; both engines work, and their sidecars share it."""
    with ExitStack() as ends:
        store = Store(request.param, tmp_path_factory.mktemp("store"), ends)
        stack.mend()
        for sidecar in stack.sidecars:
            stack.restart(sidecar, **store.env)
        introduce(stack)
        yield store
    stack.mend()
    for sidecar in stack.sidecars:
        stack.restart(sidecar, SIDECAR_STORE_URL="")
    stack.mend()


def introduce(stack: Stack) -> None:
    """Let each engine speak to its sidecar, which fetches nothing for one that has not introduced itself."""
    caller = Caller(stack)
    for engine in stack.engines:
        stack.drain(engine, draining=False)
        for other in stack.engines:
            if other != engine:
                stack.drain(other)
        caller.wait_sealed(caller.create(prompt=ids_of_length(300, seed=7))["session_id"])
    caller.close()


@pytest.fixture
def client(stack: Stack, store: Store) -> Iterator[Caller]:
    stack.mend()
    for name in stack.engines:
        stack.drain(name, draining=False)
    caller = Caller(stack)
    yield caller
    caller.close()
    stack.drain(IDLE)


class Context:
    """A context of some hundred tokens, in the store, and which engine has it."""

    def __init__(self, client: Caller, *, seed: int) -> None:
        self.client, self.stack = client, client.stack
        self.session_id = client.create(prompt=ids_of_length(900, seed=seed))["session_id"]
        client.wait_sealed(self.session_id)
        shown = client.get(self.session_id)
        self.tokens, self.holder = shown["tokens"], self.stack.engine_named(shown["holder"]["endpoint"])
        self.sidecar = self.holder.replace("engine", "sidecar")

    def wait_stored(self) -> None:
        wait_until(
            lambda: self.stack.counted(self.sidecar, "contextcache_sidecar_store_waiting"),
            what="the store has it",
            is_so=lambda waiting: waiting == 0,
        )

    def lose_pod(self) -> None:
        """Let its engine and sidecar be gone, with all that was on their disk."""
        for part in (self.holder, self.sidecar):
            if self.stack.pids(part):
                self.stack.kill(part)
        shutil.rmtree(self.stack.data(self.sidecar))
        self.stack.wait_known_gone(self.holder)

    def ask(self) -> dict[str, Any]:
        return self.client.complete(
            prompt=" and then what", session_id=self.session_id, return_token_ids=True, logprobs=1
        )

    def assert_equals_cold(self, warm: dict[str, Any]) -> None:
        cold = self.client.complete(prompt=prompt_ids(warm), return_token_ids=True, logprobs=1)
        assert tokens(warm) == tokens(cold)
        assert logprobs(warm) == pytest.approx(logprobs(cold), abs=LOGPROB_TOLERANCE)


@pytest.mark.parametrize("end", ["terminated", "killed after the seal"])
def test_a_pod_that_goes_with_its_disk_leaves_its_contexts_to_the_next_one(client, end):
    context = Context(client, seed=80 + len(end))
    if end == "terminated":
        # What it has not written yet it writes now.
        client.stack.terminate(context.sidecar)
    else:
        context.wait_stored()
    context.lose_pod()
    warm = context.ask()

    usage = warm["usage"]["context"]
    assert (usage["source"], usage["context_tokens"]) == ("object", context.tokens)
    assert usage["cached_tokens"] == context.tokens - 1
    assert warm["usage"]["prompt_tokens"] == len(prompt_ids(warm)) - context.tokens + 1
    context.assert_equals_cold(warm)


@pytest.mark.parametrize(
    ("store", "fault"), [("dir", "gone"), *(("s3", fault) for fault in FAULTS)], indirect=["store"]
)
def test_with_a_store_that_fails_the_turn_is_computed(client, store, fault):
    # Others each time: what was computed for the fault before, the engine itself still has.
    context = Context(client, seed=77 + ["gone", *FAULTS].index(fault))
    context.wait_stored()
    context.lose_pod()
    with store.failing(fault):
        answer = context.ask()
    # Tests are patient (tests/kit/patience.py); by default a turn waits 2 s for what is being fetched.
    print(f"a turn with a store of this kind ({fault}) waited {answer['usage']['context']['restore_ms'] / 1000:.1f} s")

    assert answer["usage"]["context"]["source"] == "recompute"
    context.assert_equals_cold(answer)
