"""Settings the connector refuses to start with, and what it says."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.vllm_plugin.connector.conftest import Engine
from vllm_plugin.connector import ContextCacheConnector
from vllm_plugin.connector.settings import ConnectorSettings

NEEDED = {"sidecar": "unix:///s", "secret_file": "/secret"}


def test_settings_have_defaults_for_all_but_the_sidecar_and_the_secret() -> None:
    settings = ConnectorSettings.from_extra_config(NEEDED)

    assert settings == ConnectorSettings("unix:///s", "/secret")
    assert settings.weights_epoch == "0"


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({}, "needs the key 'sidecar'"),
        ({"sidecar": "unix:///s"}, "needs the key 'secret_file'"),
        ({**NEEDED, "sidecat": "x"}, "unknown keys: sidecat"),
        ({**NEEDED, "deadline_factor": "2"}, "'deadline_factor' must be of type int"),
        ({**NEEDED, "deadline_factor": True}, "'deadline_factor' must be of type int"),
        ({**NEEDED, "deadline_factor": 0}, "'deadline_factor' must be 1 or more"),
        ({**NEEDED, "weights_epoch": 3}, "'weights_epoch' must be of type str"),
        ({**NEEDED, "codec": "q2"}, "'codec' must be one of none, q8, q4"),
    ],
)
def test_a_wrong_setting_is_named(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ConnectorSettings.from_extra_config(extra)


@pytest.mark.parametrize(
    ("extra", "message"), [({"secret_file": "/nowhere/secret"}, "is not readable"), ({"what": 1}, "unknown keys: what")]
)
def test_the_engine_does_not_start_with_settings_that_cannot_work(
    start_engine: Callable[..., Engine], extra: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        start_engine(extra=extra)


def test_the_connector_says_what_vllm_asks_of_it(engine: Engine) -> None:
    def on_gpu(**more: str) -> SimpleNamespace:
        extra = {"sidecar": "unix:///nowhere", "secret_file": "/nowhere", **more}
        transfer = SimpleNamespace(kv_connector_extra_config=extra)
        return SimpleNamespace(device_config=SimpleNamespace(device_type="cuda"), kv_transfer_config=transfer)

    assert ContextCacheConnector.get_required_kvcache_layout(engine.loop.vllm_config) is None
    assert ContextCacheConnector.get_required_kvcache_layout(on_gpu()) == "BLNHC"
    assert ContextCacheConnector.get_required_kvcache_layout(on_gpu(layout="")) is None
    assert engine.loop.connector.requires_kv_delivery is False
    assert engine.loop.connector.reset_cache() is True
    assert engine.loop.worker.reset_cache() is True


@pytest.mark.thorough
@pytest.mark.timeout(240)
def test_importing_the_connector_starts_nothing() -> None:
    code = (
        "import json, threading, os\n"
        "before = set(os.listdir('/proc/self/fd'))\n"
        "import grpc\n"
        "made = []\n"
        "grpc.insecure_channel = lambda *a, **k: made.append(a)\n"
        "import vllm\n"
        "threads = threading.active_count()\n"
        "import vllm_plugin.connector\n"
        "print(json.dumps([len(made), threading.active_count() - threads]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=200, check=True
    )

    assert json.loads(done.stdout.splitlines()[-1]) == [0, 0]
