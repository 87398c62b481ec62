"""The tools that make faults: a fault that does nothing would prove everything."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from contextcache.errors import CorruptBlock
from contextcache.v1 import kv_sidecar_pb2 as pb
from kv_sidecar.client import BlockMeta
from tests.kit.engine_rank import EngineRank
from tests.kit.faults import arena, files
from tests.kit.faults.clock_shift import Interposed
from tests.kit.faults.disk import limit_file_size, small_disk
from tests.kit.faults.proxy import Proxy
from tests.kit.kv_blocks import (
    BLOCK_TOKENS,
    block_file_bytes,
    open_block_file,
    planned,
)
from tests.kit.sidecar_process import SidecarProcess
from tests.kit.until import wait_until

DEADLINE_S = 30


class Echo:
    """Answers every chunk with itself, on TCP or a Unix socket."""

    def __init__(self, path=None):
        self.listener = socket.create_server(("127.0.0.1", 0)) if path is None else socket.socket(socket.AF_UNIX)
        if path is not None:
            self.listener.bind(str(path))
            self.listener.listen()
        name = self.listener.getsockname()
        self.address = f"unix://{name}" if path is not None else "{}:{}".format(*name)
        self.threads = [threading.Thread(target=self.accept)]
        self.threads[0].start()

    def accept(self):
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self.answer, args=(client,))
            thread.start()
            self.threads.append(thread)

    def answer(self, client):
        with client:
            try:
                while data := client.recv(1 << 16):
                    client.sendall(data)
            except OSError:
                return

    def close(self):
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for thread in self.threads:
            thread.join(DEADLINE_S)


@pytest.fixture(params=["tcp", "unix"])
def echo(request, tmp_path):
    server = Echo(tmp_path / "echo.sock" if request.param == "unix" else None)
    yield server
    server.close()


@pytest.fixture
def proxy(echo, tmp_path):
    is_unix = echo.address.startswith("unix://")
    between = Proxy(echo.address, listen=f"unix://{tmp_path}/proxy.sock" if is_unix else "")
    between.start()
    yield between
    between.close()


def connect(proxy, timeout_s=DEADLINE_S):
    if proxy.address.startswith("unix://"):
        client = socket.socket(socket.AF_UNIX)
        client.settimeout(timeout_s)
        try:
            client.connect(proxy.address.removeprefix("unix://"))
        except OSError:
            client.close()
            raise
        return client
    host, port = proxy.address.split(":")
    return socket.create_connection((host, int(port)), timeout=timeout_s)


def said(client, data):
    client.sendall(data)
    answer = b""
    while len(answer) < len(data):
        answer += (chunk := client.recv(1 << 16))
        if not chunk:
            break
    return answer


def test_a_healthy_link_carries_bytes_both_ways_and_counts_them(proxy):
    data = os.urandom(300_000)
    with connect(proxy) as client:
        # In pieces: two ends that only send would wait for each other.
        answer = b"".join(said(client, data[at : at + 10_000]) for at in range(0, len(data), 10_000))

    assert answer == data
    assert (proxy.bytes_sent, proxy.bytes_received, proxy.num_connections) == (len(data), len(data), 1)
    wait_until(lambda: proxy.num_open == 0, what="the connection is closed")


def test_a_cut_link_breaks_what_is_open_refuses_what_is_new_and_heals_under_the_same_address(proxy):
    address = proxy.address
    with connect(proxy) as client:
        assert said(client, b"before") == b"before"

        proxy.cut()

        assert ended(client)
        with pytest.raises(OSError):
            connect(proxy)
    proxy.heal()
    assert proxy.address == address
    with connect(proxy) as client:
        assert said(client, b"after") == b"after"


def ended(client):
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


def test_refusing_leaves_open_connections_alone(proxy):
    with connect(proxy) as client:
        assert said(client, b"before") == b"before"

        proxy.refuse()

        with pytest.raises(OSError):
            connect(proxy)
        assert said(client, b"still") == b"still"


def test_a_black_hole_takes_everything_answers_nothing_and_delivers_it_when_it_heals(proxy):
    with connect(proxy) as old:
        assert said(old, b"before") == b"before"

        proxy.blackhole()
        with connect(proxy) as new:
            for client in (old, new):
                client.sendall(b"hello")
                client.settimeout(0.3)
                with pytest.raises(TimeoutError):
                    client.recv(1)
                client.settimeout(DEADLINE_S)
            proxy.heal()

            assert old.recv(100) == b"hello"
            assert new.recv(100) == b"hello"


def test_a_lost_connection_stays_silent_for_ever_while_new_ones_work(proxy):
    with connect(proxy) as old:
        assert said(old, b"before") == b"before"

        proxy.lose()
        proxy.heal()

        old.sendall(b"hello")
        old.settimeout(0.3)
        with pytest.raises(TimeoutError):
            old.recv(1)
        with connect(proxy) as new:
            assert said(new, b"after") == b"after"


def test_a_delay_holds_each_direction_back_until_it_heals(proxy):
    with connect(proxy) as client:
        said(client, b"warm")
        proxy.delay(200)
        begun_s = time.monotonic()
        assert said(client, b"slow") == b"slow"
        slow_s = time.monotonic() - begun_s
        proxy.heal()

        assert said(client, b"fast") == b"fast"
        assert slow_s >= 0.4


def test_a_target_that_is_not_there_is_an_end_for_the_client_not_for_the_proxy(proxy, echo):
    healthy, proxy.target = proxy.target, "127.0.0.1:1"
    # The end may come while the client is still connecting.
    with contextlib.suppress(ConnectionResetError), connect(proxy) as client:
        assert ended(client)
    wait_until(lambda: proxy.num_refused_by_target == 1, what="the target has refused")

    proxy.target = healthy
    with connect(proxy) as client:
        assert said(client, b"after") == b"after"


@pytest.fixture
def two_blocks(tmp_path):
    """Two block files of the same shape with other tokens and other bytes."""
    return [write_tail(tmp_path, number) for number in (1, 2)]


def write_tail(directory, number):
    meta = BlockMeta("tail", "ref_" + f"{number:032x}", "", "demo", "f" * 64, 0, (number, number + 1))
    path = directory / meta.key.file_name
    path.write_bytes(block_file_bytes(meta, fill=number))
    return path


def opens(path, meta):
    try:
        open_block_file(path).verify(meta)
    except (OSError, CorruptBlock):
        return False
    return True


@pytest.mark.parametrize("name", sorted(set(files.FAULTS) - files.HARMLESS - {"become_fifo", "expire"}))
def test_every_file_fault_spoils_the_file_or_changes_its_bytes(two_blocks, name):
    path, other = two_blocks
    block = open_block_file(path)

    files.FAULTS[name](path, other)

    if name in ("swap_data", "rewrite_data"):
        # In order by itself: only somebody who knows what the bytes should be can tell.
        assert opens(path, block.meta)
        assert (open_block_file(path).pages != block.pages).any()
    else:
        assert not opens(path, block.meta)
    files.clear_away(path)
    assert not os.path.lexists(path)


@pytest.mark.parametrize("name", ["flip_data_bit", "flip_last_bit", "flip_header_bit", "flip_length_bit"])
def test_a_flip_changes_one_bit_and_nothing_else(two_blocks, name):
    path, other = two_blocks
    before = path.read_bytes()

    files.FAULTS[name](path, other)

    after = path.read_bytes()
    changed = [(a ^ b) for a, b in zip(before, after, strict=True) if a != b]
    assert [bits.bit_count() for bits in changed] == [1]


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory):
    process = SidecarProcess(
        tmp_path_factory.mktemp("sidecar"), block_tokens=BLOCK_TOKENS, memory_limit_bytes=1 << 16, spare_ms=0
    )
    process.start()
    yield process
    process.kill()


@pytest.fixture
def rank(sidecar):
    with contextlib.closing(EngineRank(sidecar.address)) as rank:
        yield rank


def test_memory_that_is_dropped_is_empty_and_is_filled_again(sidecar, rank):
    new = rank.save(tuple(range(50)))
    assert rank.load(new) == {pb.TIER_HOST}
    with arena.Onlooker(sidecar.address) as seen:
        seen.drop_all()

    assert rank.load(new) == {pb.TIER_DISK}
    assert rank.load(new) == {pb.TIER_HOST}


@pytest.mark.parametrize("name", arena.FAULTS)
def test_every_fault_of_a_slot_spoils_the_copy_and_leaves_the_file_alone(sidecar, rank, name):
    new, other = (rank.save((number, number + 1)) for number in (3, 5))
    manifest, others = (planned(one, block_tokens=BLOCK_TOKENS) for one in (new, other))
    with arena.Onlooker(sidecar.address) as seen, seen.copies(manifest) as mine, seen.copies(others) as theirs:
        ((key, copy),), (other_copy,) = mine.items(), theirs.values()
        (path,) = (path for path in sidecar.block_files() if path.name == key.file_name)
        assert bytes(copy) == path.read_bytes()

        arena.spoil(copy, other_copy, name)

        assert bytes(copy) != path.read_bytes()
    # What goes in frames the sidecar compares itself.
    with contextlib.closing(EngineRank(sidecar.address, frames=True)) as far:
        assert far.load(new) == {pb.TIER_DISK}
    assert rank.load(new) == {pb.TIER_HOST}


def test_a_small_disk_fills_up_refuses_and_takes_again_when_freed(tmp_path):
    with small_disk(tmp_path / "disk", size_bytes=1 << 20) as disk:
        if disk is None:
            pytest.skip("mounting is not allowed here")
        disk.fill(leave_bytes=8192)
        assert disk.free_bytes <= 8192
        with pytest.raises(OSError, match="No space left"):
            (disk.directory / "more").write_bytes(bytes(1 << 16))

        disk.free()

        (disk.directory / "more").write_bytes(bytes(1 << 16))
    assert not os.path.ismount(tmp_path / "disk")


WRITER = """
import sys
for line in sys.stdin:
    try:
        open(sys.argv[1], "wb").write(bytes(int(line)))
        print("written", flush=True)
    except OSError as exc:
        print(exc.errno, flush=True)
"""


def test_a_limit_on_a_running_process_is_felt_and_lifted_without_a_restart(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path / "out")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    ) as process:

        def write(size):
            process.stdin.write(f"{size}\n")
            return process.stdout.readline().strip()

        assert write(10_000) == "written"
        limit_file_size(process.pid, 4096)
        assert write(10_000) == "27"  # EFBIG
        limit_file_size(process.pid, None)
        assert write(10_000) == "written"


OBEDIENT = """
import os, sys, time
for line in sys.stdin:
    begun = time.monotonic()
    descriptor = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY)
    os.write(descriptor, b"x")
    os.fsync(descriptor)
    print(time.time(), time.time_ns(), time.monotonic() - begun, flush=True)
"""


def test_orders_shift_one_processs_clock_and_slow_its_disk_until_they_are_taken_back(tmp_path):
    (tmp_path / "obedient.py").write_text(OBEDIENT)
    orders = Interposed(tmp_path / "orders")
    orders.environment["PYTHONPATH"] += os.pathsep + str(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-m", "obedient", str(tmp_path / "out")],
        env=os.environ | orders.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    ) as process:

        def ask():
            process.stdin.write("\n")
            seconds, nanoseconds, duration = map(float, process.stdout.readline().split())
            assert seconds == pytest.approx(nanoseconds / 1e9, abs=1)
            return seconds - time.time(), duration

        orders.shift_clock("somebody_else", 3_600_000)
        assert abs(ask()[0]) < 60
        orders.shift_clock("obedient", -3_600_000)
        wait_until(lambda: abs(ask()[0] + 3600) < 60, what="the clock is an hour behind")
        orders.slow_disk("obedient", write_ms=100, fsync_ms=300)
        wait_until(lambda: ask()[1] >= 0.4, what="the disk is slow")
        assert abs(ask()[0] + 3600) < 60
        orders.heal()
        wait_until(lambda: abs(ask()[0]) < 60, what="the clock is right")
    assert process.returncode == 0


def test_a_fifo_stops_a_plain_reader_for_ever(two_blocks):
    path, other = two_blocks
    files.become_fifo(path, other)
    with subprocess.Popen([sys.executable, "-c", "import sys; open(sys.argv[1]).read()", str(path)]) as reader:
        with pytest.raises(subprocess.TimeoutExpired):
            reader.wait(timeout=1)
        reader.send_signal(signal.SIGKILL)
