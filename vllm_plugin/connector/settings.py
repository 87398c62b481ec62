"""The connector's settings and bounds, made from vLLM's `kv_connector_extra_config`. Reads nothing else.

Settings are JSON inside `--kv-transfer-config`. Unknown keys are refused, so that a misspelt key is noticed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

WEIGHTS_UNNAMED = "0"
"""`weights_epoch` of weights that the operator gave no name."""

CODEC_NONE = "none"
_LONGEST_WAIT_MS = 30_000
"""Longest wait that the sidecar accepts."""
_CODECS = (CODEC_NONE, "q8", "q4")
_CHOICES = {"codec": _CODECS, "early_saves": ("auto", "on", "off")}


class Bounds:
    """Constants: no operator had to change one."""

    __slots__ = ()

    save_bytes_per_ms_min = 100_000
    """Slowest rate of a save: each such number of bytes allows one more ms (100 MB/s, a slow disk). Counts only for
    contexts larger than the arena's room, because smaller contexts are copied at once."""
    load_bytes_per_ms_min = 100_000
    """Slowest rate of a load: each such number of bytes allows one more ms (100 MB/s, a slow disk)."""
    match_tokens_min = 64
    """Minimum tokens that a prefix match in other KV of the tenant must add to the turn's own KV. Two prompts of one
    template always share a few tokens."""
    lookup_threads = 16
    """Look-ups in flight at once. A look-up that waits for a save or a pull keeps its thread. Tenants below their equal
    share of these, and of the three bounds below, have up to as many again (`contextcache.requests.TenantShares`)."""
    load_threads = 2
    """Loads copied at once. One load fills about one memory channel."""
    save_threads = 4
    """Saves gathered at once, and as many handed over at once. Small saves then pass large saves that wait for room."""
    queue_limit = 64
    """Maximum waiting loads, saves and look-ups, each. Beyond it a load becomes a computation and a save is skipped."""
    shutdown_deadline_ms = 2_000
    """Maximum time for which `shutdown` waits for seals and threads. vLLM kills a worker that takes longer than
    VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS (5)."""


@dataclass(frozen=True, slots=True)
class ConnectorSettings(Bounds):
    """One field per key. The text under each says unit and reason."""

    sidecar: str
    """gRPC address of the kv-sidecar, such as `unix:///run/context-cache/sidecar.sock`. Required."""
    secret_file: str
    """File with the deployment's signing secret. The connector obeys only tokens signed with it. Required."""
    weights_epoch: str = WEIGHTS_UNNAMED
    """Operator's name for the weights. Needed only if the connector cannot read them: from an object store, or loaded
    by a plugin. Without it their KV does not outlive the engine. Change it with the weights."""
    early_saves: str = "auto"
    """Send full blocks while a request runs: `on`, `off` or `auto`. `auto` is `off` only if the engine computes on the
    CPU, because the copies take its cores. On two cores a create of 5 800 tokens took a tenth longer."""
    codec: str = CODEC_NONE
    """Encoding of stored KV: `none`, as it is; `q8`, 8.5 bits per number; `q4`, 4.5 bits. `q8` and `q4` take half or a
    quarter of the bytes of bf16 and some CPU time. Restored KV then differs a little from the computed one
    (docs/project/codec.md). KV stored with another codec is a miss."""
    match_prefix: bool = True
    """Start new contexts, and contexts without KV, from the longest prefix in any KV of the tenant."""
    load_always_ms: int = 20
    """A load with a shorter estimate always runs. A longer one runs only if computing is estimated to take longer.
    Short estimates are noise. Raise it to spare the GPU, which may delay first tokens: an H200 computes 900 tokens of
    an 8B model in 20 ms."""
    deadline_factor: int = 1
    """Factor on every deadline of look-ups, loads and saves (docs/operations/waits.md). Raise it on machines where a
    process may stand still for seconds."""
    layout: str = "BLNHC"
    """Layout of KV that a GPU engine is asked for: with this one, a copy moves a block of all layers. Empty: the engine
    chooses, or a connector beside this one, because vLLM ends if two of them ask for different layouts."""
    traces_endpoint: str = ""
    """OTLP/gRPC address of a trace collector, http://host:4317 or https://…. Empty: no spans of loads and saves. The
    first process of a turn decides whether it is traced."""

    @property
    def manifest_deadline_ms(self) -> int:
        """Maximum wait for an answer that the sidecar has at hand. Only a hanging sidecar comes near the limit.

        After one such wait the limit is a tenth, until the sidecar answers again.
        """
        return 1_000 * self.deadline_factor

    @property
    def lookup_wait_ms(self) -> int:
        """Maximum wait in the sidecar for KV that is being saved or pulled. The next turn may come before the seal.

        A prompt that is computed sooner waits no longer than it takes to compute, or `lookup_wait_min_ms`.
        """
        return min(2_000 * self.deadline_factor, _LONGEST_WAIT_MS)

    @property
    def lookup_wait_min_ms(self) -> int:
        """Maximum wait of a prompt that is computed sooner: a busy sidecar may take as long for an answer at hand."""
        return min(500 * self.deadline_factor, self.lookup_wait_ms)

    @property
    def prepare_deadline_ms(self) -> int:
        """Maximum time for which a finished request's blocks wait to be saved, plus the allowance for its bytes.

        Also the maximum time without progress at the sidecar. After it the blocks are freed unsaved.
        """
        return 2_000 * self.deadline_factor

    @property
    def save_deadline_ms(self) -> int:
        """Maximum time of one call that hands over some 64 MiB, or that seals, after a save's blocks were copied."""
        return 30_000 * self.deadline_factor

    @property
    def load_deadline_ms(self) -> int:
        """Maximum time of one load, plus the allowance for its bytes. After it the request is computed."""
        return 5_000 * self.deadline_factor

    @classmethod
    def from_extra_config(cls, extra: Mapping[str, Any]) -> ConnectorSettings:
        """Return the settings in `kv_connector_extra_config`. Raises ValueError naming the key at fault."""
        fields = {field.name: field for field in dataclasses.fields(cls)}
        if unknown := sorted(set(extra) - set(fields)):
            raise ValueError(f"kv_connector_extra_config has unknown keys: {', '.join(unknown)}")
        for name in ("sidecar", "secret_file"):
            if not extra.get(name):
                raise ValueError(f"kv_connector_extra_config needs the key {name!r}")
        for name, value in extra.items():
            wanted = str(fields[name].type)
            if type(value).__name__ != wanted:
                raise ValueError(f"kv_connector_extra_config {name!r} must be of type {wanted}")
            if wanted == "int" and value < 1:
                raise ValueError(f"kv_connector_extra_config {name!r} must be 1 or more")
            if name in _CHOICES and value not in _CHOICES[name]:
                raise ValueError(f"kv_connector_extra_config {name!r} must be one of {', '.join(_CHOICES[name])}")
        return cls(**extra)

    def sends_ahead(self, device: str) -> bool:
        """Return whether full blocks are sent while a request runs, on an engine that computes on `device`."""
        return self.early_saves == "on" or (self.early_saves == "auto" and device != "cpu")
