"""Our connector and vLLM's ExampleConnector below a MultiConnector, in either order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.kit.patience import CONNECTOR
from tests.kit.tiny_engine import SECRET

ORDERS = ("ours first", "ours last")


def second_alone(folder: Path) -> dict[str, Any]:
    """Return vLLM's KVTransferConfig for the other connector, which keeps its KV in `folder`."""
    return {
        "kv_connector": "SecondConnector",
        "kv_connector_module_path": "tests.kit.second_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }


def several(order: str, sidecar: str, secret_file: Path, folder: Path) -> dict[str, Any]:
    """Return vLLM's KVTransferConfig for both, and write the secret of ours."""
    secret_file.write_bytes(SECRET)
    own = {
        "kv_connector": "ContextCacheConnector",
        "kv_connector_module_path": "vllm_plugin.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "sidecar": sidecar,
            "secret_file": str(secret_file),
            "layout": "",
            **CONNECTOR,
        },
    }
    both = [own, second_alone(folder)]
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": both if order == ORDERS[0] else both[::-1]},
    }
