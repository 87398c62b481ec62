"""The real vLLM parses the injector's arguments behind a start script. It needs no model to do so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from pod_injector.payload import copy_payload
from pod_injector.payload_start.context_cache_start import ARGUMENTS_ENV, REPORT_NAME

START = """#!/bin/sh
OPTIONS="--port 8000 --dtype float32"
exec python3 -m vllm.entrypoints.openai.api_server --model "$1" $OPTIONS
"""


def test_vllm_behind_a_start_script_has_the_connector(tmp_path: Path) -> None:
    """`vllm serve` itself needs a package called vllm, which the CPU build is not: unit tests have a stub of it."""
    (tmp_path / "image" / "ours").mkdir(parents=True)
    copy_payload(tmp_path / "payload", source=tmp_path / "image")
    (tmp_path / "start.sh").write_text(START)
    transfer = {
        "kv_connector": "ContextCacheConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"sidecar": f"unix://{tmp_path}/sidecar.sock"},
    }
    arguments = ("--kv-transfer-config", json.dumps(transfer), "--enable-prompt-tokens-details")
    env = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{tmp_path}/payload/start:{Path.cwd()}",
        "HF_HUB_OFFLINE": "1",
        "HOME": str(tmp_path),
        ARGUMENTS_ENV: json.dumps({"arguments": arguments, "port": 8000, "https": False}),
    }

    done = subprocess.run(
        ["sh", "-c", f"sh {tmp_path}/start.sh no-such-model 2>&1 | cat"],
        env=env,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )

    [parsed] = [line for line in done.stdout.splitlines() if "non-default args" in line]
    assert "kv_connector='ContextCacheConnector'" in parsed
    assert "'dtype': 'float32'" in parsed
    assert (tmp_path / REPORT_NAME).read_text() == "added"
