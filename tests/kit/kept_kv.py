"""What a stack's first sidecar keeps of plain requests, as its disk says."""

from __future__ import annotations

from collections.abc import Sequence

from contextcache.model import Manifest
from contextcache.names import KEPT_PREFIX
from deploy.local.state import API_KEYS
from kv_sidecar.format.manifest import decode_manifest
from tests.kit.caller import Caller
from tests.kit.stack import Stack
from tests.kit.until import wait_until


def kill_and_start(stack: Stack) -> None:
    stack.kill("engine")
    stack.kill("sidecar")
    stack.mend()


def kept_manifests(stack: Stack) -> list[Manifest]:
    files = (stack.data() / "manifests").glob("*/*.safetensors")
    manifests = [decode_manifest(file.read_bytes()) for file in files]
    return [manifest for manifest in manifests if manifest.session_id.startswith(KEPT_PREFIX)]


def kept_tokens(stack: Stack) -> list[int]:
    return [len(manifest.token_ids) for manifest in kept_manifests(stack)]


def forgotten(stack: Stack, caller: Caller) -> bool:
    """Delete what is kept, and return whether nothing is; what was being saved comes a moment later."""
    for kept in caller.http.get("/v1/context", params={"kind": "kept", "limit": 100}).json()["data"]:
        caller.http.delete(f"/v1/context/{kept['id']}")
    return kept_tokens(stack) == []


def forget_everything(stack: Stack) -> None:
    """Delete what each tenant has, until no sidecar's disk holds KV: what others' tests saved late as well."""
    callers = [Caller(stack, key) for key in API_KEYS]

    def left() -> dict[str, int]:
        for caller in callers:
            forgotten(stack, caller)
            caller.delete_all()
        return stack.stored_files()

    wait_until(left, what="nothing is stored", is_so=lambda files: not files, interval_s=0.2)
    for caller in callers:
        caller.close()


def common(left: Sequence[int], right: Sequence[int]) -> int:
    """Return how many tokens two prompts begin with alike."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))
