"""`python -m gateway` as a process: what it prints, how it starts and how it ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from contextcache.wire.http_server import bound_listener
from gateway.__main__ import main
from gateway.tenants.keys import hash_key
from tests.kit.gateway_parts import KEY, SECRET, write_keys

ROOT = Path(__file__).parents[2]
DEADLINE_S = 90


@pytest.fixture
def environment(tmp_path):
    (tmp_path / "secret").write_bytes(SECRET)
    write_keys(tmp_path / "keys.json", {KEY: "demo"})
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GATEWAY_")}
    return kept | {
        "GATEWAY_PORT": "0",
        "GATEWAY_MANAGER": "127.0.0.1:1",
        "GATEWAY_ENDPOINTS": '[{"name": "pod-a", "url": "http://127.0.0.1:1"}]',
        "GATEWAY_SECRET_FILE": str(tmp_path / "secret"),
        "GATEWAY_API_KEYS_FILE": str(tmp_path / "keys.json"),
    }


def run(environment, *arguments, text=None):
    command = [sys.executable, "-m", "gateway", *arguments]
    return subprocess.run(
        command, env=environment, cwd=ROOT, input=text, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )


def test_help_lists_every_variable(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gateway", "--help"])
    main()
    told = capsys.readouterr().out

    assert "GATEWAY_MAX_BODY_BYTES (default 33554432)" in told
    assert "GATEWAY_SECRET_FILE (required)" in told


def test_hash_key_prints_what_the_key_file_holds(environment):
    result = run(environment, "hash-key", text=f"{KEY}\n")

    assert (result.returncode, result.stdout.strip()) == (0, hash_key(KEY))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("keys.json", "{"),
        ("secret", None),
        pytest.param("secret", "short", marks=pytest.mark.thorough),
    ],
)
def test_a_missing_or_broken_file_ends_the_start_with_its_name(environment, tmp_path, name, content):
    path = tmp_path / name
    path.unlink() if content is None else path.write_text(content)
    result = run(environment)

    assert result.returncode == 1
    assert json.loads(result.stderr.splitlines()[-1])["event"] == "gateway cannot start"
    assert name in result.stderr
    assert "Traceback" not in result.stderr


def test_it_starts_alone_says_what_is_missing_and_ends_on_sigterm(environment):
    process = subprocess.Popen(
        [sys.executable, "-m", "gateway"], env=environment, cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    try:
        # gRPC may write lines of its own.
        lines = (json.loads(line) for line in process.stderr if line.lstrip()[:1] in ("{", b"{"))
        started = next(line for line in lines if line["event"] == "gateway started")
        url = f"http://127.0.0.1:{started['port']}"
        with urllib.request.urlopen(f"{url}/healthz", timeout=DEADLINE_S) as answer:
            assert answer.status == 200
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(f"{url}/readyz", timeout=DEADLINE_S)
        with caught.value as answer:
            assert json.loads(answer.read()) == {"ready": False}
        process.send_signal(signal.SIGTERM)
        events = [json.loads(line)["event"] for line in process.stderr]

        assert process.wait(DEADLINE_S) == 0
        assert events[-1] == "gateway stopped"
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


async def test_answers_are_sent_without_waiting_for_more_to_send():
    """Seen failing with a listener of protocol 0, which asyncio does not know as TCP: each answer took 40 ms more."""
    connected = asyncio.get_running_loop().create_future()
    server = await asyncio.start_server(
        lambda _reader, writer: connected.set_result(writer), sock=bound_listener("127.0.0.1", 0)
    )
    async with server:
        _, client = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
        writer = await connected
        found = writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        for one in (client, writer):
            one.close()
            await one.wait_closed()

    assert found
