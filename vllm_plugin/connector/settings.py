"""The connector's settings: a frozen value made from vLLM's `kv_connector_extra_config`. Reads nothing else.

Given as JSON inside `--kv-transfer-config`; unknown keys are refused, so that a misspelt one is not ignored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WEIGHTS_UNNAMED = "0"
"""`weights_epoch` of weights that the operator gave no name."""

CODEC_NONE = "none"
_CODECS = (CODEC_NONE, "q8", "q4")
_EARLY_SAVES = ("auto", "on", "off")


@dataclass(frozen=True, slots=True)
class ConnectorSettings:
    """One field per key; the comment under each says unit and reason."""

    sidecar: str
    """gRPC address of the kv-sidecar, such as `unix:///run/context-cache/sidecar.sock`. Required."""
    secret_file: str
    """File with the deployment's secret: only tokens signed with it are obeyed. Required."""
    weights_epoch: str = WEIGHTS_UNNAMED
    """Operator's name for the weights. Needed only where they cannot be looked into (loaded from an object store, by
    a plugin): without it their KV does not outlive the engine. Change it when they change."""
    staging_limit_bytes: int = 1 << 30
    """Bytes copied out of the engine and not yet taken by the sidecar, in its arena or in our memory. 1 GiB is one
    context of 8 192 tokens of an 8-billion-parameter model in bf16; a larger one goes by pieces, and the engine's
    blocks are held meanwhile."""
    early_saves: str = "auto"
    """Send full blocks while a request runs: `on`, `off`, or `auto`, which is `on` unless the engine computes on the
    CPU, whose cores the copying and writing would take (a create of 5 800 tokens took a tenth longer on two)."""
    codec: str = CODEC_NONE
    """How KV is stored: `none`, as it is; `q8`, 8.5 bits a number; `q4`, 4.5 bits. What is restored then differs a
    little from what was computed (docs/project/codec.md), for half or a quarter of the bytes of bf16 and some CPU time.
    Changing it begins anew: KV stored in another way is a miss."""
    manifest_deadline_ms: int = 1_000
    """Longest wait for a manifest before the request is computed instead. A lookup takes milliseconds, a dead
    sidecar refuses at once; only one that hangs, on a machine busy beyond its cores, comes near. One that stayed
    silent is waited for a tenth of this until it has answered again."""
    own_save_wait_ms: int = 2_000
    """Longest wait for a manifest this engine is itself still saving: the next turn may come before the seal."""
    pull_wait_ms: int = 2_000
    """Longest wait for KV that the sidecar is pulling from another pod, from the first time it says so. What takes
    longer is computed instead, behind the tokens that have come, and the turn after starts from it."""
    prepare_deadline_ms: int = 2_000
    """Longest time a finished request's blocks are held, plus the allowance of the next field, before they are freed
    unsaved; and the longest time the sidecar may take nothing meanwhile."""
    save_bytes_per_ms_min: int = 100_000
    """Slowest rate a save may have: each so many bytes allow one more ms (100 MB/s, a slow disk). Counts only for
    contexts larger than the staging: what fits is copied at once."""
    save_deadline_ms: int = 30_000
    """Longest time for one call that hands over some 64 MiB, or seals, after a save's blocks were copied."""
    load_deadline_ms: int = 5_000
    """Longest time for one load, plus the allowance of the next field; then the request is computed instead."""
    load_bytes_per_ms_min: int = 100_000
    """Slowest rate a load may have: each so many bytes allow one more ms (100 MB/s, a slow disk)."""
    match_tokens_min: int = 64
    """Tokens that KV of anything else of the tenant's must bring beyond what a turn names, for it to be looked for: two
    prompts of one template always share a few."""
    match_prefix: bool = True
    """Start new contexts, and those whose own KV is gone, from whatever the tenant has."""
    load_always_ms: int = 20
    """A load that is expected to take no longer is made; a longer one where computing is expected to take longer still.
    What short ones take is chance. Raise it to spare the GPU, where a first token may come later for it: an H200
    computes 900 tokens of an 8B model in 20 ms."""
    lookup_threads: int = 16
    """Manifest questions in flight at once. One that waits for a save or a pull keeps its thread: there are more of
    them than a sidecar has pulls at once, so that those waits hold nobody else up."""
    load_threads: int = 2
    """Loads copied at once; one fills about one memory channel."""
    save_threads: int = 4
    """Saves gathered at once, and as many handed over at once; small ones get past large ones that wait for room."""
    queue_limit: int = 64
    """Loads, saves and questions waiting, each; beyond it a load fails over to computing and a save is skipped."""
    prefault_kv_cache: bool = True
    """Touch a CPU engine's KV memory at its start, not in the first restores (copies/layout.py); its whole KV space is
    then resident at once. Nothing happens on GPUs."""
    traces_endpoint: str = ""
    """OTLP/gRPC address of a trace collector, http://host:4317 or https://…; empty: no spans of loads and saves.
    Whether a turn is traced is decided where it came in."""
    shutdown_deadline_ms: int = 2_000
    """Longest time `shutdown` waits for saves to be sealed and threads to end. vLLM kills a worker that takes longer
    than VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS (5)."""

    @classmethod
    def from_extra_config(cls, extra: Mapping[str, Any]) -> ConnectorSettings:
        """Return the settings in `kv_connector_extra_config`. Raises ValueError naming the key at fault."""
        fields = {field.name: field for field in dataclasses.fields(cls)}
        if unknown := sorted(set(extra) - set(fields)):
            raise ValueError(f"kv_connector_extra_config has unknown keys: {', '.join(unknown)}")
        for name in ("sidecar", "secret_file"):
            if not extra.get(name):
                raise ValueError(f"kv_connector_extra_config needs {name!r}")
        for name, value in extra.items():
            wanted = str(fields[name].type)
            if type(value).__name__ != wanted:
                raise ValueError(f"kv_connector_extra_config {name!r} must be of type {wanted}")
            if wanted == "int" and value < 1:
                raise ValueError(f"kv_connector_extra_config {name!r} must be 1 or more")
        if extra.get("early_saves", "auto") not in _EARLY_SAVES:
            raise ValueError(f"kv_connector_extra_config 'early_saves' must be one of {', '.join(_EARLY_SAVES)}")
        if extra.get("codec", CODEC_NONE) not in _CODECS:
            raise ValueError(f"kv_connector_extra_config 'codec' must be one of {', '.join(_CODECS)}")
        return cls(**extra)

    def sends_ahead(self, device: str) -> bool:
        """Return whether full blocks are sent while a request runs, on an engine that computes on `device`."""
        return self.early_saves == "on" or (self.early_saves == "auto" and device != "cpu")

    @property
    def secret_path(self) -> Path:
        """The secret file as a path."""
        return Path(self.secret_file)
