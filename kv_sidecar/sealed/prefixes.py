"""Index of the stored contexts of a tenant that begin like a prompt. Pure; one event loop.

The contexts of a tenant under one fingerprint are sorted by the chain of their whole blocks, then by their tail. The
contexts that begin most like a prompt are therefore neighbours of the place that the prompt would have. A look-up is a
binary search. A context costs 8 bytes a block and 4 a token of its tail, shared or not.

A block counts with the first 8 bytes of its id. Two that are equal by chance cost a load that is not made: the engine
compares all tokens with the manifest's.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from contextcache.errors import InvalidRequest
from contextcache.model import CacheRef, Manifest, SessionId, TenantId
from contextcache.names import check_tenant
from kv_sidecar.format.ids import TOKEN_BYTES, chain_block_ids, chain_packed, check_fingerprint_text

ID_BYTES = 8
"""Leading bytes of a block's id that the index compares."""
SHORTER = 64
"""Blocks back that a whole context is looked for, where nothing else can be gone on from."""
NEIGHBOURS = 8
"""Contexts that go on differently in the middle of a block, of which that block is looked into."""
_LAST = b"\xff" * ID_BYTES
"""Upper bound of ids: sorts behind all but one in 2**64."""

Entry: TypeAlias = tuple[bytes, bytes, CacheRef]
"""Chain, tail (tokens as big-endian u32, so that they sort as they compare), name."""


@dataclass(frozen=True, slots=True)
class Beginning:
    """Where a context lies among others."""

    tenant: TenantId
    fingerprint: str
    block_tokens: int
    chain: bytes
    tail: bytes
    is_plain: bool
    """Whether any number of its tokens can be gone on from; else perhaps only all of them."""

    def begins(self, manifest: Manifest) -> bool:
        """Return whether a context begins with, or is, all of this one."""
        tokens, whole = manifest.token_ids, len(self.chain) // ID_BYTES * self.block_tokens
        other = beginning_of(manifest)
        return (
            (self.tenant, self.fingerprint, self.block_tokens) == (other.tenant, other.fingerprint, other.block_tokens)
            and other.chain.startswith(self.chain)
            and _packed(tokens[whole : whole + self.block_tokens]).startswith(self.tail)
        )


def beginning_of(manifest: Manifest) -> Beginning:
    """Return where a manifest lies: by its first group that has all tokens, else by its smallest blocks."""
    whole = next((i for i, group in enumerate(manifest.groups) if group.kind == "full_attention"), None)
    if whole is not None:
        size = manifest.groups[whole].block_tokens
        names = [file.name for file in manifest.files if file.group == whole and file.kind == "block"]
    else:
        size = min(group.block_tokens for group in manifest.groups)
        names = list(chain_block_ids(manifest.fingerprint, manifest.tenant, manifest.token_ids, block_tokens=size))
    return Beginning(
        tenant=manifest.tenant,
        fingerprint=manifest.fingerprint,
        block_tokens=size,
        chain=_chain(names),
        tail=_packed(manifest.token_ids[len(names) * size :]),
        is_plain=all(group.kind == "full_attention" for group in manifest.groups),
    )


@dataclass(frozen=True, slots=True)
class Prompt:
    """Prompt of a look-up, hashed once for each size of block, off the event loop."""

    tenant: TenantId
    fingerprint: str
    token_ids: bytes
    """As little-endian u32."""
    chains: dict[int, bytes]

    @property
    def num_tokens(self) -> int:
        """All of them."""
        return len(self.token_ids) // TOKEN_BYTES

    def behind(self, num_tokens: int, count: int) -> bytes:
        """Return the next tokens, as they lie in a tail."""
        return np.frombuffer(self.token_ids, "<u4")[num_tokens : num_tokens + count].astype(">u4").tobytes()


def prompt_of(tenant: TenantId, fingerprint: str, token_ids: bytes, sizes: tuple[int, ...]) -> Prompt:
    """Hash a prompt. `token_ids`: little-endian u32."""
    chains = {size: _chain(chain_packed(fingerprint, tenant, token_ids, block_tokens=size)) for size in sizes}
    return Prompt(tenant, fingerprint, token_ids, chains)


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


@dataclass(frozen=True, slots=True)
class Found:
    """A context that begins like a prompt."""

    cache_ref: CacheRef
    num_tokens: int
    """That both begin with, at least."""
    is_whole: bool = False
    """Whether the prompt begins with all of it."""
    goes_on: bool = False
    """Whether it has a whole block behind these tokens, of which the prompt may share some: its manifest knows."""


class PrefixIndex:
    """Sealed contexts by how they begin."""

    def __init__(self) -> None:
        self._scopes: dict[tuple[TenantId, str], dict[int, list[Entry]]] = {}
        """Tenant and fingerprint → tokens in a block → its contexts, in order."""
        self._uneven: set[tuple[TenantId, str]] = set()
        """Where some lengths of a context cannot be gone on from."""

    def sizes(self, tenant: TenantId, fingerprint: str) -> tuple[int, ...]:
        """Return the sizes of block that a prompt has to be hashed for; none: there is nothing to find."""
        return tuple(self._scopes.get((tenant, fingerprint), ()))

    def add(self, cache_ref: CacheRef, at: Beginning) -> None:
        """Add a context."""
        scope = (at.tenant, at.fingerprint)
        insort(self._scopes.setdefault(scope, {}).setdefault(at.block_tokens, []), (at.chain, at.tail, cache_ref))
        if not at.is_plain:
            self._uneven.add(scope)

    def remove(self, cache_ref: CacheRef, at: Beginning) -> None:
        """Remove a context that was added."""
        scope = (at.tenant, at.fingerprint)
        entries = self._scopes[scope][at.block_tokens]
        place = bisect_left(entries, (at.chain, at.tail, cache_ref))
        assert entries[place][2] == cache_ref, "what was added lies where it was put"
        del entries[place]
        if not entries:
            del self._scopes[scope][at.block_tokens]
        if not self._scopes[scope]:
            del self._scopes[scope]
            self._uneven.discard(scope)

    def equals(self, at: Beginning) -> list[CacheRef]:
        """Return contexts of exactly these tokens, not all of very many."""
        entries = self._scopes.get((at.tenant, at.fingerprint), {}).get(at.block_tokens, [])
        found: list[CacheRef] = []
        place = bisect_left(entries, (at.chain, at.tail, ""))
        while place < len(entries) and len(found) < SHORTER and entries[place][:2] == (at.chain, at.tail):
            found.append(entries[place][2])
            place += 1
        return found

    def find(self, prompt: Prompt, is_live: Callable[[CacheRef], bool]) -> list[Found]:
        """Return live contexts that may begin most like a prompt, the surest first.

        The search skips at most `NEIGHBOURS` dead contexts in one place: the collector removes them soon.
        """
        scope = (prompt.tenant, prompt.fingerprint)
        found: dict[CacheRef, Found] = {}
        for size, entries in self._scopes.get(scope, {}).items():
            if size not in prompt.chains:
                continue
            search = _Search(entries, prompt, size, is_live)
            for one in search.nearest(with_whole=scope in self._uneven):
                known = found.get(one.cache_ref)
                if known is None or known.num_tokens < one.num_tokens:
                    found[one.cache_ref] = one
        return sorted(found.values(), key=lambda one: one.num_tokens, reverse=True)


class _Search:
    """One look into one sorted list."""

    def __init__(self, entries: list[Entry], prompt: Prompt, size: int, is_live: Callable[[CacheRef], bool]) -> None:
        self._entries = entries
        self._is_live = is_live
        self._prompt = prompt
        self._size = size
        self._chain = prompt.chains[size]

    def nearest(self, *, with_whole: bool) -> Iterator[Found]:
        """Yield the contexts that share the most blocks: by their tails, then by the block that follows."""
        depth = self._depth()
        yield from self._by_tail(depth)
        yield from self._by_next_block(depth)
        for before in range(depth - 1, max(depth - 1 - SHORTER, -1), -1) if with_whole else ():
            # The longest context that the prompt begins with, all of it: a state, and perhaps a window, serves no less.
            shorter = [one for one in self._by_tail(before) if one.is_whole]
            yield from shorter
            if shorter:
                return

    def _depth(self) -> int:
        """Return how many blocks the prompt shares with anything."""
        place = bisect_left(self._entries, (self._chain,))
        beside = self._entries[max(place - 1, 0) : place + 1]
        return max((common(entry[0], self._chain) // ID_BYTES for entry in beside), default=0)

    def _by_tail(self, depth: int) -> Iterator[Found]:
        """Yield the contexts of exactly these blocks whose tails are most like the following tokens of the prompt."""
        prefix, whole = self._chain[: depth * ID_BYTES], depth * self._size
        follows = self._prompt.behind(whole, self._size)
        place = bisect_left(self._entries, (prefix, follows))
        before = self._entries[max(place - NEIGHBOURS, 0) : place]
        for beside in (reversed(before), self._entries[place : place + NEIGHBOURS]):
            entry = next((entry for entry in beside if entry[0] == prefix and self._is_live(entry[2])), None)
            if entry is not None:
                shared = common(entry[1], follows) // TOKEN_BYTES
                yield Found(entry[2], whole + shared, is_whole=shared * TOKEN_BYTES == len(entry[1]))

    def _by_next_block(self, depth: int) -> Iterator[Found]:
        """Yield a few of those that go on with a whole block, another each: it may begin like the prompt's.

        Where the prompt ends with these blocks one will do: it has all of it.
        """
        prefix, whole = self._chain[: depth * ID_BYTES], depth * self._size
        goes_on = whole < self._prompt.num_tokens
        place = bisect_left(self._entries, (prefix + b"\0",))
        for _ in range(NEIGHBOURS):
            if place >= len(self._entries) or not self._entries[place][0].startswith(prefix):
                return
            follows = self._entries[place][0][: len(prefix) + ID_BYTES]
            alike = self._entries[place : place + NEIGHBOURS]
            entry = next((e for e in alike if e[0].startswith(follows) and self._is_live(e[2])), None)
            if entry is not None:
                yield Found(entry[2], whole, goes_on=goes_on)
                if not goes_on:
                    return
            place = bisect_left(self._entries, (follows + _LAST,), lo=place)


def common(left: bytes, right: bytes) -> int:
    """Return how many leading bytes are equal."""
    length = min(len(left), len(right))
    if left[:length] == right[:length]:
        return length
    differs = np.frombuffer(left, np.uint8, length) != np.frombuffer(right, np.uint8, length)
    return int(differs.argmax())


def _chain(block_ids: Sequence[str]) -> bytes:
    return bytes.fromhex("".join(name[: 2 * ID_BYTES] for name in block_ids))


def _packed(token_ids: Sequence[int]) -> bytes:
    return np.array(token_ids, dtype=">u4").tobytes()
