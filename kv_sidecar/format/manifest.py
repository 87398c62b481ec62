"""A manifest as values and as a file (docs/project/formats.md): tokens with KV, their block files, an expiry.

Each run of full attention or of a window is cut where whole blocks end. A piece that fills a block is a *block*, named
by the chain of its tokens, and contexts that begin alike share it. Any other piece is a *tail*: the last tokens, or
the first ones that a window still sees. A state is a tail of exactly the tokens before its end, and is never cut.

The file is safetensors with one U32 tensor `token_ids`; all else is in its metadata, with a checksum over both. The
checksums of the block files are in the supplement of the tensor's entry, with a checksum of its own over them and the
first.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import xxhash

from contextcache.errors import CacheRefNotFound, CorruptBlock, InvalidRequest
from contextcache.model import CacheRef, KVFile, KVGroup, Manifest, Promise, SessionId, TenantId, kv_kind
from contextcache.names import CACHE_REF_PATTERN
from kv_sidecar.format.block_file import BlockMeta, file_meta
from kv_sidecar.format.ids import TOKEN_BYTES, BlockKey, chain_block_ids, chain_packed, pack_token_ids, unpack_token_ids
from kv_sidecar.format.safetensors_header import TensorHeader, decode_header, encode_header

MAX_GROUPS = 64
MAX_RUNS = 4
"""A context's start, its prompt's end and its own, and one to spare."""
_DIGEST = re.compile(r"[0-9a-f]{16}", re.ASCII)


def is_plain(groups: Sequence[KVGroup]) -> bool:
    """Return whether these are the one group of a plain engine."""
    return len(groups) == 1 and not groups[0].digest and groups[0].kind == "full_attention"


def check_groups(groups: Sequence[KVGroup], num_tokens: int, *, block_tokens_min: int = 1) -> None:
    """Raise InvalidRequest for groups that `num_tokens` tokens cannot have, or for smaller blocks than the least."""
    digests = [group.digest for group in groups]
    if not 1 <= len(groups) <= MAX_GROUPS or len(set(digests)) != len(digests):
        raise InvalidRequest(f"groups must have 1 to {MAX_GROUPS} groups with different digests", param="groups")
    if not is_plain(groups) and not all(_DIGEST.fullmatch(digest) for digest in digests):
        raise InvalidRequest("a group's digest must be 16 hex digits", param="groups")
    for group in groups:
        edges = [edge for run in group.runs for edge in run]
        apart = all(left < right for left, right in pairwise(edges))
        if not 1 <= len(group.runs) <= MAX_RUNS or not apart or edges[0] < 0 or edges[-1] != num_tokens:
            raise InvalidRequest("a group's runs must be ascending, separate, and end with the context", param="groups")
        if group.block_tokens < block_tokens_min or group.window < 0:
            raise InvalidRequest("a group's blocks are too small", param="groups")
        if max(group.block_tokens, group.window) > _INT32_MAX:
            raise InvalidRequest("a group's blocks are too large", param="groups")
        if (group.kind == "full_attention" and group.runs != ((0, num_tokens),)) or (
            (group.kind == "sliding_window") != (group.window > 0)
        ):
            raise InvalidRequest("a group's runs or window do not fit its kind", param="groups")


def context_files(
    tail_ref: CacheRef, fingerprint: str, tenant: TenantId, token_ids: Sequence[int], groups: Sequence[KVGroup]
) -> tuple[KVFile, ...]:
    """Return the files of one rank, group by group. `groups` are checked. Raises OverflowError for a token id.

    `tail_ref`: whose tails they are.
    """
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
                    files.append(KVFile(number, "tail", tail_ref, parent, start, stop))
    return tuple(files)


def next_files(
    last: KVFile | None,
    tail_ref: CacheRef,
    fingerprint: str,
    tenant: TenantId,
    packed: bytes,
    *,
    block_tokens: int,
) -> tuple[KVFile, ...]:
    """Return the files of the next packed tokens of a context with one group of full attention. Hashes these alone.

    `last`: the whole block before them; None: they are the first.
    """
    first, parent = (last.end_token, last.name) if last is not None else (0, "")
    files = []
    for name in chain_packed(fingerprint, tenant, packed, block_tokens=block_tokens, parent=parent):
        files.append(KVFile(0, "block", name, parent, first, first + block_tokens))
        first, parent = first + block_tokens, name
    if rest := len(packed) // TOKEN_BYTES % block_tokens:
        files.append(KVFile(0, "tail", tail_ref, parent, first, first + rest))
    return tuple(files)


def with_files(manifest: Manifest) -> Manifest:
    """Return a manifest that came without its files with them. Raises InvalidRequest."""
    return replace(manifest, files=_files_of(manifest))


def _files_of(manifest: Manifest) -> tuple[KVFile, ...]:
    check_groups(manifest.groups, len(manifest.token_ids))
    return context_files(
        manifest.tail_ref or manifest.cache_ref,
        manifest.fingerprint,
        manifest.tenant,
        manifest.token_ids,
        manifest.groups,
    )


def first_blocks(
    manifest: Manifest, num_tokens: int, *, cache_ref: CacheRef, session_id: SessionId, expires_at_ms: int
) -> Manifest:
    """Return a manifest of the first tokens, at most `num_tokens`, in files that the other one has too.

    All of it, or whole blocks. Raises CacheRefNotFound where there is none: a window or a state is of one end of a
    context only.
    """
    size = math.lcm(*(group.block_tokens for group in manifest.groups))
    is_all = num_tokens >= len(manifest.token_ids)
    end = len(manifest.token_ids) if is_all else num_tokens // size * size
    if not end or any(group.kind != "full_attention" for group in manifest.groups):
        raise CacheRefNotFound("no prefix of this KV is complete")
    cut = replace(
        manifest,
        cache_ref=cache_ref,
        session_id=session_id,
        token_ids=manifest.token_ids[:end],
        groups=tuple(replace(group, runs=((0, end),)) for group in manifest.groups),
        expires_at_ms=expires_at_ms,
        size_bytes=manifest.size_bytes * end // len(manifest.token_ids),
        block_checksums=(),
        tail_ref=(manifest.tail_ref or manifest.cache_ref) if is_all else "",
    )
    return with_files(cut)


def restorable_tokens(manifest: Manifest, limit: int) -> int:
    """Return the most tokens, `limit` at most, after which every group has all that the next token needs; 0: none."""
    possible = [(1, limit)]
    for group in manifest.groups:
        spans = _servable(group)
        possible = [(max(a, c), min(b, d)) for a, b in possible for c, d in spans if max(a, c) <= min(b, d)]
    return max((last for _, last in possible), default=0)


def _servable(group: KVGroup) -> list[tuple[int, int]]:
    """Return the lengths that can be continued from the KV of a group, as (first, last), ascending.

    The token after them sees a whole window, whose first block must be there. A state serves its length alone.
    """
    if group.kind == "state":
        return [(end, end) for _, end in group.runs]
    return [(first + group.window - 1 if first and group.window else 1, end) for first, end in group.runs]


FORMAT = "context-cache-manifest-2"
FORMAT_FORK = "context-cache-manifest-3"
"""Format of a fork: format 2 plus the owner of its tails. A reader of format 2 would look for wrong tails."""
TENSOR = "token_ids"
MAX_WORLD_SIZE = 1024
_INT32_MAX, _INT64_MAX = 2**31 - 1, 2**63 - 1
"""Maximum integers on the wire: int32 for a group's sizes, int64 for times and bytes."""
_CHECKSUM = re.compile(r"[0-9a-f]{32}", re.ASCII)


def check_rank(rank: int, world_size: int) -> None:
    """Raise InvalidRequest for a rank that no engine has."""
    if not 0 <= rank < world_size <= MAX_WORLD_SIZE:
        raise InvalidRequest(f"rank must be below world_size, and world_size at most {MAX_WORLD_SIZE}", param="rank")


def num_files(manifest: Manifest) -> int:
    """Return how many block files one rank has."""
    return len(manifest.files)


def block_key(manifest: Manifest, block_index: int, rank: int) -> BlockKey:
    """Return where the file at a position belongs."""
    file = manifest.files[block_index]
    return file_key(file, manifest.groups[file.group].digest, rank)


def file_key(file: KVFile, group: str, rank: int) -> BlockKey:
    """Return where a file of a context belongs. `group`: digest of its group."""
    first_token = file.first_token if file.kind == "tail" and group else 0
    return BlockKey(file.kind, file.name, rank, group, first_token)


def block_meta(manifest: Manifest, block_index: int, rank: int) -> BlockMeta:
    """Return the metadata that the block file at a position must have."""
    file = manifest.files[block_index]
    return file_meta(
        file,
        group=manifest.groups[file.group].digest,
        tenant=manifest.tenant,
        fingerprint=manifest.fingerprint,
        rank=rank,
        token_ids=manifest.token_ids[file.first_token : file.end_token],
    )


def block_checksum(manifest: Manifest, block_index: int, rank: int) -> str:
    """Return the checksum the manifest vouches for at a position; empty when it vouches for none."""
    if not manifest.block_checksums:
        return ""
    return manifest.block_checksums[rank * num_files(manifest) + block_index]


def rank_keys(manifest: Manifest, rank: int) -> tuple[BlockKey, ...]:
    """Return the keys of all files of one rank, in order."""
    digests = [group.digest for group in manifest.groups]
    return tuple([file_key(file, digests[file.group], rank) for file in manifest.files])


def all_keys(manifest: Manifest) -> tuple[BlockKey, ...]:
    """Return the keys of all files of all ranks."""
    return tuple([key for rank in range(manifest.world_size) for key in rank_keys(manifest, rank)])


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the manifest's file."""
    tensor = pack_token_ids(manifest.token_ids)
    metadata = _metadata(manifest)
    metadata["checksum"] = manifest_checksum(metadata, tensor)
    supplement = {"block_checksums": " ".join(manifest.block_checksums)} if manifest.block_checksums else {}
    if manifest.interrupted:
        supplement["interrupted"] = "true"
    if manifest.promise.until_ms:
        supplement["promised_until_ms"] = str(manifest.promise.until_ms)
        supplement["pinned"] = str(manifest.promise.pinned).lower()
    if supplement:
        supplement["checksum"] = manifest_checksum(supplement, metadata["checksum"].encode())
    header = TensorHeader(TENSOR, "U32", (len(manifest.token_ids),), metadata, supplement)
    return encode_header(header) + tensor


def decode_manifest(file: bytes | memoryview) -> Manifest:
    """Return the manifest in a file. Raises CorruptBlock when anything in it does not fit the rest."""
    view = memoryview(file)
    header, start = decode_header(view)
    tensor = bytes(view[start:])
    metadata = dict(header.metadata)
    is_ours = (header.tensor, header.dtype, len(header.shape)) == (TENSOR, "U32", 1)
    if not is_ours or metadata.get("format") not in {FORMAT, FORMAT_FORK}:
        raise CorruptBlock("the file is not a manifest of this version")
    checksum = metadata.pop("checksum", "")
    if manifest_checksum(metadata, tensor) != checksum:
        raise CorruptBlock("the manifest's checksum is wrong")
    try:
        manifest = _manifest_of(metadata, unpack_token_ids(tensor))
        files, again = _files_of(manifest), _metadata(manifest)
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError, InvalidRequest) as exc:
        raise CorruptBlock("the manifest's metadata is incomplete") from exc
    refs = [manifest.cache_ref, *([manifest.tail_ref] if metadata["format"] == FORMAT_FORK else [])]
    if again != metadata or not all(map(CACHE_REF_PATTERN.fullmatch, refs)):
        raise CorruptBlock("the manifest's blocks do not match its tokens")
    supplement = _checked(dict(header.supplement), checksum)
    listed = supplement.get("block_checksums", "")
    manifest = replace(
        manifest,
        files=files,
        block_checksums=tuple(listed.split(" ")) if listed else (),
        interrupted=supplement.get("interrupted") == "true",
        promise=_promise(supplement),
    )
    check_block_checksums(manifest)
    return manifest


def _promise(supplement: Mapping[str, str]) -> Promise:
    """Return the promise in a supplement whose checksum is right."""
    until = supplement.get("promised_until_ms", "")
    until_ms = int(until) if until.isascii() and until.isdecimal() and len(until) < len(str(_INT64_MAX)) else 0
    return Promise(until_ms, pinned=until_ms > 0 and supplement.get("pinned") == "true")


def check_block_checksums(manifest: Manifest) -> None:
    """Raise CorruptBlock unless there is a checksum for every file, or for none."""
    found = manifest.block_checksums
    if not all(_CHECKSUM.fullmatch(checksum) for checksum in found):
        raise CorruptBlock("the manifest's block checksums are malformed")
    if found and len(found) != num_files(manifest) * manifest.world_size:
        raise CorruptBlock("the manifest lacks the checksum of a block")


def manifest_checksum(metadata: Mapping[str, str], tensor: bytes) -> str:
    r"""Return xxh3-128 (hex) over `key\0value\0` of all metadata in the order of their keys, then the tensor."""
    digest = xxhash.xxh3_128()
    for key in sorted(metadata):
        digest.update(f"{key}\0{metadata[key]}\0".encode())
    digest.update(tensor)
    checksum: str = digest.hexdigest()
    return checksum


def _metadata(manifest: Manifest) -> dict[str, str]:
    groups = [
        {"block_tokens": group.block_tokens, "digest": group.digest, "kind": group.kind, "runs": group.runs}
        | ({"window": group.window} if group.window else {})
        for group in manifest.groups
    ]
    tails = {"format": FORMAT_FORK, "tail_ref": manifest.tail_ref} if manifest.tail_ref else {"format": FORMAT}
    return {
        **tails,
        "cache_ref": manifest.cache_ref,
        "tenant": manifest.tenant,
        "session_id": manifest.session_id,
        "fingerprint": manifest.fingerprint,
        "world_size": str(manifest.world_size),
        "expires_at_ms": str(manifest.expires_at_ms),
        "size_bytes": str(manifest.size_bytes),
        "groups": json.dumps(groups, sort_keys=True, separators=(",", ":")),
    }


def _checked(supplement: dict[str, str], manifest_s: str) -> dict[str, str]:
    """Return a supplement without its checksum; `manifest_s`: the manifest's own. Further keys have no meaning."""
    if supplement and supplement.pop("checksum", "") != manifest_checksum(supplement, manifest_s.encode()):
        raise CorruptBlock("the manifest's supplement has a wrong checksum")
    return supplement


def _manifest_of(metadata: Mapping[str, str], token_ids: tuple[int, ...]) -> Manifest:
    world_size = int(metadata["world_size"])
    expires_at_ms, size_bytes = int(metadata["expires_at_ms"]), int(metadata["size_bytes"])
    is_sent = 0 <= expires_at_ms <= _INT64_MAX and 0 <= size_bytes <= _INT64_MAX
    if not 1 <= world_size <= MAX_WORLD_SIZE or not token_ids or not is_sent:
        raise ValueError("a number is out of range")
    return Manifest(
        cache_ref=metadata["cache_ref"],
        tenant=metadata["tenant"],
        session_id=metadata["session_id"],
        fingerprint=metadata["fingerprint"],
        token_ids=token_ids,
        groups=tuple(_group_of(found) for found in json.loads(metadata["groups"])),
        files=(),
        world_size=world_size,
        expires_at_ms=expires_at_ms,
        size_bytes=size_bytes,
        tail_ref=metadata["tail_ref"] if metadata["format"] == FORMAT_FORK else "",
    )


def _group_of(found: dict[str, Any]) -> KVGroup:
    runs = tuple((int(first), int(end)) for first, end in found["runs"])
    kind = kv_kind(found["kind"])
    return KVGroup(kind, int(found["block_tokens"]), runs, int(found.get("window", 0)), found["digest"])
