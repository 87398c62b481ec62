"""The doctor against a real gateway, manager and pod (a toy engine), over HTTP and HTTPS, as a command too."""

from __future__ import annotations

import asyncio
import json
import ssl
import sys
from contextlib import asynccontextmanager

import pytest
import trustme
from aiohttp import web

from contextcache.doctor.examination import Plan, examine
from contextcache.doctor.finding import Level
from contextcache.doctor.front import ApiKey
from tests.kit.certificates import chain_of
from tests.kit.gateway_parts import KEY
from tests.kit.gateway_server import running_gateway, settings_for
from tests.kit.ports import free_port
from tests.kit.turn_pod import running_turn_pod
from tests.kit.until import until

PATIENCE_S = 120


async def examined(url, **changes):
    """Return what the doctor finds, asked in a thread as the deployment is in this loop."""
    plan = Plan(**{"url": url, "version": "0", "key": ApiKey(KEY), "timeout_s": PATIENCE_S} | changes)
    return await asyncio.to_thread(lambda: list(examine(plan, sleep=lambda _: None)))


async def examined_until(is_so, url, **changes):
    """As `examined`, again until the findings are so: `/readyz` gives a manager one second, which may be too short."""
    return await until(lambda: examined(url, **changes), is_so=is_so, what="the doctor's findings")


def levels(findings, *, level):
    return [finding.check for finding in findings if finding.level is level]


@asynccontextmanager
async def deployment(tmp_path, manager):
    """One gateway, one pod; `manager` is behind both."""
    async with running_turn_pod(tmp_path, manager_port=manager.port) as pod:
        settings = settings_for(tmp_path, {"pod-a": pod}, manager_port=manager.port, metrics_port=free_port())
        async with running_gateway(settings, num_ready=1) as gateway:
            yield gateway, settings


async def test_a_deployment_that_works_passes_every_check_and_its_story(tmp_path, manager):
    async with deployment(tmp_path, manager) as (gateway, settings):
        findings = await examined_until(
            lambda findings: not levels(findings, level=Level.FAILED),
            gateway.url,
            with_story=True,
            metrics_url=f"http://127.0.0.1:{settings.metrics_port}",
            manager=f"127.0.0.1:{manager.port}",
        )

    checks = {finding.check for finding in findings}
    assert checks >= {"key", "isolation", "forged headers", "create", "ask", "usage", "read", "delete"}
    assert {"metrics", "context-manager"} <= set(levels(findings, level=Level.OK))


async def test_without_its_manager_it_says_what_is_missing(tmp_path, manager):
    async with deployment(tmp_path, manager) as (gateway, settings):
        await manager.stop()
        findings = await examined(
            gateway.url,
            with_story=True,
            metrics_url=f"http://127.0.0.1:{settings.metrics_port}",
            manager=f"127.0.0.1:{manager.port}",
        )
        await manager.start()

    found = {finding.check: finding for finding in findings}
    assert found["ready"].text == "the gateway is not ready"
    assert found["details"].text == "missing: context manager"
    assert found["key"].level is Level.FAILED
    assert found["context-manager"].level is Level.FAILED


async def test_without_a_pod_it_says_so(tmp_path, manager, engine):
    engine.healthy = False
    settings = settings_for(tmp_path, {"pod-a": engine}, manager_port=manager.port)
    async with running_gateway(settings, num_ready=0) as gateway:
        metrics_url = f"http://127.0.0.1:{gateway.metrics_port}"
        findings = await examined_until(
            lambda findings: "missing: ready endpoint" in {finding.text for finding in findings},
            gateway.url,
            with_story=True,
            metrics_url=metrics_url,
        )

    found = {finding.check: finding for finding in findings}
    assert found["ready"].level is Level.FAILED
    assert found["details"].text == "missing: ready endpoint"
    assert found["models"].level is Level.FAILED
    assert found["turns"].level is Level.SKIPPED


async def test_a_key_of_nobody_ends_it_there(tmp_path, manager, engine):
    settings = settings_for(tmp_path, {"pod-a": engine}, manager_port=manager.port)
    async with running_gateway(settings, num_ready=1) as gateway:
        findings = await examined_until(
            lambda findings: levels(findings, level=Level.FAILED) == ["key"],
            gateway.url,
            key=ApiKey("nobodys"),
            with_story=True,
        )

    assert findings[-1].text == "needs an API key"


async def run_doctor(*arguments):
    """Run the command and return its exit status and output."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "contextcache",
        "doctor",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(PATIENCE_S):
        output, errors = await process.communicate()
    return process.returncode, output.decode(), errors.decode()


async def test_the_command_exits_by_what_it_found_and_prints_no_key(tmp_path, manager):
    key_file = tmp_path / "api-key"
    key_file.write_text(f"{KEY}\n")
    async with deployment(tmp_path, manager) as (gateway, _):
        well = await until(
            lambda: run_doctor("--url", gateway.url, "--api-key-file", str(key_file), "--story", "--json"),
            is_so=lambda run: run[0] == 0,
            what="the doctor finds no fault",
            deadline_s=PATIENCE_S,
        )
        bad = await run_doctor("--url", f"http://127.0.0.1:{free_port()}", "--api-key-file", str(key_file))
        unusable = await run_doctor("--url", gateway.url, "--api-key-file", str(tmp_path / "none"))

    assert [bad[0], unusable[0]] == [1, 2], (bad, unusable)
    report = json.loads(well[1])
    assert (report["ok"], report["failed"]) == (True, 0)
    assert "✗ reach" in bad[1]
    assert KEY not in str((well, bad, unusable))


@asynccontextmanager
async def https_front(ca, *names):
    """Answer /healthz over HTTPS with a certificate for `names`."""

    async def healthz(_):
        return web.Response(text="{}")

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    ca.issue_cert(*names).configure_cert(context)
    app = web.Application()
    app.router.add_get("/healthz", healthz)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
    await site.start()
    try:
        yield f"https://localhost:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.fixture
def ca(tmp_path):
    ca = trustme.CA()
    ca.cert_pem.write_to_path(str(tmp_path / "ca.crt"))
    part = ca.issue_cert("context-cache")
    part.private_key_pem.write_to_path(str(tmp_path / "tls.key"))
    (tmp_path / "tls.crt").write_bytes(chain_of(part))
    return ca


@pytest.mark.parametrize(
    ("names", "options", "expected"),
    [
        (["localhost"], {"ca_file": "ca.crt"}, ["ok"]),
        (["localhost"], {}, ["failed"]),
        (["llm.example.org"], {"ca_file": "ca.crt"}, ["failed"]),
        (["llm.example.org"], {"ca_file": "ca.crt", "server_name": "llm.example.org"}, ["ok", "warning"]),
        (["context-cache"], {"parts_dir": "."}, ["ok", "warning"]),
    ],
    ids=["believed", "foreign CA", "another name", "another name that is expected", "the parts' name"],
)
async def test_the_fronts_certificate_is_checked_before_a_key_is_sent(tmp_path, ca, names, options, expected):
    paths = {name: value if name == "server_name" else tmp_path / value for name, value in options.items()}
    async with https_front(ca, *names) as url:
        findings = await examined(url, **paths)

    assert [finding.level for finding in findings if finding.check == "certificate"] == expected
    reached = [finding.level for finding in findings if finding.check == "reach"]
    assert reached == ([] if expected == ["failed"] else [Level.OK])
