"""Which block files a context has: what its tokens and groups come to. Pure; the same in engine and sidecar.

Each run of full attention or of a window is cut where whole blocks end. A piece that fills a block is a *block*, named
by the chain of its tokens, and contexts that begin alike share it. Any other piece is a *tail*: the last tokens, the
first ones that a window still sees, or a state, which holds exactly the tokens before its end and is never cut.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from contextcache.errors import InvalidRequest
from contextcache.model import CacheRef, KVFile, KVGroup, Manifest, TenantId
from kv_sidecar.block_id import chain_block_ids

MAX_GROUPS = 64
MAX_RUNS = 4
"""A context's start, its prompt's end and its own, and one to spare."""
_DIGEST = re.compile(r"[0-9a-f]{16}", re.ASCII)


def is_plain(groups: Sequence[KVGroup]) -> bool:
    """Return whether these are the one group of a plain engine."""
    return len(groups) == 1 and not groups[0].digest and groups[0].kind == "full_attention"


def check_groups(groups: Sequence[KVGroup], num_tokens: int, *, block_tokens_min: int = 1) -> None:
    """Raise InvalidRequest unless groups are what `num_tokens` tokens may have; blocks no smaller than the least."""
    digests = [group.digest for group in groups]
    if not 1 <= len(groups) <= MAX_GROUPS or len(set(digests)) != len(digests):
        raise InvalidRequest("there are groups, each once", param="groups")
    if not is_plain(groups) and not all(_DIGEST.fullmatch(digest) for digest in digests):
        raise InvalidRequest("a group is named by 16 hex digits", param="groups")
    for group in groups:
        edges = [edge for run in group.runs for edge in run]
        apart = all(left < right for left, right in pairwise(edges))
        if not 1 <= len(group.runs) <= MAX_RUNS or not apart or edges[0] < 0 or edges[-1] != num_tokens:
            raise InvalidRequest("runs are ascending and apart, and end with the context", param="groups")
        if group.block_tokens < block_tokens_min or group.window < 0:
            raise InvalidRequest("a group's blocks are too small", param="groups")
        if (group.kind == "full_attention" and group.runs != ((0, num_tokens),)) or (
            (group.kind == "sliding_window") != (group.window > 0)
        ):
            raise InvalidRequest("a group's runs or window are not those of its kind", param="groups")


def context_files(
    cache_ref: CacheRef, fingerprint: str, tenant: TenantId, token_ids: Sequence[int], groups: Sequence[KVGroup]
) -> tuple[KVFile, ...]:
    """Return the files of one rank, group by group. `groups` are checked. Raises OverflowError for a token id."""
    chains = {
        size: chain_block_ids(fingerprint, tenant, token_ids, block_tokens=size)
        for size in {group.block_tokens for group in groups}
    }
    files = []
    for number, group in enumerate(groups):
        chain, size = chains[group.block_tokens], group.block_tokens
        for first, end in group.runs:
            cuts = () if group.kind == "state" else range((first // size + 1) * size, end, size)
            for start, stop in pairwise([first, *cuts, end]):
                index = start // size
                parent = chain[index - 1] if index else ""
                if stop - start == size and group.kind != "state":
                    files.append(KVFile(number, "block", chain[index], parent, start, stop))
                else:
                    files.append(KVFile(number, "tail", cache_ref, parent, start, stop))
    return tuple(files)


def with_files(manifest: Manifest) -> Manifest:
    """Return a manifest that came without its files with them. Raises InvalidRequest."""
    check_groups(manifest.groups, len(manifest.token_ids))
    files = context_files(
        manifest.cache_ref, manifest.fingerprint, manifest.tenant, manifest.token_ids, manifest.groups
    )
    return replace(manifest, files=files)
