"""Usage equals the sum of the receipts that clients have, by key, after gateway and manager were killed in between."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import signal
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import pytest

from context_manager.client import ContextManagerClient
from contextcache.client import AsyncContextCache, ConnectionFailed, NotCreated, errors
from contextcache.client.retries import Retries
from contextcache.errors import StoreUnavailable
from tests.kit import turn_pod
from tests.kit.fake_vllm import FakeVllm
from tests.kit.gateway_parts import KEY
from tests.kit.gateway_process import GatewayProcess
from tests.kit.gateway_server import running_gateway, settings_for
from tests.kit.manager_process import ManagerProcess
from tests.kit.seed import SEED
from tests.kit.turn_pod import MODEL, running_turn_pod
from tests.kit.until import until

KEYS = {"key-of-app": ("acme", "app"), "key-of-batch": ("acme", "batch"), "key-of-globex": ("globex", "")}
OPERATOR = "key-of-operator"
COUNTS = ("contexts", "turns", "computed_tokens", "cached_tokens", "completion_tokens")
NUM_CLIENTS, NUM_STEPS = 2, 14
"""Of each key; steps of each client."""


class Reads:
    """Turns that commit nothing: one whose answer is lost runs again, and counts again, so none is lost here."""

    def __init__(self):
        self._may_begin = asyncio.Event()
        self._may_begin.set()
        self._running = 0

    @asynccontextmanager
    async def one(self):
        await self._may_begin.wait()
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1

    @asynccontextmanager
    async def none(self):
        self._may_begin.clear()
        await until(lambda: not self._running, what="no read is under way", deadline_s=60)
        yield
        self._may_begin.set()


class Receipts:
    """What one key's clients were told."""

    def __init__(self):
        self.sums = Counter()

    def add(self, reply, *, created=False):
        usage = reply.usage
        self.sums.update(
            {
                "contexts": int(created),
                "turns": 1,
                "computed_tokens": usage.context.computed_tokens,
                "cached_tokens": usage.context.cached_tokens,
                "completion_tokens": usage.completion_tokens,
            }
        )


async def live(client, receipts, reads, name):
    """Do at random what a client does, and keep every receipt once."""
    contexts, chosen = [], random.Random(f"{SEED} {name}")
    for step in range(NUM_STEPS):
        what = chosen.choice(["ask", "ask", "ask", "read", "fork", "rewind", "delete"]) if contexts else "create"
        if what == "create" or chosen.random() < 0.1:
            try:
                context = await client.contexts.create(
                    MODEL, f"Hello {name} {step} {'x' * chosen.randrange(40)}", ttl=600
                )
            except NotCreated as exc:
                await not_created(client, receipts, exc.reply)
            else:
                receipts.add(context.reply, created=True)
                contexts.append(context)
            continue
        context = chosen.choice(contexts)
        if what == "ask":
            before = (await context.refresh()).generation
            reply = await context.ask(" and " + "y" * chosen.randrange(30))
            said = reply.usage.context
            if said.committed or said.reason != "store_unavailable" or (await context.refresh()).generation > before:
                receipts.add(reply)
        elif what == "read":
            async with reads.one():
                receipts.add(await context.ask(" and " + "y" * chosen.randrange(30), context_commit=False))
        elif what == "fork":
            contexts.append(await forked(client, context, f"fork-{name}-{step}"))
            receipts.sums["contexts"] += 1
        elif what == "rewind":
            # A rewind before has replaced it; or nobody said whether this one was made, which no receipt tells of.
            with suppress(errors.GenerationGone, errors.StoreUnavailable, errors.NoReadyEndpoint, ConnectionFailed):
                await context.rewind(max(1, (await context.refresh()).generation - 1))
        else:
            contexts.remove(context)
            await context.delete()


async def not_created(client, receipts, reply):
    """Take the receipt of a create that left no context, or of which only a look can tell whether it did."""
    is_there = False
    if reply.usage.context.reason == "store_unavailable":
        try:
            # Its row lives as long as its lease.
            info = await until(
                lambda: looked(client, reply.session_id),
                is_so=lambda info: info.state != "creating",
                what="it is known whether it is there",
                deadline_s=90,
            )
            is_there = info is not None
        except errors.ContextNotFound:
            return
    receipts.add(reply, created=is_there)


async def looked(client, session_id):
    return (await client.contexts.get(session_id)).info


async def forked(client, context, name):
    """Fork under a name, so that it can be told whether a fork without an answer was made."""
    while True:
        try:
            return await context.fork(name=name)
        except errors.ContextExists:
            with suppress(errors.ContextNotFound):  # its row died with the gateway that made it
                await until(
                    lambda: looked(client, name),
                    is_so=lambda info: info.state != "creating",
                    what="it is known whether it was made",
                    deadline_s=90,
                )
                return await client.contexts.get(name)
        except (errors.StoreUnavailable, errors.NoReadyEndpoint, ConnectionFailed):
            await asyncio.sleep(0.2)


def key_file(path):
    entries = [
        {"sha256": hashlib.sha256(key.encode()).hexdigest(), "tenant": tenant, **({"name": name} if name else {})}
        for key, (tenant, name) in KEYS.items()
    ]
    operator = {"sha256": hashlib.sha256(OPERATOR.encode()).hexdigest(), "tenant": "ops", "operator": True}
    path.write_text(json.dumps({"keys": [*entries, operator]}))
    return path


def name_of(key):
    return KEYS[key][1] or hashlib.sha256(key.encode()).hexdigest()[:8]


async def used(client, **query):
    """Return what the server counted today, by key."""
    report = await client.usage(**query)
    return {
        one["key"]: Counter({name: one[name] for name in COUNTS if one[name]})
        for day in report["days"]
        for one in day["keys"]
    }


@pytest.mark.thorough
@pytest.mark.timeout(300)
async def test_usage_is_the_sum_of_the_receipts_whatever_was_killed(tmp_path, valkey):
    toy = FakeVllm(answer=lambda ids: " yes" * (1 + len(ids) % 3), cached_tokens=3)
    manager = ManagerProcess(tmp_path, valkey.url)
    async with AsyncExitStack() as ends:
        ends.push_async_callback(manager.stop)
        await manager.start()
        serving = running_turn_pod(tmp_path, manager_port=manager.port, engine=toy, rpc_deadline_ms=30_000)
        pod = await ends.enter_async_context(serving)
        settings = settings_for(tmp_path, {"pod-a": pod}, manager_port=manager.port)
        settings = settings.model_copy(update={"api_keys_file": key_file(tmp_path / "named-keys.json")})
        gateway = GatewayProcess(tmp_path, settings)
        ends.push_async_callback(gateway.stop)
        await gateway.start()
        url = f"http://127.0.0.1:{gateway.http_port}"
        clients = {key: AsyncContextCache(url, key, retries=Retries(times=100, within_s=120)) for key in KEYS}
        receipts, reads = {key: Receipts() for key in KEYS}, Reads()
        lives = [
            asyncio.create_task(live(clients[key], receipts[key], reads, f"{name_of(key)}-{number}"))
            for key in KEYS
            for number in range(NUM_CLIENTS)
        ]

        def done():
            return sum(one.sums["turns"] for one in receipts.values())

        await until(lambda: done() >= 8, what="there is traffic", deadline_s=60)
        async with reads.none():
            await gateway.kill()
            await gateway.start()
        since = done()
        await until(lambda: done() >= since + 8, what="it goes on", deadline_s=60)
        async with reads.none():
            manager.send(signal.SIGKILL)
            await manager.wait()
            await manager.start()
        await asyncio.gather(*lives)

        async def counted():
            return {key: (await used(clients[key])).get(name_of(key), Counter()) for key in KEYS}

        told = {key: +one.sums for key, one in receipts.items()}
        try:
            # What committed nothing is counted beside its answer.
            await until(counted, is_so=lambda found: found == told, what="all is counted", deadline_s=30)
        except AssertionError:
            assert await counted() == told
        operator = AsyncContextCache(url, OPERATOR)
        foreign = await used(operator, tenant="acme")
        with pytest.raises(errors.OperatorOnly):
            await clients["key-of-app"].usage(tenant="globex")
        wrong_days = [("2026-01-01", "2026-03-01"), ("2020-01-02", "2020-01-01"), ("yesterday", "2020-01-02")]
        for first, last in wrong_days:
            with pytest.raises(errors.InvalidRequest):
                await operator.usage(first_day=first, last_day=last)
        for client in (*clients.values(), operator):
            await client.close()

    assert foreign == {"app": told["key-of-app"], "batch": told["key-of-batch"]}
    assert min(one["turns"] for one in told.values()) >= 10


async def test_a_turn_whose_commit_was_made_and_not_told_counts_once_also_when_its_context_is_gone(
    tmp_path, manager, monkeypatch
):
    """Seen failing: the second try found no context, so the turn was counted as one that committed nothing too."""

    class Losing(ContextManagerClient):
        async def commit_turn(self, commit):
            await super().commit_turn(commit)
            await self.unregister_session_cache(commit.tenant, commit.session_id)
            raise StoreUnavailable("its answer was lost")

    monkeypatch.setattr(turn_pod, "ContextManagerClient", Losing)
    engine = FakeVllm(answer=lambda ids: " ok")
    async with running_turn_pod(tmp_path, manager_port=manager.port, engine=engine) as pod:
        settings = settings_for(tmp_path, {"pod-a": pod}, manager_port=manager.port)
        async with running_gateway(settings, num_ready=1) as gateway, AsyncContextCache(gateway.url, KEY) as client:
            context = await client.contexts.create(MODEL, "Hello")
            reply = await context.ask(" more")
    # The pod has ended, and with it what it still had to tell.
    report = await manager.manager.read_usage("demo")

    assert reply.usage.context.committed is False
    assert sum(one.counts["turns"] for one in report.days[report.today]) == 2
