"""A manifest as values and as a file: which tokens have KV, in which blocks, until when. Pure; docs/formats.md.

The file is safetensors with one U32 tensor `token_ids`; all else is in its metadata, with a checksum over both.
"""

from __future__ import annotations

from collections.abc import Mapping

import xxhash

from contextcache.errors import CorruptBlock
from contextcache.model import CACHE_REF_PATTERN, Manifest
from kv_sidecar.block_file import BlockMeta
from kv_sidecar.block_id import chain_block_ids, pack_token_ids, unpack_token_ids
from kv_sidecar.block_key import BlockKey
from kv_sidecar.safetensors_header import TensorHeader, decode_header, encode_header

FORMAT = "context-cache-manifest-1"
TENSOR = "token_ids"


def num_files(manifest: Manifest) -> int:
    """Return how many block files one rank has: whole blocks, and the tail if there is one."""
    return len(manifest.block_ids) + (1 if manifest.tail_tokens else 0)


def block_key(manifest: Manifest, block_index: int, rank: int) -> BlockKey:
    """Return where the file at a position belongs; the number of whole blocks names the tail."""
    if block_index < len(manifest.block_ids):
        return BlockKey("block", manifest.block_ids[block_index], rank)
    return BlockKey("tail", manifest.cache_ref, rank)


def block_meta(manifest: Manifest, block_index: int, rank: int) -> BlockMeta:
    """Return what the block file at a position must say about itself."""
    key = block_key(manifest, block_index, rank)
    start = block_index * manifest.block_tokens
    return BlockMeta(
        kind=key.kind,
        name=key.name,
        parent=manifest.block_ids[block_index - 1] if block_index else "",
        tenant=manifest.tenant,
        fingerprint=manifest.fingerprint,
        rank=rank,
        token_ids=manifest.token_ids[start : start + manifest.block_tokens],
    )


def rank_keys(manifest: Manifest, rank: int) -> tuple[BlockKey, ...]:
    """Return the keys of all files of one rank, in order."""
    return tuple(block_key(manifest, index, rank) for index in range(num_files(manifest)))


def all_keys(manifest: Manifest) -> tuple[BlockKey, ...]:
    """Return the keys of all files of all ranks."""
    return tuple(key for rank in range(manifest.world_size) for key in rank_keys(manifest, rank))


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the manifest's file."""
    tensor = pack_token_ids(manifest.token_ids)
    metadata = _metadata(manifest)
    metadata["checksum"] = manifest_checksum(metadata, tensor)
    return encode_header(TensorHeader(TENSOR, "U32", (len(manifest.token_ids),), metadata)) + tensor


def decode_manifest(file: bytes | memoryview) -> Manifest:
    """Return the manifest in a file. Raises CorruptBlock when anything in it does not fit the rest."""
    view = memoryview(file)
    header, start = decode_header(view)
    tensor = bytes(view[start:])
    metadata = dict(header.metadata)
    if header.tensor != TENSOR or metadata.get("format") != FORMAT or header.dtype != "U32":
        raise CorruptBlock("the file is no manifest of this version")
    checksum = metadata.pop("checksum", "")
    if manifest_checksum(metadata, tensor) != checksum:
        raise CorruptBlock("the manifest's checksum is wrong")
    try:
        manifest = _manifest_of(metadata, unpack_token_ids(tensor))
    except (KeyError, ValueError, ZeroDivisionError) as exc:
        raise CorruptBlock("the manifest's metadata is incomplete") from exc
    if _metadata(manifest) != metadata or not CACHE_REF_PATTERN.fullmatch(manifest.cache_ref):
        raise CorruptBlock("the manifest's blocks are not those of its tokens")
    return manifest


def manifest_checksum(metadata: Mapping[str, str], tensor: bytes) -> str:
    r"""Return xxh3-128 (hex) over `key\0value\0` of all other metadata in the order of their keys, then the tensor."""
    digest = xxhash.xxh3_128()
    for key in sorted(metadata):
        digest.update(f"{key}\0{metadata[key]}\0".encode())
    digest.update(tensor)
    checksum: str = digest.hexdigest()
    return checksum


def _metadata(manifest: Manifest) -> dict[str, str]:
    return {
        "format": FORMAT,
        "cache_ref": manifest.cache_ref,
        "tenant": manifest.tenant,
        "session_id": manifest.session_id,
        "fingerprint": manifest.fingerprint,
        "block_tokens": str(manifest.block_tokens),
        "block_ids": " ".join(manifest.block_ids),
        "world_size": str(manifest.world_size),
        "expires_at_ms": str(manifest.expires_at_ms),
        "size_bytes": str(manifest.size_bytes),
    }


def _manifest_of(metadata: Mapping[str, str], token_ids: tuple[int, ...]) -> Manifest:
    block_tokens = int(metadata["block_tokens"])
    fingerprint, tenant = metadata["fingerprint"], metadata["tenant"]
    return Manifest(
        cache_ref=metadata["cache_ref"],
        tenant=tenant,
        session_id=metadata["session_id"],
        fingerprint=fingerprint,
        token_ids=token_ids,
        block_tokens=block_tokens,
        block_ids=chain_block_ids(fingerprint, tenant, token_ids, block_tokens=block_tokens),
        tail_tokens=len(token_ids) % block_tokens,
        world_size=int(metadata["world_size"]),
        expires_at_ms=int(metadata["expires_at_ms"]),
        size_bytes=int(metadata["size_bytes"]),
    )
