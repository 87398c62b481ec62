"""Files that change: read again, never worse than before."""

from __future__ import annotations

import asyncio
import logging
import os
import threading

import pytest

from contextcache.process.reloaded import LOOK_INTERVAL_S, Reloaded, read_bounded


class Number:
    """A file that holds a whole number, and the reader of it."""

    def __init__(self, path):
        self.path = path
        self.failures = 0
        self.now_s = 0.0
        self.path.write_text("1")
        self.file = Reloaded(
            path, read=self.read, name="number", on_failure=self.failed, monotonic_s=lambda: self.now_s
        )

    def read(self) -> int:
        return int(self.path.read_text())

    def failed(self) -> None:
        self.failures += 1


@pytest.fixture
def number(tmp_path):
    return Number(tmp_path / "number")


def test_a_changed_file_is_read_at_the_next_look(number):
    number.path.write_text("2")

    assert number.file.value == 1
    assert number.file.look()
    assert number.file.value == 2
    assert not number.file.look()


def test_the_current_value_is_looked_for_once_in_a_while(number):
    number.path.write_text("2")

    assert number.file.current() == 1
    number.now_s += LOOK_INTERVAL_S
    assert number.file.current() == 2


@pytest.mark.parametrize("spoil", ["text", "missing"])
def test_a_broken_file_keeps_the_last_good_value_until_it_is_whole(number, spoil):
    number.path.write_text("two") if spoil == "text" else number.path.unlink()

    assert not number.file.look()
    assert (number.file.value, number.failures) == (1, 1)
    number.path.write_text("3")
    assert number.file.look()
    assert number.file.value == 3


def test_a_file_that_stays_broken_is_told_once_and_counted_again_after_ten_seconds(number, caplog):
    number.path.write_text("two")
    with caplog.at_level(logging.WARNING):
        for _ in range(10):
            number.now_s += 1
            number.file.look()
        assert (number.failures, len(caplog.records)) == (1, 1)
        number.now_s += 1
        number.file.look()

    assert (number.failures, len(caplog.records)) == (2, 2)
    assert "number reload failed" in caplog.text


def test_a_file_that_was_half_written_is_read_again_though_its_version_is_the_same(number, monkeypatch):
    """Seen failing when the version of a file that could not be read was remembered."""
    monkeypatch.setattr("contextcache.process.reloaded._version", lambda path: (len(path.read_text()),))
    number.path.write_text("4x")
    assert not number.file.look()
    number.path.write_text("45")

    assert number.file.look()
    assert number.file.value == 45


def test_a_file_that_changes_while_it_is_read_is_read_again(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    for path in (first, second):
        path.write_text("a")
    reads = []

    def read():
        found = first.read_text()
        if not reads:
            for path in (first, second):
                path.write_text("bb")
        reads.append(found)
        return found + second.read_text()

    assert Reloaded(first, second, read=read, name="pair").value == "bbbb"


def test_files_that_never_stand_still_are_given_up(tmp_path):
    path = tmp_path / "file"
    path.write_text("")

    with pytest.raises(ValueError, match="faster than it can be read"):
        Reloaded(path, read=lambda: path.write_text(f"{path.read_text()}x"), name="file")


def test_a_file_without_a_good_content_is_refused_at_the_start(tmp_path):
    path = tmp_path / "number"

    with pytest.raises(FileNotFoundError):
        Reloaded(path, read=lambda: int(path.read_text()), name="number")
    path.write_text("x")
    with pytest.raises(ValueError, match="invalid literal"):
        Reloaded(path, read=lambda: int(path.read_text()), name="number")


@pytest.mark.looptime
async def test_files_are_looked_at_within_every_second_never_on_the_loop_and_also_after_a_fault(tmp_path, caplog):
    """Seen failing before: a large file was read and parsed by the request that found it changed."""
    loop, looked, threads = asyncio.get_running_loop(), asyncio.Event(), []
    number = Number(tmp_path / "number")
    read = number.file._read

    def reading():
        threads.append(threading.get_ident())
        loop.call_soon_threadsafe(looked.set)
        if len(threads) == 1:
            raise RuntimeError("a fault of our own")
        return read()

    number.file._read = reading
    number.path.write_text("2")
    following = asyncio.create_task(number.file.follow())
    await looked.wait()
    looked.clear()
    before_s = loop.time()
    await looked.wait()
    following.cancel()

    assert loop.time() - before_s < 1
    assert threading.get_ident() not in threads
    assert "number check failed" in caplog.text
    assert number.failures == 1


def test_only_a_regular_file_of_bounded_size_is_read(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    os.mkfifo(tmp_path / "pipe")

    assert read_bounded(path, 5) == b"12345"
    with pytest.raises(ValueError, match="larger than 4 bytes"):
        read_bounded(path, 4)
    with pytest.raises(ValueError, match="not a regular file"):
        read_bounded(tmp_path / "pipe", 5)
    with pytest.raises(FileNotFoundError):
        read_bounded(tmp_path / "none", 5)
