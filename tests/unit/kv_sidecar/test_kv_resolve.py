"""One question before a load: the sidecar waits for seals, pulls and matches, and names the KV that serves most."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from contextcache.errors import InvalidRequest
from contextcache.model import KVGroup
from contextcache.names import new_cache_ref, prompt_ref
from contextcache.v1 import kv_sidecar_pb2 as pb
from kv_sidecar.format.ids import pack_token_ids
from kv_sidecar.moving.pulling import Wanted
from kv_sidecar.resolve import Resolution
from kv_sidecar.saves import FailedSave
from tests.kit.catalog_peer import PeerPods, peer_pods
from tests.kit.kv_blocks import BLOCK_TOKENS, FINGERPRINT, TENANT, new_save
from tests.kit.until import until

DOCUMENT = tuple(range(1, 23))
PROMPT = (*DOCUMENT, 7, 8, 9)
PEER = "10.0.0.7:50061"
LONG_MS = 30_000


class Pods(PeerPods):
    """`here` is asked; `there` is a peer."""

    async def ask(self, *cache_refs: str, prompt: tuple[int, ...] = PROMPT, **more: Any) -> Resolution:
        fields = {"tenant": TENANT, "fingerprint": FINGERPRINT, "world_size": 1} | more
        question = pb.ResolveRequest(token_ids=pack_token_ids(prompt), cache_refs=cache_refs, **fields)
        return await self.here.sidecar.resolver.answer(question)

    async def waits(self, asked: asyncio.Task[Resolution]) -> None:
        """Return when the question waits for KV."""
        refs = self.here.catalog.refs

        async def num_waiters() -> int:
            assert not asked.done()
            return sum(len(ref.waiters) for ref in refs)

        await until(num_waiters, is_so=bool, what="the question waits")


@pytest.fixture
async def pods(tmp_path: Path) -> AsyncIterator[Pods]:
    async with peer_pods(tmp_path, Pods) as pods:
        yield pods


async def test_the_kv_that_serves_most_of_the_prompt_is_the_answer(pods: Pods) -> None:
    shorter = await pods.here.save(DOCUMENT[:10])
    longer = await pods.here.save(DOCUMENT)
    found = await pods.ask(shorter.cache_ref, longer.cache_ref)

    assert found.manifest is not None
    assert (found.manifest.cache_ref, found.num_shared, found.missing) == (longer.cache_ref, len(DOCUMENT), [])


async def test_nothing_to_load_is_an_answer_with_its_reason(pods: Pods) -> None:
    other = await pods.here.save((50, 51, 52))
    absent = new_cache_ref()
    told = {
        "absent": await pods.ask(absent),
        "no name": await pods.ask(),
        "other tokens": await pods.ask(other.cache_ref),
        "fingerprint": await pods.ask(other.cache_ref, fingerprint="e" * 64),
        "ranks": await pods.ask(other.cache_ref, world_size=2),
    }

    assert all(found.manifest is None for found in told.values())
    assert {case: found.reason for case, found in told.items()} == {
        "absent": "cache_ref_not_found",
        "no name": "no_manifest",
        "other tokens": "other_tokens",
        "fingerprint": "fingerprint_mismatch",
        "ranks": "world_size_mismatch",
    }
    assert told["absent"].missing == [absent]


async def test_another_tenants_ref_is_reported_like_one_that_does_not_exist(pods: Pods) -> None:
    theirs = await pods.here.save(DOCUMENT)
    open_save = await pods.here.sent(DOCUMENT)
    refs = (theirs.cache_ref, open_save.cache_ref, new_cache_ref())
    async with asyncio.timeout(5):
        told = [await pods.ask(ref, tenant="other", tokens_min=1, pull_wait_ms=LONG_MS) for ref in refs]

    assert [(found.manifest, found.reason, found.missing) for found in told] == [
        (None, "cache_ref_not_found", [ref]) for ref in refs
    ]


async def test_a_seal_ends_the_wait_for_kv_that_is_being_saved(pods: Pods) -> None:
    new = await pods.here.sent(DOCUMENT)
    asked = asyncio.create_task(pods.ask(new.cache_ref, pull_wait_ms=LONG_MS))
    await pods.waits(asked)
    assert await pods.here.catalog.seal(new.cache_ref, 0)
    found = await asked

    assert found.manifest is not None
    assert found.num_usable == len(DOCUMENT)


async def test_a_save_that_the_sidecar_does_not_know_yet_is_waited_for_when_the_engine_names_it(pods: Pods) -> None:
    new = new_save(DOCUMENT, now_ms=pods.here.clock.now_ms())
    asked = asyncio.create_task(pods.ask(new.cache_ref, saving=(new.cache_ref,), wait_ms=LONG_MS, pull_wait_ms=LONG_MS))
    await pods.waits(asked)
    await pods.here.send_all(new)
    assert await pods.here.catalog.seal(new.cache_ref, 0)
    found = await asked

    assert found.manifest is not None


async def test_the_end_of_a_save_without_a_manifest_ends_the_wait(pods: Pods) -> None:
    new = new_save(DOCUMENT, now_ms=pods.here.clock.now_ms())
    asked = asyncio.create_task(pods.ask(new.cache_ref, saving=(new.cache_ref,), wait_ms=LONG_MS))
    await pods.waits(asked)
    await pods.here.catalog.give_up_save(FailedSave(TENANT, new.cache_ref, "arena_full"))
    found = await asked

    assert (found.manifest, found.reason) == (None, "cache_ref_not_found")


async def test_the_end_of_the_time_ends_the_wait_with_the_best_that_is_here(pods: Pods) -> None:
    older = await pods.here.save(DOCUMENT[:10])
    new = await pods.here.sent(DOCUMENT)
    async with asyncio.timeout(30):
        found = await pods.ask(new.cache_ref, older.cache_ref, pull_wait_ms=0)
        alone = await pods.ask(new.cache_ref, pull_wait_ms=0)

    assert found.manifest is not None
    assert (found.manifest.cache_ref, found.missing) == (older.cache_ref, [])
    assert (alone.manifest, alone.reason) == (None, "cache_ref_pending")


async def test_a_pull_is_waited_for_until_it_ends(pods: Pods) -> None:
    theirs = await pods.there.save(DOCUMENT)
    pods.peer.hold_manifest.clear()
    pods.here.sidecar.pulls.start(Wanted(TENANT, (theirs.cache_ref,), PEER))
    asked = asyncio.create_task(pods.ask(theirs.cache_ref, pull_wait_ms=LONG_MS))
    await pods.waits(asked)
    pods.peer.hold_manifest.set()
    found = await asked

    assert found.manifest is not None
    assert found.manifest.cache_ref == theirs.cache_ref


async def test_a_pull_that_finds_nothing_ends_the_wait(pods: Pods) -> None:
    """Seen failing: the end of a pull woke nobody whose question came before its first block."""
    absent = new_cache_ref()
    pods.peer.hold_manifest.clear()
    pods.here.sidecar.pulls.start(Wanted(TENANT, (absent,), PEER))
    asked = asyncio.create_task(pods.ask(absent, pull_wait_ms=LONG_MS))
    await pods.waits(asked)
    pods.peer.hold_manifest.set()
    found = await asked

    assert (found.reason, found.missing) == ("cache_ref_not_found", [absent])


async def test_other_kv_of_the_tenant_that_begins_like_the_prompt_is_found(pods: Pods) -> None:
    other = await pods.here.save((*DOCUMENT, 90, 91))
    found = await pods.ask(tokens_min=BLOCK_TOKENS)
    unasked = await pods.ask(tokens_min=0)

    assert found.manifest is not None
    assert (found.manifest.cache_ref, found.num_usable) == (other.cache_ref, len(DOCUMENT))
    assert unasked.manifest is None


async def test_kv_of_a_peer_is_fetched_and_waited_for(pods: Pods) -> None:
    await pods.there.save((*DOCUMENT, *range(100, 140)))
    found = await pods.ask(tokens_min=BLOCK_TOKENS, peer=PEER, pull_wait_ms=LONG_MS)

    assert found.manifest is not None
    assert found.manifest.token_ids == DOCUMENT[:20]


async def test_kv_of_a_peer_that_is_computed_sooner_is_not_waited_for(pods: Pods) -> None:
    await pods.there.save((*DOCUMENT, *range(100, 140)))
    pods.peer.hold_manifest.clear()
    asked = asyncio.create_task(
        pods.ask(tokens_min=BLOCK_TOKENS, peer=PEER, pull_wait_ms=LONG_MS, compute_us_per_token=1.0)
    )
    await pods.waits(asked)
    pods.here.clock.advance(ms=21)
    found = await asked
    pods.peer.hold_manifest.set()

    assert (found.manifest, found.reason) == (None, "no_manifest")


async def test_an_older_turn_that_is_here_does_not_end_the_search_for_a_newer_one_at_a_peer(pods: Pods) -> None:
    """Seen failing: new text of at most a quarter of the older turn ended the search."""
    await pods.here.save(DOCUMENT[:20])
    await pods.there.save(PROMPT)
    pods.here.sidecar.prefixes.ask_s = 30.0
    found = await pods.ask(prompt=(*PROMPT, 1), tokens_min=1, peer=PEER, pull_wait_ms=LONG_MS)

    assert found.manifest is not None
    assert found.manifest.token_ids == PROMPT


async def test_the_search_at_a_peer_does_not_take_longer_than_is_worth_it(pods: Pods) -> None:
    older = await pods.here.save(DOCUMENT[:12])
    pods.peer.hold_match.clear()
    async with asyncio.timeout(10):
        found = await pods.ask(older.cache_ref, tokens_min=1, peer=PEER, pull_wait_ms=LONG_MS)
    pods.peer.hold_match.set()

    assert found.manifest is not None
    assert found.manifest.cache_ref == older.cache_ref


async def test_a_pull_that_surely_misses_its_time_is_not_waited_for(pods: Pods) -> None:
    """The rest would take minutes at the rate so far; the engine computes it in microseconds."""
    theirs = await pods.there.save(DOCUMENT)
    pods.peer.hold_block.clear()
    pods.here.sidecar.pulls.start(Wanted(TENANT, (theirs.cache_ref,), PEER))
    first: list[int] = []
    pods.peer.released = first.append
    await until(lambda: bool(first), what="a file has come")
    pods.here.clock.advance(ms=600_000)
    async with asyncio.timeout(5):
        found = await pods.ask(theirs.cache_ref, pull_wait_ms=LONG_MS, compute_us_per_token=1.0)
    pods.peer.hold_block.set()

    assert (found.manifest, found.reason) == (None, "cache_ref_pending")


@pytest.mark.parametrize(("rest_us_per_token", "comes"), [(50_000_000.0, True), (1.0, False)])
async def test_a_pull_whose_time_is_over_is_announced_where_computing_takes_twice_as_long(
    pods: Pods, rest_us_per_token: float, *, comes: bool
) -> None:
    theirs = await pods.there.save(DOCUMENT)
    pods.peer.hold_block.clear()
    pods.here.sidecar.pulls.start(Wanted(TENANT, (theirs.cache_ref,), PEER))
    first: list[int] = []
    pods.peer.released = first.append
    await until(lambda: bool(first), what="a file has come")
    pods.here.clock.advance(ms=600)
    found = await pods.ask(theirs.cache_ref, compute_us_per_token=rest_us_per_token)
    pods.peer.hold_block.set()

    assert (found.manifest, found.reason, found.coming_ms > 0) == (None, "cache_ref_pending", comes)


async def _pulled_in_part(pods: Pods, num_files: int, tokens: tuple[int, ...] = DOCUMENT) -> str:
    """Begin a pull, of which some files come within 600 ms; return its cache_ref."""
    theirs = await pods.there.save(tokens)
    pods.peer.hold_block.clear()
    pods.peer.is_free = lambda rank, index: len(pods.peer.sent) < num_files
    come: list[int] = []
    pods.peer.released = come.append
    pods.here.sidecar.pulls.start(Wanted(TENANT, (theirs.cache_ref,), PEER))
    await until(lambda: len(come) == num_files, what="files have come")
    pods.here.clock.advance(ms=600)
    return theirs.cache_ref


async def test_a_pull_that_brings_more_bytes_than_its_manifest_tells_is_never_behind_us(pods: Pods) -> None:
    """Seen failing: the estimate was negative, and the engine asked again until the pull ended."""
    pods.peer.change_manifest = lambda manifest: replace(manifest, size_bytes=1)
    cache_ref = await _pulled_in_part(pods, 1)
    found = await pods.ask(cache_ref, compute_us_per_token=50_000_000.0)
    pods.peer.hold_block.set()

    assert found.coming_ms > 0


async def test_a_pull_that_pays_is_waited_for_though_it_misses_the_time_of_the_question(pods: Pods) -> None:
    """Seen failing: such an answer came at once, so the engine asked again and again without a rest."""
    cache_ref = await _pulled_in_part(pods, 5)
    coming = pods.here.sidecar.pulls.coming(TENANT, cache_ref)
    assert coming is not None
    rate = coming.us_per_token * 0.9
    wait_ms = int(coming.left_ms / 3)
    assert pods.here.sidecar.pulls.will_miss(TENANT, cache_ref, wait_ms, rate)
    asked = asyncio.create_task(pods.ask(cache_ref, pull_wait_ms=wait_ms, compute_us_per_token=rate))
    await pods.waits(asked)
    pods.peer.hold_block.set()
    found = await asked

    assert found.manifest is not None
    assert found.manifest.cache_ref == cache_ref


async def test_kv_that_nearly_suffices_ends_no_wait_for_a_pull_that_pays(pods: Pods) -> None:
    """Seen failing: the engine asked again and again without a rest."""
    shorter = await pods.here.save(DOCUMENT[:20])
    cache_ref = await _pulled_in_part(pods, 1, PROMPT)
    asked = asyncio.create_task(
        pods.ask(shorter.cache_ref, cache_ref, pull_wait_ms=LONG_MS, compute_us_per_token=50_000_000.0)
    )
    await pods.waits(asked)
    pods.peer.hold_block.set()
    found = await asked

    assert found.manifest is not None
    assert found.manifest.cache_ref == cache_ref


async def test_a_checkpoint_is_looked_at_only_where_its_context_does_not_serve_all_it_shares(pods: Pods) -> None:
    window = (KVGroup("sliding_window", BLOCK_TOKENS, ((16, 22),), 6, "a" * 16),)
    at_prompt = (KVGroup("sliding_window", BLOCK_TOKENS, ((4, 10),), 6, "a" * 16),)
    context = await pods.here.save(DOCUMENT, groups=window)
    await pods.here.save(DOCUMENT[:10], groups=at_prompt, cache_ref=prompt_ref(context.cache_ref))
    refs = (context.cache_ref, prompt_ref(context.cache_ref))
    goes_on = await pods.ask(*refs)
    parts = await pods.ask(*refs, prompt=(*DOCUMENT[:12], 99, 98))

    assert goes_on.manifest is not None
    assert parts.manifest is not None
    assert (goes_on.manifest.cache_ref, goes_on.num_usable) == (context.cache_ref, 22)
    assert (parts.manifest.cache_ref, parts.num_usable) == (prompt_ref(context.cache_ref), 10)


async def test_a_question_beyond_its_limits_is_refused(pods: Pods) -> None:
    """Seen failing for a rate that is no number: a ValueError in the search, which had no typed answer."""
    await pods.here.save(DOCUMENT)
    wrong: list[dict[str, Any]] = [
        *({"compute_us_per_token": rate, "tokens_min": 1} for rate in (math.nan, math.inf, -1.0)),
        {"wait_ms": LONG_MS + 1},
        {"pull_wait_ms": -1},
        {"fingerprint": ""},
        {"tenant": ""},
        {"beginning": "x" * 65},
    ]
    for fields in wrong:
        with pytest.raises(InvalidRequest):
            await pods.ask(**fields)
    with pytest.raises(InvalidRequest, match="at most 16"):
        await pods.ask(*(new_cache_ref() for _ in range(17)))
