"""Search in all KV of a tenant for the longest beginning of a prompt, before a load.

A match stays for a while, so that its load finds it: neither the watermark nor a longer context of the conversation
removes it. A delete or its expiry does, and the load is then a miss.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TypeVar

from contextcache.clock import Clock
from contextcache.errors import InvalidRequest, SidecarUnavailable
from contextcache.model import CacheRef, SessionId, TenantId
from contextcache.names import check_tenant
from kv_sidecar.format.ids import TOKEN_BYTES, check_fingerprint_text
from kv_sidecar.refs import Refs
from kv_sidecar.runtime import Runtime
from kv_sidecar.sealed.manifests import ManifestRecord, Manifests
from kv_sidecar.sealed.prefixes import Found, Prompt, prompt_of

Answer = TypeVar("Answer")

MATCHES_MAX = 3
"""Matches in one answer: the caller opens one manifest after the other until one serves."""
BEGINNINGS_MAX = 4096
PASSED_OVER_MAX = 8
"""Manifests that one look-up finds unreadable before it answers with nothing."""
STAYS_MS = 60_000
"""Time from match to load, in which a request may wait in the engine's queue."""


@dataclass(frozen=True, slots=True)
class PrefixQuestion:
    """Question of an engine or a peer."""

    tenant: TenantId
    fingerprint: str
    token_ids: bytes
    """As little-endian u32."""
    tokens_min: int
    """Fewer are not worth a load."""
    expires_at_ms: int = 0
    """Unix time in ms until which kept KV that is found lives at least; 0: as long as it has."""
    group: SessionId = ""
    """Conversation that asks, where its KV is kept."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.token_ids) // TOKEN_BYTES

    def check(self) -> None:
        """Raise InvalidRequest for a field that cannot be."""
        check_tenant(self.tenant)
        check_fingerprint_text(self.fingerprint)
        if len(self.token_ids) % TOKEN_BYTES:
            raise InvalidRequest("token ids must have four bytes each", param="token_ids")


class Beginnings:
    """Beginnings of the last prompts here: gateways send prompts that begin alike to the same pod."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._numbers: OrderedDict[str, int] = OrderedDict()
        """When they came, in ms, each later than those before: they grow from one life of the process to the next."""
        self._end = clock.now_ms()

    def note(self, beginning: str) -> None:
        """Remember one more; the one asked for longest ago goes for it."""
        if not beginning:
            return
        self._end = max(self._end + 1, self._clock.now_ms())
        self._numbers[beginning] = self._end
        self._numbers.move_to_end(beginning)
        if len(self._numbers) > BEGINNINGS_MAX:
            self._numbers.popitem(last=False)

    def since(self, after: int) -> tuple[dict[str, int], int]:
        """Return the beginnings after a number, newest last, with their age in ms, and the number for the next call."""
        if after > self._end:  # the number is of an earlier process, and the clock was put back
            after = 0
        new = list(takewhile(lambda named: named[1] > after, reversed(self._numbers.items())))
        now_ms = self._clock.now_ms()
        return {beginning: max(now_ms - number, 0) for beginning, number in reversed(new)}, self._end


class PrefixMatches:
    """Finds matches and holds them for their loads. Used from one event loop."""

    def __init__(
        self,
        manifests: Manifests,
        refs: Refs,
        runtime: Runtime,
        *,
        lose: Callable[[ManifestRecord], Awaitable[None]],
    ) -> None:
        """`lose` forgets a context with a damaged or missing manifest."""
        self._manifests = manifests
        self._refs = refs
        self._runtime = runtime
        self._lose = lose

    async def find(self, question: PrefixQuestion) -> Sequence[Found]:
        """Return the KV that begins most like the prompt, the longest first.

        Raises InvalidRequest.
        """
        question.check()
        sizes = self._manifests.prefixes.sizes(question.tenant, question.fingerprint)
        best: Sequence[Found] = ()
        if sizes and question.num_tokens >= question.tokens_min:
            prompt = await self._runtime.threads.run(
                prompt_of, question.tenant, question.fingerprint, question.token_ids, sizes=sizes
            )
            best = await self._readable(question, prompt)
        for one in best:
            self._refs.name(question.tenant, one.cache_ref, for_ms=STAYS_MS)
        self._runtime.metrics.prefix_matches.labels("some" if best else "none").inc()
        return best

    async def _readable(self, question: PrefixQuestion, prompt: Prompt) -> Sequence[Found]:
        """Return the longest matches of the prompt.

        A manifest that cannot be read hides others of the same blocks, so the search begins again without it.
        """
        passed_over: set[CacheRef] = set()
        while len(passed_over) < PASSED_OVER_MAX:
            try:
                return await self._nearest(question, prompt, passed_over)
            except _Unreadable as exc:
                passed_over.add(exc.args[0])
        return ()

    async def _nearest(self, question: PrefixQuestion, prompt: Prompt, passed_over: set[CacheRef]) -> Sequence[Found]:
        """Return the longest matches in the index, and shorter ones as substitutes, the longest whole one among them.

        The first manifest is read and verified: the engine loads it next. Raises _Unreadable.
        """

        def live(cache_ref: CacheRef) -> ManifestRecord | None:
            return None if cache_ref in passed_over else self._manifests.live(question.tenant, cache_ref)

        found: list[Found] = []
        for one in self._manifests.prefixes.find(prompt, lambda cache_ref: live(cache_ref) is not None):
            record, num_tokens = live(one.cache_ref), one.num_tokens
            if record is not None and one.goes_on:  # it may share some of the block in which the two part
                shared = self._manifests.in_common(record, prompt, num_tokens, record.at.block_tokens)
                num_tokens += await self._read(record, shared)
            if record is not None and num_tokens >= question.tokens_min:
                found.append(replace(one, num_tokens=num_tokens))
        found.sort(key=lambda one: one.num_tokens, reverse=True)
        if found and (record := live(found[0].cache_ref)) is not None:
            await self._read(record, self._manifests.read(record, again=True))
        rest = sorted(found[MATCHES_MAX - 1 :], key=lambda one: not one.is_whole)
        return [*found[: MATCHES_MAX - 1], *rest[:1]]

    async def _read(self, record: ManifestRecord, answer: Awaitable[Answer | None]) -> Answer:
        """Return a manifest's content; a context whose manifest is bad is lost. Raises _Unreadable."""
        try:
            read = await answer
        except SidecarUnavailable as exc:  # a fault that passes
            raise _Unreadable(record.cache_ref) from exc
        if read is None:
            await self._lose(record)
            raise _Unreadable(record.cache_ref)
        return read


class _Unreadable(Exception):  # no error: the search goes on
    """The manifest of a cache_ref cannot be read now."""
