"""`context-cache` as a program against a real gateway: each command for people, programs, refused, piped, stopped."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import stat
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import pytest
from rich.console import Console
from typer import BadParameter
from typer.testing import CliRunner

from contextcache.cli import output, place
from contextcache.cli.app import app
from contextcache.cli.options import seconds
from contextcache.cli.serve import PARTS
from contextcache.client import ContextCache, errors
from contextcache.client.types import context_info
from tests.kit.fake_vllm import FakeVllm
from tests.kit.gateway_parts import KEY
from tests.kit.gateway_server import running_gateway, settings_for
from tests.kit.turn_pod import MODEL, running_turn_pod

ROOT = Path(__file__).parents[2]
DEADLINE_S = 60
NEEDED = ("session_id", "mode", "state", "created", "expires_at", "ttl", "ttl_policy", "turns", "tokens", "generation")
ESCAPE = "\x1b[31mred\x1b]0;title\x07"


@dataclass
class Ended:
    code: int
    out: str
    err: str

    @property
    def json(self):
        return [json.loads(line) for line in self.out.splitlines()]


class CommandLine:
    """The program, as a user of one gateway has it."""

    def __init__(self, url, home):
        self.url, self.home = url, home
        self.env = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CONFIG_HOME": str(home), "NO_COLOR": ""}
        self.env |= {"CONTEXT_CACHE_URL": url, "CONTEXT_CACHE_API_KEY": KEY}

    async def start(self, *words, **options):
        command = [sys.executable, "-m", "contextcache", *words]
        streams = {
            "stdin": asyncio.subprocess.PIPE,
            "stdout": asyncio.subprocess.PIPE,
            "stderr": asyncio.subprocess.PIPE,
        }
        return await asyncio.create_subprocess_exec(*command, cwd=self.home, env=self.env, **(streams | options))

    async def __call__(self, *words, typed="", **env):
        self.env |= env
        process = await self.start(*words)
        out, err = await asyncio.wait_for(process.communicate(typed.encode()), DEADLINE_S)
        return Ended(process.returncode, out.decode(), err.decode())

    async def created(self, prompt="Hello", *more):
        ended = await self("create", MODEL, prompt, "--json", *more)
        return ended.json[0]["session_id"]


@pytest.fixture
def toy():
    return FakeVllm(answer=lambda ids: " yes")


@pytest.fixture
async def cli(tmp_path, manager, toy):
    async with running_turn_pod(tmp_path, manager_port=manager.port, engine=toy) as pod:
        settings = settings_for(tmp_path, {"pod-a": pod}, manager_port=manager.port)
        async with running_gateway(settings, num_ready=1) as gateway:
            yield CommandLine(gateway.url, tmp_path)


async def test_every_command_for_people(cli):
    created = await cli("create", MODEL, "Hello", "--ttl", "10m", "--metadata", "user=anna", "--max-tokens", "8")
    session_id = created.err.split(" · ")[0]
    ran = {
        "ls": await cli("ls"),
        "show": await cli("show", session_id),
        "ask": await cli("ask", session_id, " more"),
        "chat": await cli("ask", session_id, "-", typed=" from stdin"),
        "extend": await cli("extend", session_id, "20m"),
        "fork": await cli("fork", session_id, "--generation", "2", "--name", "branch-1"),
        "compact": await cli("compact", session_id, "-", "--name", "short-1", "--ttl", "30m", typed="Short."),
        "rewind": await cli("rewind", session_id, "1"),
        "usage": await cli("usage"),
        "rm": await cli("rm", session_id, "branch-1", "short-1"),
    }
    empty = await cli("ls")

    assert (created.code, created.out) == (0, " yes\n")
    assert "generation 1 · computed" in created.err
    assert {name: ended.code for name, ended in ran.items()} == dict.fromkeys(ran, 0)
    assert session_id in ran["ls"].out
    assert MODEL in ran["ls"].out
    assert "10 min" in ran["ls"].out
    assert "user" in ran["show"].out
    assert ran["ask"].out == " yes\n"
    assert "cached" in ran["ask"].err
    assert "20 min" in ran["extend"].out
    assert "branch-1" in ran["fork"].out
    assert [said in ran["compact"].out for said in ("short-1", session_id, "30 min", "user anna")] == [True] * 4
    assert "total" in ran["usage"].out
    assert ran["rm"].err.count("deleted") == 3
    assert (empty.code, empty.out, empty.err) == (0, "", "none\n")
    assert "\x1b" not in "".join(ended.out + ended.err for ended in ran.values())


def test_a_list_of_contexts_fits_eighty_columns(monkeypatch):
    """Seen failing: the model's name was whole, and the time left was not there."""
    narrow = Console(width=80, record=True, file=io.StringIO())
    monkeypatch.setattr(output, "console", lambda: narrow)
    row = (f"ctx_{'0' * 32}", "smollm2-135m-instruct", 3, 120, "90 %", 4, "ready", "59 min", "ctx_1")
    narrow.print(output.table(output.CONTEXT_HEADS, [row]))

    shown = narrow.export_text().splitlines()[1].split()
    assert shown == [row[0], "smol…", "3", "120", "90", "%", "ready", "59", "min"]


@pytest.mark.parametrize(
    ("said", "ttl"), [("3600", 3600), ("90s", 90), ("30m", 1800), ("1h", 3600), ("7d", 604_800), ("0", 0)]
)
def test_a_life_is_said_in_seconds_minutes_hours_or_days(said, ttl):
    assert seconds(said) == ttl


@pytest.mark.parametrize("said", ["", "h", "1w", "1h30m", "-1h", "1.5h", " 1h", "1H", "\u0661h", "9" * 20])
def test_what_is_no_length_of_time_is_refused_with_what_is_one(said):
    with pytest.raises(BadParameter, match="3600, 90s, 30m, 1h, 7d"):
        seconds(said)


def test_a_long_list_is_printed_whole(capsys):
    """Seen failing: each hundred-and-first row was not there."""
    assert output.print_rows(("n", "m"), ((f"row-{number}", 0) for number in range(250))) == 250

    assert len(set(capsys.readouterr().out.split()) - {"n", "m", "0"}) == 250


def test_the_key_that_login_wrote_is_for_its_server_alone(tmp_path, monkeypatch):
    """Seen failing: another server, named in the environment, was given the key."""
    for name, value in (("XDG_CONFIG_HOME", str(tmp_path)), ("CONTEXT_CACHE_URL", ""), ("CONTEXT_CACHE_API_KEY", "")):
        monkeypatch.setenv(name, value)
    place.write_place("http://a", "saved")

    assert place.find_place(None, None) == place.find_place("http://a", None) == ("http://a", "saved")
    assert place.find_place("http://b", "given") == ("http://b", "given")
    for url, key, said in (
        ("http://b", None, r"no API key for this server \(the stored key is for http://a\)"),
        (None, "", "empty"),
    ):
        with pytest.raises(place.NotConfigured, match=said):
            place.find_place(url, key)


@pytest.mark.thorough
async def test_every_command_for_programs(cli):
    session_id = await cli.created()
    ran = {
        "models": await cli("models", "--json"),
        "ls": await cli("ls", "--json", "--limit", "0"),
        "show": await cli("show", session_id, "--json"),
        "ask": await cli("ask", session_id, " more", "--json", "--temperature", "0"),
        "chat": await cli("chat", session_id, "more", "--json"),
        "extend": await cli("extend", session_id, "1200", "--json"),
        "fork": await cli("fork", session_id, "--json"),
        "compact": await cli("compact", session_id, "Short.", "--json"),
        "rewind": await cli("rewind", session_id, "1", "--json"),
        "usage": await cli("usage", "--json"),
        "rm": await cli("rm", session_id, "--json"),
    }

    assert {name: (ended.code, len(ended.json)) for name, ended in ran.items()} == dict.fromkeys(ran, (0, 1))
    assert ran["models"].json == [{"id": MODEL}]
    assert ran["ls"].json[0]["session_id"] == ran["show"].json[0]["session_id"] == session_id
    assert ran["ask"].json[0]["usage"]["context"]["committed"] is True
    assert ran["extend"].json[0]["ttl"] == 1200
    assert ran["fork"].json[0]["session_id"] != session_id
    assert ran["compact"].json[0]["parent"] == session_id
    assert ran["rewind"].json[0]["generation"] == 4
    assert ran["rm"].json == [{"session_id": session_id, "deleted": True}]


@pytest.mark.parametrize(
    "words",
    [
        ("show", "ctx_none"),
        ("ask", "ctx_none", "a"),
        ("chat", "ctx_none", "a"),
        ("extend", "ctx_none", "60"),
        ("fork", "ctx_none"),
        ("compact", "ctx_none"),
        ("rewind", "ctx_none", "1"),
        ("rm", "ctx_none"),
        ("create", MODEL, "a", "--ttl", "1"),
    ],
)
async def test_what_the_server_refuses_is_one_line_and_exit_1(cli, words):
    ended = await cli(*words)

    assert (ended.code, ended.out, ended.err.count("\n")) == (1, "", 1)


async def test_what_is_wrong_with_the_command_line_is_exit_2(cli):
    for words in (
        ["frobnicate"],
        ["show"],
        ["ls", "--limit", "-1"],
        ["create", MODEL, "a", "--metadata", "x"],
        ["serve"],
        ["extend", "ctx_1", "1w"],
        ["create", MODEL, "a", "--ttl", "1.5h"],
    ):
        ended = await cli(*words)
        assert (ended.code, "Traceback" in ended.err) == (2, False), words
    nowhere = await cli("ls", CONTEXT_CACHE_API_KEY="")
    assert (nowhere.code, "login" in nowhere.err) == (2, True)


async def test_nobody_there_is_exit_3(cli):
    ended = await cli("show", "ctx_1", CONTEXT_CACHE_URL="http://127.0.0.1:9")

    assert (ended.code, "no answer from http://127.0.0.1:9" in ended.err) == (3, True)


@pytest.fixture
async def cli_at(tmp_path):
    """Give the program at a server that answers all calls with one body, whatever is asked."""
    servers = []

    async def at(body):
        async def answer(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            head = f"HTTP/1.1 200 OK\r\nX-Session-ID: ctx_1\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            writer.write(head.encode() + body)
            await writer.drain()
            writer.close()

        servers.append(await asyncio.start_server(answer, "127.0.0.1", 0))
        return CommandLine(f"http://127.0.0.1:{servers[0].sockets[0].getsockname()[1]}", tmp_path)

    yield at
    for server in servers:
        server.close()
        await server.wait_closed()


@pytest.mark.parametrize(
    "words", [("rm", "ctx_1"), ("usage",), ("show", "ctx_1"), ("login", "")], ids=lambda words: words[0]
)
async def test_what_somebody_else_answers_is_exit_3(cli_at, words):
    """Seen failing: `rm` said that it had deleted, and `show` that the server had said no."""
    cli = await cli_at(b"<html>Who are you?</html>")
    ended = await cli(*(word or cli.url for word in words), typed=KEY)

    assert (ended.code, ended.out, "is not from context-cache" in ended.err) == (3, "", True)


@pytest.mark.parametrize("as_json", [True, False])
async def test_a_create_that_left_no_context_prints_its_answer_and_is_exit_1(cli_at, as_json):
    context = {"computed_tokens": 1, "cached_tokens": 0, "saved_tokens": 0, "context_tokens": 0, "source": "none"}
    context |= {"committed": False, "reason": "lease_lost"}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2, "context": context}
    chunks = {"choices": [{"text": " yes"}]}, {"choices": [], "session_id": None, "usage": usage}
    cli = await cli_at("".join(f"data: {one}\n\n" for one in (*map(json.dumps, chunks), "[DONE]")).encode())
    ended = await cli("create", MODEL, "Hello", *(["--json"] if as_json else []))

    assert ended.code == 1
    if as_json:
        assert (ended.json[0]["session_id"], ended.json[0]["usage"]) == (None, usage)
    else:
        assert ended.out == " yes\n"
        assert "not committed (lease_lost)" in ended.err


async def test_a_reader_that_has_seen_enough_ends_it_without_a_word(cli):
    for _ in range(3):
        await cli.created("x" * 2000)
    process = await cli.start("ls", "--json", "--limit", "0")
    process.stdout._transport.close()
    _, err = await asyncio.wait_for(process.communicate(), DEADLINE_S)

    assert process.returncode == 1
    assert err == b""


async def test_what_a_model_or_a_tenant_wrote_is_no_order_to_the_terminal(cli, toy):
    toy.answer = lambda ids: ESCAPE + "[bold]not markup[/bold]"
    created = await cli("create", MODEL, "Hello", "--metadata", f"user={ESCAPE}[red]")
    shown = await cli("show", created.err.split(" · ")[0])

    assert "\x1b" not in created.out + shown.out
    assert "\x07" not in created.out + shown.out
    assert "[bold]not markup[/bold]" in created.out
    assert "[red]" in shown.out


def test_half_a_character_is_printed_as_something_that_is_none(capsys):
    """Seen failing: `show` ended with "codec can't encode". JSON can hold such halves, and no stream of text."""
    output.say("a \ud83d b")
    info = context_info({**dict.fromkeys(NEEDED, 1), "model": "m\udc80", "metadata": {"who": "\ud800"}})
    output.console().print(output.fields(output.shown(info)))

    printed = capsys.readouterr()
    assert printed.err == "a \N{REPLACEMENT CHARACTER} b\n"
    assert printed.out.encode().count("\N{REPLACEMENT CHARACTER}".encode()) == 2


def test_login_stores_the_key_while_no_engine_is_ready(tmp_path, monkeypatch):
    """Seen failing: nothing was stored, and later commands had no server."""

    def still_loading(_client):
        raise errors.NoReadyEndpoint("no pod is ready", status=503, body={})

    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(ContextCache, "models", still_loading)
    ended = CliRunner().invoke(app, ["login", "http://a"], input="a-key\n")

    assert (ended.exit_code, "no model yet" in ended.output + ended.stderr) == (0, True)
    assert place.find_place("http://a", None) == ("http://a", "a-key")


async def test_login_keeps_the_key_for_its_owner_alone(cli):
    url = cli.url
    ended = await cli("login", url, typed=KEY + "\n", CONTEXT_CACHE_URL="", CONTEXT_CACHE_API_KEY="")
    file = cli.home / "context-cache" / "config.toml"
    listed = await cli("ls")
    mode = stat.S_IMODE(file.stat().st_mode)
    file.chmod(0o640)
    refused = await cli("ls")

    assert (ended.code, mode, listed.code) == (0, 0o600, 0)
    assert KEY not in ended.out + ended.err
    assert (refused.code, "other users can read" in refused.err) == (2, True)


async def test_a_key_that_nobody_owns_is_not_remembered(cli):
    ended = await cli("login", cli.url, typed="nobodys-key\n")

    assert ended.code == 1
    assert not (cli.home / "context-cache").exists()


async def test_a_command_that_waits_ends_on_ctrl_c(tmp_path):
    asked = asyncio.Event()

    async def keep_silent(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        asked.set()
        await reader.read()
        writer.close()

    async with await asyncio.start_server(keep_silent, "127.0.0.1", 0) as server:
        cli = CommandLine(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", tmp_path)
        process = await cli.start("show", "ctx_1")
        await asyncio.wait_for(asked.wait(), DEADLINE_S)
        process.send_signal(signal.SIGINT)
        _, err = await asyncio.wait_for(process.communicate(), DEADLINE_S)

    assert process.returncode == 130
    assert b"Traceback" not in err


async def test_a_chat_goes_on_line_by_line_until_an_empty_one(cli):
    session_id = await cli.created()
    ended = await cli("chat", session_id, typed="one\ntwo\n\nnot read\n")
    shown = await cli("show", session_id, "--json")

    assert (ended.code, ended.out) == (0, " yes\n yes\n")
    assert shown.json[0]["turns"] == 3


async def test_every_command_is_listed_and_so_is_every_part(cli):
    """Seen to fail with `serve` and `doctor` outside of the command line's own commands."""
    commands, parts = await cli("--help"), await cli("serve", "--help")
    doctor, part = await cli("doctor", "--help"), await cli("serve", "gateway", "--help")

    assert all(f" {name} " in commands.out for name in ("ls", "ask", "doctor", "serve"))
    assert all(f" {name} " in parts.out for name in PARTS)
    assert "--story" in doctor.out
    assert "GATEWAY_" in part.out
    assert {commands.code, parts.code, doctor.code, part.code} == {0}


async def test_the_version_is_the_distributions(cli):
    assert (await cli("--version")).out == f"context-cache {version('context-cache')}\n"


async def test_words_are_completed(cli):
    """Seen to fail with `doctor` started before typer sees it."""
    words = {"_CONTEXT_CACHE_COMPLETE": "complete_bash", "COMP_CWORD": "2"}
    option = await cli(COMP_WORDS="context-cache doctor --sto", **words)
    part = await cli(COMP_WORDS="context-cache serve gat", **words)

    assert (option.out.split(), part.out.split()) == (["--story"], ["gateway"])


async def test_ids_and_models_are_completed_from_the_server(cli):
    """Seen failing with arguments without completion: no words."""
    session_id = await cli.created()

    async def completed(*words):
        env = {"_CONTEXT_CACHE_COMPLETE": "complete_bash", "COMP_CWORD": str(len(words))}
        ended = await cli(COMP_WORDS=" ".join(("context-cache", *words)), **env)
        return ended.out.split(), ended.err

    assert await completed("ask", session_id[:8]) == ([session_id], "")
    assert await completed("rm", "ctx_other", session_id[:8]) == ([session_id], "")
    assert await completed("ask", "ctx_none") == ([], "")
    assert await completed("create", MODEL[:2]) == ([MODEL], "")
    assert await completed("ls", "--model", MODEL[:2]) == ([MODEL], "")
    assert await completed("--url", "http://127.0.0.1:1", "ask", "c") == ([], "")
