"""Telling a process from a later one with the same pid."""

import dataclasses
import os
import sys

import pytest

from deploy.local.processes import (
    ProcessName,
    ProcessStat,
    is_alive,
    kill_session,
    name_of,
    read_stat,
    session_members,
    start_process,
)
from tests.kit.until import wait_until

NEVER_A_PID = 2**22 + 1  # above the kernel's largest


def test_a_stat_line_is_read_past_a_name_with_spaces_and_parentheses():
    line = "77 (a) b (c)) S 1 70 66 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 4321 1000 2000"

    assert ProcessStat.parse(line) == ProcessStat(state="S", num_threads=1, session=66, started_ticks=4321)


def test_this_process_is_alive_under_its_own_name():
    assert is_alive(name_of(os.getpid()))


def test_a_pid_of_another_process_of_another_boot_or_of_none_is_not_alive():
    mine = name_of(os.getpid())
    boot, _, ticks = mine.started.rpartition(":")
    for name in (
        dataclasses.replace(mine, started=f"{boot}:1"),
        dataclasses.replace(mine, started=f"another-boot:{ticks}"),
        ProcessName(NEVER_A_PID, "boot:1"),
    ):
        assert not is_alive(name), name
        assert session_members(name) == [], name


def test_a_process_whose_first_thread_has_ended_is_there_until_the_others_have(tmp_path):
    """It has its ports as long. Seen failing: a part that was killed was started again while they were taken."""
    code = (
        "import ctypes, threading, time\n"
        "threading.Thread(target=time.sleep, args=(60,)).start()\n"
        "ctypes.CDLL(None).pthread_exit(None)\n"
    )
    child = start_process([sys.executable, "-c", code], env=os.environ, cwd=tmp_path, log=tmp_path / "log")
    name = name_of(child.pid)
    try:
        wait_until(lambda: (read_stat(child.pid) or pytest.fail("it has ended")).state == "Z", what="a zombie")

        assert (is_alive(name), session_members(name)) == (True, [child.pid])
    finally:
        kill_session(name, child=child)

    assert not is_alive(name)
