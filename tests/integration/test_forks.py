"""Twenty forks of a document over HTTP, real manager, Valkey and sidecar: no byte of KV more, none less before the end.

How long each took is printed.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import pytest

from tests.kit.tenant_world import MODEL, TENANTS, created, key_of, running_tenants

NUM_FORKS = 20
TENANT = TENANTS[0]
HEADERS = {"authorization": f"Bearer {key_of(TENANT)}"}


@pytest.mark.thorough
async def test_twenty_forks_of_a_document_add_no_byte_and_are_warm_until_the_last_one_goes(tmp_path: Path) -> None:
    async with running_tenants(tmp_path) as world:

        async def call(method: str, path: str, expected: int, body: dict[str, Any] | None = None) -> dict[str, Any]:
            if body is None:
                asking = world.front.request(method, path, headers=HEADERS)
            else:
                asking = world.front.post(path, body, headers=HEADERS)
            async with asking as answer:
                found: dict[str, Any] = await answer.json()
                assert answer.status == expected, found
                return found

        document = "d" * 4001
        source = await created(world, TENANT, prompt=document)
        before, files = world.sidecar.disk_bytes(), world.sidecar.block_files()
        forks, took_ms = [], []
        for _ in range(NUM_FORKS):
            begun_s = time.perf_counter()
            forks.append((await call("POST", f"/v1/context/{source}/fork", 201, {}))["session_id"])
            took_ms.append((time.perf_counter() - begun_s) * 1000)
        print(f"{NUM_FORKS} forks: median {statistics.median(took_ms):.1f} ms, most {max(took_ms):.1f} ms")

        assert (world.sidecar.disk_bytes(), world.sidecar.block_files()) == (before, files)
        await call("DELETE", f"/v1/context/{source}", 200)
        assert (world.sidecar.disk_bytes(), world.sidecar.block_files()) == (before, files)
        for number, fork in enumerate(forks):
            shown = await call("GET", f"/v1/context/{fork}", 200)
            assert (shown["holder"]["state"], shown["bytes"]) == ("sealed", before)
            turn = {"model": MODEL, "session_id": fork, "prompt": f" question {number}"}
            await call("POST", "/v1/completions", 200, turn)
            (loaded,) = world.engine.generated[-1].loaded
            assert "".join(map(chr, loaded.token_ids)).startswith(document)
        for fork in forks:
            assert world.sidecar.disk_bytes() > 0
            await call("DELETE", f"/v1/context/{fork}", 200)

        assert (world.sidecar.disk_bytes(), world.sidecar.manifest_files()) == (0, set())
