"""A manifest as values and as a file: which tokens have KV, in which blocks, until when. Pure; docs/formats.md.

The file is safetensors with one U32 tensor `token_ids`; all else is in its metadata, with a checksum over both. The
checksums of the block files are in the supplement of the tensor's entry, with a checksum of its own over them and the
first: what release 0.1.0 wrote has none, and what it reads may have one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import xxhash

from contextcache.errors import CorruptBlock
from contextcache.model import CACHE_REF_PATTERN, Manifest
from kv_sidecar.block_file import BlockMeta
from kv_sidecar.block_id import chain_block_ids, pack_token_ids, unpack_token_ids
from kv_sidecar.block_key import BlockKey
from kv_sidecar.safetensors_header import TensorHeader, decode_header, encode_header

FORMAT = "context-cache-manifest-1"
TENSOR = "token_ids"
MAX_WORLD_SIZE = 1024
_CHECKSUM = re.compile(r"[0-9a-f]{32}", re.ASCII)


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


def block_checksum(manifest: Manifest, block_index: int, rank: int) -> str:
    """Return the checksum the manifest vouches for at a position; empty when it vouches for none."""
    if not manifest.block_checksums:
        return ""
    return manifest.block_checksums[rank * num_files(manifest) + block_index]


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
    supplement = {"block_checksums": " ".join(manifest.block_checksums)} if manifest.block_checksums else {}
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
    if not is_ours or metadata.get("format") != FORMAT:
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
    return replace(manifest, block_checksums=_block_checksums(dict(header.supplement), checksum, manifest))


def check_block_checksums(manifest: Manifest) -> None:
    """Raise CorruptBlock unless there is a checksum for every file, or for none."""
    found = manifest.block_checksums
    if not all(_CHECKSUM.fullmatch(checksum) for checksum in found):
        raise CorruptBlock("the manifest's block checksums are none")
    if found and len(found) != num_files(manifest) * manifest.world_size:
        raise CorruptBlock("the manifest does not vouch for every block")


def manifest_checksum(metadata: Mapping[str, str], tensor: bytes) -> str:
    r"""Return xxh3-128 (hex) over `key\0value\0` of all metadata in the order of their keys, then the tensor."""
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


def _block_checksums(supplement: dict[str, str], manifest_s: str, manifest: Manifest) -> tuple[str, ...]:
    """Return the checksums of the files; `manifest_s`: the manifest's own. What else a later release says is left."""
    if not supplement:
        return ()
    checksum = supplement.pop("checksum", "")
    if manifest_checksum(supplement, manifest_s.encode()) != checksum:
        raise CorruptBlock("the checksum of the manifest's supplement is wrong")
    listed = supplement.get("block_checksums", "")
    found = tuple(listed.split(" ")) if listed else ()
    check_block_checksums(replace(manifest, block_checksums=found))
    return found


def _manifest_of(metadata: Mapping[str, str], token_ids: tuple[int, ...]) -> Manifest:
    block_tokens, world_size = int(metadata["block_tokens"]), int(metadata["world_size"])
    if block_tokens < 1 or not 1 <= world_size <= MAX_WORLD_SIZE or not token_ids:
        raise ValueError("numbers that cannot be")
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
        world_size=world_size,
        expires_at_ms=int(metadata["expires_at_ms"]),
        size_bytes=int(metadata["size_bytes"]),
    )
