"""Contexts whose KV LMCache keeps, over a real LMCache server, coordinator and engine, without connector and sidecar.

Equality is tested in float32, greedy: a cold answer is a stateless one over the same ids under a salt that nobody has.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from contextcache.identity import context_salt
from integrations.lmcache.api import LMCacheApi, SaltedTokens
from tests.contract.lmcache_contract import LMCacheContract
from tests.kit.lmcache_world import CHUNK_TOKENS, MODEL, SECRET, LMCacheWorld
from tests.kit.until import wait_until
from tests.kit.vllm_answers import LOGPROB_TOLERANCE, logprobs, prompt_ids, tokens

pytestmark = [pytest.mark.timeout(600), pytest.mark.thorough]

TENANT = "default"
PROMPT_TOKENS = 3 * CHUNK_TOKENS + 100


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LMCacheWorld]:
    with LMCacheWorld(tmp_path_factory.mktemp("lmcache")) as running:
        yield running


class Asker:
    """A client of the gateway, and of the engine straight."""

    def __init__(self, world: LMCacheWorld) -> None:
        self.world = world
        self.gateway = httpx.Client(base_url=world.url("gateway"), timeout=120)
        self.engine = httpx.Client(base_url=world.url("engine"), timeout=120)
        self.coordinator = httpx.Client(base_url=world.url("coordinator"), timeout=30)

    def close(self) -> None:
        for client in (self.gateway, self.engine, self.coordinator):
            client.close()

    def create(self, prompt: list[int]) -> dict[str, Any]:
        return _ok(self.gateway.post("/v1/context", json=_body(prompt) | {"ttl": 600}))

    def ask(self, session_id: str, prompt: list[int]) -> dict[str, Any]:
        return _ok(self.gateway.post("/v1/completions", json=_body(prompt) | {"session_id": session_id}))

    def delete(self, session_id: str) -> None:
        assert _ok(self.gateway.delete(f"/v1/context/{session_id}"))["status"] == "success"

    def plain(self, prompt: list[int], salt: str = "") -> dict[str, Any]:
        """Ask the engine itself."""
        salt = salt or f"cold-{random.random()}"
        return _ok(self.engine.post("/v1/completions", json=_body(prompt) | {"cache_salt": salt}))

    def stored(self, session_id: str) -> dict[str, set[str]]:
        """Return the tiers in which each chunk of a context lies."""
        salt = context_salt(TENANT, session_id, SECRET)
        listed = _ok(self.coordinator.get("/directory/keys", params={"limit": 10_000}))["keys"]
        return {
            one["key"]["chunk_hash_hex"]: {place["tier"] for place in one["placements"]}
            for one in listed
            if one["key"]["cache_salt"] == salt
        }

    def pinned(self, session_id: str) -> int:
        salt = context_salt(TENANT, session_id, SECRET)
        return int(_ok(self.coordinator.get("/cache/pins", params={"cache_salt": salt}))["total"])

    def wait_kept(self, session_id: str, chunks: int) -> None:
        """Wait until so many chunks are on disk and pinned."""
        wait_until(
            lambda: sum("l2" in tiers for tiers in self.stored(session_id).values()) >= chunks,
            what="all chunks are on disk",
        )
        wait_until(lambda: self.pinned(session_id) == chunks, what="all chunks are pinned")


@pytest.fixture
def asker(world: LMCacheWorld) -> Iterator[Asker]:
    asker = Asker(world)
    yield asker
    asker.close()


def new_prompt(num_tokens: int = PROMPT_TOKENS) -> list[int]:
    return random.choices(range(1, 400), k=num_tokens)


def same(warm: dict[str, Any], cold: dict[str, Any]) -> None:
    assert tokens(warm) == tokens(cold)
    assert logprobs(warm) == pytest.approx(logprobs(cold), abs=LOGPROB_TOLERANCE)


def test_a_turn_after_the_engine_forgot_computes_the_last_chunk_and_answers_like_a_cold_one(world, asker):
    create = asker.create(new_prompt())
    asker.wait_kept(create["session_id"], 3)
    world.forget_prefixes()

    warm = asker.ask(create["session_id"], [5, 6, 7])

    cold = asker.plain(prompt_ids(warm))
    assert warm["usage"]["context"]["cached_tokens"] == 3 * CHUNK_TOKENS
    assert warm["usage"]["context"]["source"] == "host"
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    same(warm, cold)
    asker.delete(create["session_id"])


def test_kv_outlives_an_engine_that_was_killed(world, asker):
    create = asker.create(new_prompt())
    asker.wait_kept(create["session_id"], 3)
    world.kill("engine")
    world.kill("turn")
    world.start("turn")
    world.start("engine")

    warm = asker.ask(create["session_id"], [5, 6, 7])

    assert warm["usage"]["context"]["cached_tokens"] == 3 * CHUNK_TOKENS
    same(warm, asker.plain(prompt_ids(warm)))
    # The process that knew the tokens is gone: they are deleted by what LMCache lists.
    asker.delete(create["session_id"])
    wait_until(lambda: not asker.stored(create["session_id"]), what="nothing is listed")


def test_kv_outlives_engine_and_lmcache_and_is_prefetched_from_disk(world, asker):
    create = asker.create(new_prompt())
    asker.wait_kept(create["session_id"], 3)
    world.kill("engine")
    world.kill("turn")
    world.kill("lmcache")
    world.start("lmcache")
    world.start("turn")
    world.start("engine")

    warm = asker.ask(create["session_id"], [5, 6, 7])

    assert warm["usage"]["context"]["cached_tokens"] == 3 * CHUNK_TOKENS
    same(warm, asker.plain(prompt_ids(warm)))
    assert "POST /cache/prefetches" in world.log("lmcache")
    asker.delete(create["session_id"])


def test_a_deleted_context_leaves_nothing_to_hit_and_no_pin(world, asker):
    prompt = new_prompt()
    create, other = asker.create(prompt), asker.create(prompt)
    grown = asker.ask(create["session_id"], new_prompt(200))
    for kept, chunks in ((create, 4), (other, 3)):
        asker.wait_kept(kept["session_id"], chunks)

    asker.delete(create["session_id"])
    world.forget_prefixes()

    salt = context_salt(TENANT, create["session_id"], SECRET)
    assert asker.pinned(create["session_id"]) == 0
    wait_until(lambda: not asker.stored(create["session_id"]), what="nothing is listed")
    again = asker.plain(prompt_ids(grown), salt)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    # Of another context with the same prompt nothing was deleted.
    assert asker.ask(other["session_id"], [9])["usage"]["context"]["cached_tokens"] == 3 * CHUNK_TOKENS
    asker.delete(other["session_id"])


def test_a_prompt_below_a_chunk_is_computed_again_with_the_right_answer(world, asker):
    create = asker.create(new_prompt(CHUNK_TOKENS - 20))
    world.forget_prefixes()

    warm = asker.ask(create["session_id"], [5])

    assert warm["usage"]["context"]["cached_tokens"] == 0
    same(warm, asker.plain(prompt_ids(warm)))
    asker.delete(create["session_id"])


def test_turns_go_on_without_lmcache(world, asker):
    create = asker.create(new_prompt())
    world.kill("coordinator")
    try:
        answer = asker.ask(create["session_id"], [5, 6, 7])
    finally:
        world.start("coordinator")

    assert answer["usage"]["context"]["committed"]
    same(answer, asker.plain(prompt_ids(answer)))


class TestRealLMCache(LMCacheContract):
    @pytest.fixture
    async def api(self, world):
        api = LMCacheApi(
            server_url=world.url("lmcache"),
            coordinator_url=world.url("coordinator"),
            model_name=world.model,
            world_size=1,
            timeout_s=30,
        )
        yield api
        await api.close()

    @pytest.fixture
    def store(self, asker):
        def store(kv: SaltedTokens) -> None:
            asker.plain(list(kv.token_ids), kv.salt)

        return store


def _body(prompt: list[int]) -> dict[str, Any]:
    asked = {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 6, "ignore_eos": True}
    return asked | {"logprobs": 1, "return_token_ids": True}


def _ok(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found
