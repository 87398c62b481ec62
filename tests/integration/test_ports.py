"""The one port allocator of the tests: no number twice, whoever asks."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.ports import BLOCK, LAST, Ports

ROOT = Path(__file__).resolve().parents[2]
ASKING = "from tests.kit.ports import free_port\nprint(*(free_port() for _ in range(400)), flush=True)\ninput()"


def test_processes_that_ask_at_the_same_time_never_get_the_same_port():
    asking = [
        subprocess.Popen([sys.executable, "-c", ASKING], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(4)
    ]
    given = [process.stdout.readline().split() for process in asking]
    for process in asking:
        process.communicate(b"\n")

    assert [len(ports) for ports in given] == [400] * 4
    assert len({port for ports in given for port in ports}) == 1600


@pytest.fixture
def ports(tmp_path):
    """One block that no other test is given."""
    ports = Ports(tmp_path, range(LAST, LAST + BLOCK))
    yield ports
    ports.close()


def test_what_listens_already_is_passed_over_and_a_row_has_no_gap(ports):
    first = ports.free()
    with socket.create_server(("127.0.0.1", first + 3)):
        row = ports.free(20)

    assert row == first + 4


def test_a_block_is_one_holders_until_that_has_gone(ports, tmp_path):
    first = ports.free()
    other = Ports(tmp_path, range(LAST, LAST + BLOCK))
    with pytest.raises(AssertionError, match="all 1 blocks of ports are claimed"):
        other.free()
    ports.close()

    assert other.free() == first
    other.close()
