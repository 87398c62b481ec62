"""Telling a process from a later one with the same pid."""

import dataclasses
import os

from deploy.local.processes import ProcessName, ProcessStat, is_alive, name_of, session_members

NEVER_A_PID = 2**22 + 1  # above the kernel's largest


def test_a_stat_line_is_read_past_a_name_with_spaces_and_parentheses():
    line = "77 (a) b (c)) S 1 70 66 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 4321 1000 2000"

    assert ProcessStat.parse(line) == ProcessStat(state="S", session=66, started_ticks=4321)


def test_this_process_is_alive_under_its_own_name():
    assert is_alive(name_of(os.getpid()))


def test_a_reused_pid_is_somebody_else():
    mine = name_of(os.getpid())
    earlier = dataclasses.replace(mine, started=f"{mine.started.rpartition(':')[0]}:1")

    assert not is_alive(earlier)
    assert session_members(earlier) == []


def test_a_record_from_before_a_reboot_is_stale():
    mine = name_of(os.getpid())
    before = dataclasses.replace(mine, started=f"another-boot:{mine.started.rpartition(':')[2]}")

    assert not is_alive(before)
    assert session_members(before) == []


def test_a_pid_nobody_has_is_dead():
    gone = ProcessName(NEVER_A_PID, "boot:1")

    assert not is_alive(gone)
    assert session_members(gone) == []
