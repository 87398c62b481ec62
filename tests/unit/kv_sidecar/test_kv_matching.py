"""Whatever a tenant has that begins like a prompt is found: to the block always, to the token where one would do."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contextcache.clock import ManualClock
from contextcache.errors import InvalidRequest
from contextcache.model import KVGroup
from contextcache.names import new_cache_ref
from kv_sidecar.format.ids import pack_token_ids
from kv_sidecar.sealed.prefixes import PrefixIndex, PrefixQuestion, beginning_of, prompt_of
from tests.kit.kv_blocks import (
    BLOCK_TOKENS,
    FINGERPRINT,
    TENANT,
    TTL_MS,
    SidecarUnderTest,
    new_save,
    planned,
)

DOCUMENT = tuple(range(1, 23))
"""Five whole blocks and two tokens."""


def question(token_ids: tuple[int, ...], *, tenant: str = TENANT, fingerprint: str = FINGERPRINT, tokens_min: int = 1):
    return PrefixQuestion(tenant, fingerprint, pack_token_ids(token_ids), tokens_min)


def shared(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


async def found(kv: SidecarUnderTest, token_ids: tuple[int, ...], **fields: object) -> list[tuple[str, int]]:
    answer = await kv.catalog.match_prefix(question(token_ids, **fields))  # type: ignore[arg-type]  # its fields
    return [(one.cache_ref, one.num_tokens) for one in answer]


async def test_another_conversation_about_the_same_document_is_found_to_the_token(kv: SidecarUnderTest) -> None:
    first = await kv.save((*DOCUMENT, 100, 101))
    assert (await found(kv, (*DOCUMENT, 200)))[0] == (first.cache_ref, len(DOCUMENT))


async def test_where_a_prompt_leaves_a_context_within_a_whole_block_the_tokens_before_are_found_too(
    kv: SidecarUnderTest,
) -> None:
    first = await kv.save(tuple(range(40)))
    assert (await found(kv, (*range(18), 99, 98, 97)))[0] == (first.cache_ref, 18)


async def test_a_prompt_that_ends_with_a_block_is_found_in_a_context_that_goes_on(kv: SidecarUnderTest) -> None:
    """Seen failing: nothing was found, all of the prompt was computed."""
    first = await kv.save(tuple(range(40)))
    assert await found(kv, tuple(range(BLOCK_TOKENS * 3))) == [(first.cache_ref, BLOCK_TOKENS * 3)]


async def test_the_longest_of_many_that_begin_alike_comes_first(kv: SidecarUnderTest) -> None:
    for number in range(30):
        await kv.save((*DOCUMENT, 1000 + number), session_id=f"ctx_{number}")
    longer = await kv.save((*DOCUMENT, 7, 8, 9, 10, 11), session_id="ctx_longer")
    answer = await found(kv, (*DOCUMENT, 7, 8, 9, 10, 11, 12))
    assert answer[0] == (longer.cache_ref, 27)
    assert len(answer) <= 3


async def test_nothing_of_another_tenant_or_fingerprint_is_found(kv: SidecarUnderTest) -> None:
    await kv.save(DOCUMENT)
    assert await found(kv, DOCUMENT, tenant="other") == []
    assert await found(kv, DOCUMENT, fingerprint="e" * 64) == []
    assert await found(kv, DOCUMENT) != []


async def test_what_has_too_little_in_common_what_is_deleted_and_what_is_expired_is_not_found(
    kv: SidecarUnderTest,
) -> None:
    first = await kv.save(DOCUMENT)
    assert await found(kv, (*DOCUMENT[:6], 99), tokens_min=7) == []
    assert await found(kv, (*DOCUMENT[:6], 99), tokens_min=6) == [(first.cache_ref, 6)]
    kv.clock.advance(ms=TTL_MS)  # type: ignore[attr-defined]  # a ManualClock
    assert await found(kv, DOCUMENT) == []
    second = await kv.save(DOCUMENT)
    assert await found(kv, DOCUMENT) == [(second.cache_ref, len(DOCUMENT))]
    await kv.catalog.delete(TENANT, "", [second.cache_ref])
    assert await found(kv, DOCUMENT) == []


async def test_after_a_start_all_that_is_stored_is_found_again(tmp_path: Path) -> None:
    clock = ManualClock()
    async with SidecarUnderTest(tmp_path, clock=clock) as kv:
        first = await kv.save(DOCUMENT)
    async with SidecarUnderTest(tmp_path, clock=clock) as kv:
        assert await found(kv, (*DOCUMENT, 5)) == [(first.cache_ref, len(DOCUMENT))]


async def test_what_was_named_is_not_evicted_before_it_can_be_loaded(tmp_path: Path) -> None:
    clock = ManualClock()
    file_bytes = 0
    async with SidecarUnderTest(tmp_path / "size", clock=clock) as kv:
        await kv.save(tuple(range(BLOCK_TOKENS)))
        file_bytes = kv.disk_bytes()
    async with SidecarUnderTest(tmp_path, clock=clock, disk_limit_bytes=20 * file_bytes) as kv:
        first = await kv.save(DOCUMENT, session_id="ctx_first")
        assert await found(kv, DOCUMENT) != []
        for number in range(1, 20):
            await kv.save(tuple(range(1000 * number, 1000 * number + 8)), session_id=f"ctx_{number}")
        assert await kv.load(first)
        clock.advance(ms=60_000)
        for number in range(20, 40):
            await kv.save(tuple(range(1000 * number, 1000 * number + 8)), session_id=f"ctx_{number}")
        assert await found(kv, DOCUMENT) == []


@pytest.mark.parametrize("bad", [{"tenant": ""}, {"tenant": "a b"}, {"fingerprint": ""}])
async def test_a_question_that_cannot_be_is_refused(kv: SidecarUnderTest, bad: dict[str, str]) -> None:
    with pytest.raises(InvalidRequest):
        await found(kv, DOCUMENT, **bad)
    with pytest.raises(InvalidRequest):
        await kv.catalog.match_prefix(PrefixQuestion(TENANT, FINGERPRINT, b"123", 1))


TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=14).map(tuple)


@given(st.lists(TOKENS, max_size=12), st.data())
def test_in_any_set_of_contexts_the_blocks_found_are_as_many_as_a_look_at_all_of_them_finds(
    stored: list[tuple[int, ...]], data: st.DataObject
) -> None:
    index, contexts = PrefixIndex(), {}
    for token_ids in stored:
        new = new_save(token_ids, now_ms=0)
        contexts[new.cache_ref] = (token_ids, beginning_of(planned(new, block_tokens=BLOCK_TOKENS)))
        index.add(new.cache_ref, contexts[new.cache_ref][1])
    for cache_ref in data.draw(st.lists(st.sampled_from(sorted(contexts)), unique=True) if contexts else st.just([])):
        index.remove(cache_ref, contexts.pop(cache_ref)[1])
    wanted = data.draw(TOKENS)
    sizes = index.sizes(TENANT, FINGERPRINT)
    answer = index.find(prompt_of(TENANT, FINGERPRINT, pack_token_ids(wanted), sizes), lambda _: True)

    most = max((shared(wanted, token_ids) for token_ids, _ in contexts.values()), default=0)
    for one in answer:
        assert one.num_tokens <= shared(wanted, contexts[one.cache_ref][0])
        assert one.is_whole == (shared(wanted, contexts[one.cache_ref][0]) == len(contexts[one.cache_ref][0]))
    assert max((shared(wanted, contexts[one.cache_ref][0]) for one in answer), default=0) == most
    assert sizes == ((BLOCK_TOKENS,) if contexts else ())


def test_where_only_whole_contexts_serve_the_longest_of_them_is_named_beside_the_longest_of_all() -> None:
    groups = lambda count: (KVGroup("state", BLOCK_TOKENS, ((count - 1, count),), 0, "1" * 16),)
    index = PrefixIndex()
    kept = {}
    for token_ids in (DOCUMENT[:9], (*DOCUMENT[:14], 77, 78, 79, 80)):
        new = new_save(token_ids, now_ms=0, groups=groups(len(token_ids)), cache_ref=new_cache_ref())
        kept[len(token_ids)] = new.cache_ref
        index.add(new.cache_ref, beginning_of(planned(new, block_tokens=BLOCK_TOKENS)))
    sizes = index.sizes(TENANT, FINGERPRINT)
    answer = index.find(prompt_of(TENANT, FINGERPRINT, pack_token_ids(DOCUMENT), sizes), lambda _: True)
    assert {one.cache_ref: one.is_whole for one in answer} == {kept[18]: False, kept[9]: True}
