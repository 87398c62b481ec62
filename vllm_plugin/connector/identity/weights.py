"""Identity of an engine's weights, as short text for the fingerprint: a digest of their files, or the hub's commit.

Equal on all ranks: each reads all files. Weights that cannot be read are `None`: the scheduler's
half takes the weights for new at every start.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from vllm_plugin.connector.identity.weight_files import UnreadableWeights, sample

log = logging.getLogger(__name__)

_TIMEOUT_S = 60.0
"""Bound on reading; 8 GB of local files take well under a second. A longer start would cost more than KV that does not
outlive its engine."""
_LOCAL_FORMATS = frozenset(
    {
        "auto",
        "bitsandbytes",
        "fastsafetensors",
        "gguf",
        "hf",
        "instanttensor",
        "mistral",
        "npcache",
        "pt",
        "runai_streamer",
        "runai_streamer_sharded",
        "safetensors",
        "sharded_state",
    }
)
"""Load formats that read the model's directory, or the hub's cache. Others (tensorizer, a cache daemon, another
engine, a plugin) read elsewhere."""


def weights_identity(vllm_config: Any) -> str | None:
    """Return the identity of the weights, a draft model's included; None where it is not known."""
    ends_at_s = time.monotonic() + _TIMEOUT_S
    found = [_identity(model, load, ends_at_s) for model, load in models(vllm_config)]
    return None if None in found else " ".join(map(str, found))


def models(vllm_config: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the model, and the draft model if that is another one, each with how it is loaded."""
    target, load = vllm_config.model_config, vllm_config.load_config
    yield target, load
    speculative = getattr(vllm_config, "speculative_config", None)
    draft = getattr(speculative, "draft_model_config", None)
    if draft is not None and (draft.model, draft.revision) != (target.model, target.revision):
        yield draft, getattr(speculative, "draft_load_config", None) or load


def _identity(model: Any, load: Any, ends_at_s: float) -> str | None:
    load_format = str(load.load_format)
    if load_format == "dummy" and model.quantization is None:
        # Random from a fixed seed: equal for an equal configuration. Quantised weights hold bytes that lay in memory.
        return "dummy"
    # Set where the directory holds the configuration only, and the weights come from an object store.
    uri = getattr(model, "model_weights", None)
    if load_format not in _LOCAL_FORMATS or uri:
        return None
    path = Path(model.model)
    return _files(path, load, ends_at_s) if path.exists() else _hub_commit(model, load)


def _files(path: Path, load: Any, ends_at_s: float) -> str | None:
    started_s = time.monotonic()
    try:
        found = sample(path, ignored=_ignored(load), ends_at_s=ends_at_s)
    except UnreadableWeights as exc:
        log.warning("weights not sampled", extra={"reason": str(exc)})
        return None
    took_ms = round((time.monotonic() - started_s) * 1000)
    facts = {"num_files": found.num_files, "size_bytes": found.size_bytes, "duration_ms": took_ms}
    log.info("weights sampled", extra=facts)
    return f"files:{found.sha256}"


def _ignored(load: Any) -> Sequence[str]:
    patterns = getattr(load, "ignore_patterns", None) or ()
    return (patterns,) if isinstance(patterns, str) else tuple(patterns)


def _hub_commit(model: Any, load: Any) -> str | None:
    """Return the commit that the revision names in the hub's local cache, which the loader has just read."""
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            str(model.model),
            revision=model.revision,
            cache_dir=getattr(load, "download_dir", None),
            local_files_only=True,
        )
    except (OSError, ValueError):
        return None
    return f"commit:{Path(folder).name}"
