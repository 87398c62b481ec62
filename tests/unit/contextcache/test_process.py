"""What every part does around its work: settings and their refusal, logs, signals, crash points."""

import asyncio
import json
import logging
import os
import signal
import sys
from contextlib import contextmanager

import pytest
from pydantic import Field
from pydantic_settings import SettingsConfigDict

from contextcache.process import crash_points
from contextcache.process.logs import set_up_logs, show_logs_of
from contextcache.process.run import run_part, run_until_signalled, settings_or_exit, wants_help
from contextcache.process.settings import ProcessSettings, read_secret


class Settings(ProcessSettings):
    model_config = SettingsConfigDict(env_prefix="SOME_")

    port: int = Field(8000, description="where it listens")
    names: list[str] = Field([], description="whom it knows")


@contextmanager
def no_other_logs():
    """Nobody handles the root's records but who does so in the block; pytest's own handlers are back after it."""
    root = logging.getLogger()
    before = root.handlers[:], root.level
    root.handlers.clear()
    try:
        yield
    finally:
        root.handlers[:], root.level = before


def test_help_names_every_variable_and_any_other_argument_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["part"])
    assert wants_help(Settings, "Serves.") is False

    monkeypatch.setattr(sys, "argv", ["part", "--help"])
    assert wants_help(Settings, "Serves.") is True
    assert "SOME_PORT (default 8000)\n      where it listens" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["part", "--port", "1"])
    with pytest.raises(SystemExit, match="2"):
        wants_help(Settings, "Serves.")


@pytest.mark.parametrize(("name", "value"), [("SOME_PORT", "hunter2"), ("SOME_NAMES", "[hunter2")])
def test_a_wrong_variable_is_named_and_what_it_holds_is_not_repeated(monkeypatch, capsys, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match="2"):
        settings_or_exit(Settings)

    told = capsys.readouterr().err
    assert name.lower().removeprefix("some_") in told.lower()
    assert "hunter2" not in told


def test_a_log_line_is_one_json_object_with_its_fields_and_its_exception(capsys):
    with no_other_logs():
        set_up_logs("INFO")
        try:
            {}["lost"]
        except KeyError:
            logging.getLogger("part").exception("it failed\nhere", extra={"session": "ctx_1", "path": os})
        logging.getLogger("part").debug("nobody asked")

    (line,) = capsys.readouterr().err.splitlines()
    told = json.loads(line)
    assert (told["level"], told["logger"], told["event"], told["session"]) == (
        "ERROR",
        "part",
        "it failed\nhere",
        "ctx_1",
    )
    assert told["time"].endswith("Z")
    assert "KeyError: 'lost'" in told["exception"]
    assert set(told) == {"time", "level", "logger", "event", "session", "path", "exception"}


def test_a_guest_in_another_process_shows_its_logs_only_where_nobody_does(capsys):
    with no_other_logs():
        show_logs_of("guest")
        show_logs_of("guest")
        logging.getLogger("guest.room").info("hello", extra={"number": 1})

    (line,) = capsys.readouterr().err.splitlines()
    assert json.loads(line)["number"] == 1
    logging.getLogger("guest").handlers.clear()


def test_a_signal_is_told_to_the_part_which_then_ends_by_itself():
    ended = []

    async def serve(stop):
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(30):
            await stop.wait()
        ended.append("drained")

    run_until_signalled(serve)

    assert ended == ["drained"]


def test_a_part_that_cannot_start_says_why_and_exits_with_1(capsys, monkeypatch):
    monkeypatch.setattr("resource.setrlimit", lambda *_: None)

    async def serve(_stop):
        raise OSError("the port is taken")

    with no_other_logs(), pytest.raises(SystemExit, match="1"):
        run_part("gateway", serve, log_level="INFO")

    told = json.loads(capsys.readouterr().err)
    assert (told["event"], told["error"]) == ("gateway cannot start", "the port is taken")


def test_a_short_secret_is_refused_without_being_shown(tmp_path):
    (tmp_path / "secret").write_bytes(b"hunter2\n")
    with pytest.raises(ValueError, match="has 7 bytes") as refused:
        read_secret(tmp_path / "secret")

    assert "hunter2" not in str(refused.value)


def test_a_crash_point_is_obeyed_once_at_the_passing_that_was_asked_for(tmp_path, monkeypatch):
    orders = tmp_path / "crash"
    killed = []
    monkeypatch.setattr(os, "kill", lambda _pid, number: killed.append(number))
    crash_points.crash_point("a")  # nobody has asked for anything
    monkeypatch.setattr(crash_points, "_FILE", str(orders))
    crash_points.crash_point("a")
    assert killed == []

    orders.write_text("a@2 stop")
    for passed in ("a", "b", "a", "a"):
        crash_points.crash_point(passed)
    assert killed == [signal.SIGSTOP]
    orders.write_text("b")
    crash_points.crash_point("b")
    assert killed == [signal.SIGSTOP, signal.SIGKILL]
    assert not orders.exists()
