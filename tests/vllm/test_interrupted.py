"""Clients that disconnect while their prompt is computed: nothing is committed, and a retry computes only the rest."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from typing import Any

import pytest

from contextcache.model import Manifest
from kv_sidecar.format.manifest import decode_manifest
from tests.kit.caller import Caller
from tests.kit.until import wait_until

pytestmark = pytest.mark.timeout(900)

SESSION = "interrupted"
CHUNK = 1024
"""Tokens that the engine computes in a step."""
LONG = " ".join(f"Gauge {number} stood at {7 * number % 1000} metres." for number in range(400))
"""More than four chunks."""


def left_behind(client: Caller) -> list[Manifest]:
    files = (client.stack.data() / "manifests").glob("*/*.safetensors")
    manifests = [decode_manifest(file.read_bytes()) for file in files]
    return [manifest for manifest in manifests if manifest.session_id == SESSION and manifest.interrupted]


@contextmanager
def asked(client: Caller, path: str, body: dict[str, Any]) -> Iterator[None]:
    """Send a request, and disconnect at the end of the block."""
    url = client.http.base_url
    connection = HTTPConnection(url.host, url.port, timeout=60)
    headers = {"content-type": "application/json", "authorization": client.http.headers["authorization"]}
    connection.request("POST", path, json.dumps(body), headers)
    yield
    connection.close()


@pytest.mark.parametrize("is_turn", [False, True])
def test_a_retry_computes_only_what_the_interrupted_request_did_not(client: Caller, is_turn: bool) -> None:
    if is_turn:
        client.create(prompt="Report the gauges.", session_id=SESSION)
        client.wait_sealed(SESSION)
    path = "/v1/completions" if is_turn else "/v1/context"
    body = client.body({"prompt": LONG, "session_id": SESSION, "max_tokens": 2})
    wait_until(lambda: not used(client), what="the engine is idle")
    with asked(client, path, body):
        wait_until(lambda: used(client), what="a first part of the prompt is computed", deadline_s=60)
    (kept,) = wait_until(lambda: left_behind(client), what="it is saved", deadline_s=60)
    if is_turn:
        assert client.get(SESSION)["generation"] == 1
    else:
        assert client.http.get(f"/v1/context/{SESSION}").status_code == 404

    client.forget_prefixes()
    answer = Caller._ok(client.http.post(path, json=body))

    usage = answer["usage"]["context"]
    num_prompt = usage["cached_tokens"] + usage["computed_tokens"]
    print(f"of {num_prompt} tokens {len(kept.token_ids)} were kept, {usage['computed_tokens']} computed by the retry")
    assert CHUNK <= len(kept.token_ids) < num_prompt
    assert usage["cached_tokens"] == len(kept.token_ids)
    assert usage["committed"]

    client.delete(SESSION)
    assert left_behind(client) == []


def used(client: Caller) -> bool:
    """Whether a request has blocks of the engine's, at the end of its last step."""
    return client.stack.counted("engine", "vllm:kv_cache_usage_perc") > 0
