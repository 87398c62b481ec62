"""Manifests made to vouch for whatever lies under their names: the one way to have other bytes served."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from kv_sidecar.block_file import read_head
from kv_sidecar.block_key import BlockKey
from kv_sidecar.manifest import all_keys, decode_manifest, encode_manifest

_DIRECTORIES = {"block": "blocks", "tail": "tails"}


def vouch_for_what_lies_there(data_directory: Path) -> int:
    """Rewrite every manifest with the checksums its block files name themselves; return how many changed.

    Only while no sidecar runs over the directory: it knows the checksums since its start.
    """
    changed = 0
    for path in sorted((data_directory / "manifests").glob("*/*.safetensors")):
        manifest = decode_manifest(path.read_bytes())
        checksums = tuple(read_head(_path_of(data_directory, key))[1] for key in all_keys(manifest))
        if checksums != manifest.block_checksums:
            path.write_bytes(encode_manifest(replace(manifest, block_checksums=checksums)))
            changed += 1
    return changed


def _path_of(data_directory: Path, key: BlockKey) -> Path:
    return data_directory / _DIRECTORIES[key.kind] / key.fan_out / key.file_name
