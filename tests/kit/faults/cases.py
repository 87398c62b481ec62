"""The cases of the fault matrix, one function a dimension: files, parts, crash points, links. Each returns a row.

Run in a subset by `make test` (test_file_faults.py, test_kills.py, test_network.py), whole by `make torture`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from context_manager.layout import CRASH_POINTS as MANAGER_POINTS
from kv_sidecar.crash_points import POINTS as SIDECAR_POINTS
from tests.kit.faults import arena, files
from tests.kit.faults.files import Kind
from tests.kit.faults.proxy import Proxy
from tests.kit.faults.world import BOUND_S, HANG_S, Answer, Row, Told, World
from tests.kit.links import CLIENT_LINKS
from vllm_plugin.crash_points import POINTS as CONNECTOR_POINTS
from vllm_plugin.turn.crash_points import POINTS as TURN_POINTS

AWAY = frozenset(
    {
        "store_unavailable",
        "no_ready_endpoint",
        "gateway_unavailable",
        "deadline_exceeded",
        "context_busy",
        "engine_error",
    }
)
"""Documented errors of a session call while some part is away: 503 and 409 with Retry-After, 502 broken off."""
RECOVERY_S = 120.0
"""A lease (5 s here), a reconnect (1 s), a probe (some s), a machine that stalls; tables show what it was."""
PLUGIN_TIMEOUT_S = 30.0
"""How long the local stack's Envoy waits for the gateway."""

TIERS = ("disk", "arena")
LINK_FAULTS: dict[str, Callable[[Proxy], None]] = {
    "cut": lambda proxy: proxy.cut(),
    "black hole": lambda proxy: proxy.blackhole(),
    "delay 300 ms": lambda proxy: proxy.delay(300),
    "delay 3 s": lambda proxy: proxy.delay(3000),
}


def file_case(world: World, tier: str, kind: Kind, fault: str) -> Row:
    """A stored file, or its copy in memory, goes wrong; the next turn, and the one after, equal cold.

    The KV is used again after that; where the disk's is good, in the next turn already.
    """
    case = f"file: {tier} {kind} {fault}"
    told, other = world.new(), world.new()
    world.stack.forget_prefixes()
    if tier == "arena":
        with world.copies_of(told, kind) as copies, world.copies_of(other, kind) as others:
            before = world.counters()
            arena.spoil(copies[0], others[0], fault)
    else:
        world.drop_memory()
        before = world.counters()
        files.FAULTS[fault](world.files_of(told, kind)[0], world.files_of(other, kind)[0])
    row = world.ask(case, told)
    if is_spoilt(fault):
        world.wait_moved(before, row)
    _heals(world, told, row)
    return row


def is_possible(tier: str, kind: Kind, fault: str) -> bool:
    """Whether a tier has such files, and they can suffer that."""
    return tier == "disk" or (kind != "manifest" and fault in arena.FAULTS)


def is_spoilt(fault: str) -> bool:
    """Whether the file cannot be used any more. A running sidecar knows by its index how long a context lives."""
    return fault not in files.HARMLESS and fault != "expire"


def _heals(world: World, told: Told, row: Row) -> None:
    """Ask on until a turn is restored from the sidecar; a busy machine may miss a deadline, not three in a row."""
    sources, before = [row.outcome], world.counters()
    for _ in range(3):
        world.wait_sealed(told)
        world.stack.forget_prefixes()
        after = world.ask(row.case, told)
        row.faults += after.faults
        sources.append(after.outcome)
        if after.outcome in ("host", "disk"):
            break
    else:
        row.faults.append(f"KV is never used again: {after.context}, {world.moved(before)}")
    row.outcome = ", ".join(sources)


def recover(world: World, told: Told, row: Row, *, errors: frozenset[str] = AWAY) -> None:
    """Ask until a turn is answered; what comes before must be documented. Notes how long it took."""
    began_s = time.monotonic()
    while True:
        after = world.ask(row.case, told, errors=errors)
        row.faults += after.faults
        if after.outcome in ("cold", "host", "disk", "device", "peer") or after.faults:
            break
        if time.monotonic() - began_s > RECOVERY_S:
            row.faults.append(f"no answer {RECOVERY_S:.0f} s after it healed: {after.outcome}")
            break
        time.sleep(0.25)
    row.recovery_s = time.monotonic() - began_s
    row.outcome += f", then {after.outcome}"


def link_case(world: World, link: str, fault: str) -> Row:
    """A link fails before a turn: its answer is the cold one or a documented error, and it heals without a restart."""
    told = world.new()
    world.stack.forget_prefixes()
    before = world.counters()
    proxy = world.stack.links.proxies[link]
    errors = AWAY | {"status 0"} if link in CLIENT_LINKS else AWAY
    with _patience(world, link, fault):
        LINK_FAULTS[fault](proxy)
        try:
            row = world.ask(f"link: {link} {fault}", told, errors=errors)
        finally:
            proxy.heal()
    _note_moved(world, before, row)
    recover(world, told, row)
    return row


def _note_moved(world: World, before: dict[str, float], row: Row) -> None:
    """Note which counters of faults grew; one must, where a turn was refused or computed for want of its KV."""
    if row.outcome in ("store_unavailable", "cold"):
        world.wait_moved(before, row)
    else:
        row.moved = ", ".join(world.moved(before))


@contextmanager
def _patience(world: World, link: str, fault: str) -> Iterator[None]:
    """Await an answer no longer than a front, or the client itself, lets it be awaited.

    Nothing of ours can tell a client anything whose own link is silent: it waits as long as a front would.
    """
    if fault == "black hole" and link in ("gateway-turn", "turn-engine"):
        world.bound_s = world.idle_timeout_s
    elif link in CLIENT_LINKS:
        world.bound_s = world.patience_s = world.idle_timeout_s
    try:
        yield
    finally:
        world.bound_s, world.patience_s = BOUND_S, HANG_S


def link_mid_turn_case(world: World, link: str, fault: str) -> Row:
    """A link fails while an answer is being made; it may break the answer, and never the next one."""
    told = world.new()
    proxy = world.stack.links.proxies[link]
    case = f"link: {link} {fault} in mid-turn"
    with _patience(world, link, fault):
        row = during_turn(world, case, told, lambda: LINK_FAULTS[fault](proxy), after=proxy.heal)
    recover(world, told, row)
    return row


def during_turn(
    world: World, case: str, told: Told, change: Callable[[], object], *, after: Callable[[], object] | None = None
) -> Row:
    """Ask a long turn, let something happen in the middle of it, and take the answer, whole or broken."""
    answers: list[Answer] = []
    new = world.ids(5)
    thread = threading.Thread(target=lambda: answers.append(world.turn(told, new, max_tokens=60)))
    thread.start()
    time.sleep(0.1 + 0.4 * world.rng.random())
    try:
        change()
        thread.join(40)
    finally:
        if after is not None:
            after()
    thread.join(HANG_S)
    if thread.is_alive():
        return Row(case, "hung", HANG_S, faults=["the turn hung"])
    (answer,) = answers
    if answer.status == 200:
        return world.judge(case, told, answer)
    # A broken connection is what a process that dies leaves; the next turn is what counts.
    return Row(case, answer.code or f"status {answer.status}", answer.duration_s)


def stop_case(world: World, part: str) -> Row:
    """A part stands still (SIGSTOP) during a turn, then goes on."""
    told = world.new()
    world.stack.forget_prefixes()
    before = world.counters()
    world.bound_s = PLUGIN_TIMEOUT_S if part == "gateway" else BOUND_S
    world.stack.stop(part)
    try:
        row = world.ask(f"stop: {part}", told, errors=AWAY)
    finally:
        world.stack.cont(part)
        world.bound_s = BOUND_S
    _note_moved(world, before, row)
    recover(world, told, row)
    return row


def kill_case(world: World, part: str) -> Row:
    """A part is gone (SIGKILL) when a turn comes, and started after it."""
    told = world.new()
    world.stack.forget_prefixes()
    before = world.counters()
    world.stack.kill(part)
    try:
        row = world.ask(f"kill: {part}", told, errors=AWAY)
    finally:
        world.start(part)
    world.wait_ready()
    _note_moved(world, before, row)
    recover(world, told, row)
    return row


def kill_mid_turn_case(world: World, part: str, kill: Callable[[], object] | None = None, *, name: str = "") -> Row:
    """A part is killed in the middle of a turn and started again; nothing acknowledged is lost."""
    told = world.new()
    case, killed = f"kill in mid-turn: {name or part}", kill or (lambda: world.stack.kill(part))
    # It must be there again before an answer that was whole all the same is compared with the engine's own.
    row = during_turn(world, case, told, killed, after=lambda: world.revive(part))
    recover(world, told, row)
    return row


def part_of(point: str) -> str:
    """Return the part that passes a crash point."""
    return {"connector": "engine"}.get(point.partition(".")[0], point.partition(".")[0])


POINTS = (*SIDECAR_POINTS, *MANAGER_POINTS, *CONNECTOR_POINTS, *TURN_POINTS)
"""Every point of every package, whoever adds one."""


def point_case(world: World, point: str, *, stop: bool = False) -> Row:
    """A part dies (or stands still) at a point that a conversation passes; afterwards nothing acknowledged is lost."""
    part, case = part_of(point), f"{'stop' if stop else 'kill'} at {point}"
    told, doomed = world.new(), world.new()
    _prepare(world, told, point)
    world.stack.forget_prefixes()
    world.stack.arm(point, stop=stop)
    row = Row(case, "", 0.0)
    for step in _steps(world, told, doomed):
        began_s = time.monotonic()
        status = step()
        row.beyond_s = max(row.beyond_s, time.monotonic() - began_s)
        row.outcome = f"{row.outcome} {status}".strip()
        if not world.stack.crash_file.exists():
            break
    else:
        # What runs in the background passes it a moment later.
        deadline_s = time.monotonic() + 10
        while world.stack.crash_file.exists() and time.monotonic() < deadline_s:
            time.sleep(0.05)
    if world.stack.disarm():
        row.outcome += " (not passed)"
        row.was_passed = False
    elif stop:
        world.stack.cont(part)
    else:
        world.revive(part)
    if row.beyond_s > HANG_S / 2:
        row.faults.append(f"a call took {row.beyond_s:.0f} s")
    recover(world, told, row)
    return row


def _prepare(world: World, told: Told, point: str) -> None:
    """Make stored bytes wrong where the point is on the way of noticing that."""
    for kind in files.KINDS:
        if point == f"sidecar.{kind}.quarantine":
            files.flip_data_bit(world.files_of(told, kind)[-1], world.files_of(told, kind)[-1])
            world.drop_memory()


def _steps(world: World, told: Told, doomed: Told) -> list[Callable[[], int]]:
    """What a client does, in an order that passes every point of one pod."""
    return [
        lambda: world.turn(told, world.ids(5)).status,
        lambda: world.create().status,
        lambda: world.drop_stream(told),
        lambda: world.call("PATCH", f"/v1/context/{told.session_id}", {"ttl": 7200}).status,
        lambda: world.call("POST", f"/v1/context/{doomed.session_id}/rewind", {"generation": 1}).status,
        lambda: world.call("DELETE", f"/v1/context/{doomed.session_id}").status,
        lambda: world.call("POST", f"/v1/context/{told.session_id}/fork", {}).status,
        lambda: world.call("GET", "/v1/context").status,
    ]


def full_disk_case(world: World, name: str, fill: Callable[[], object], free: Callable[[], object]) -> Row:
    """No room: turns are answered from what is stored, saves stop, are counted, and resume without a restart."""
    told = world.new()
    world.stack.forget_prefixes()
    before = world.counters()
    fill()
    try:
        row = world.ask(f"disk: {name}", told)
        other = world.new(sealed=False)
        row.faults += world.ask(row.case, other).faults
        world.wait_moved(before, row)  # now: the engine tells what it counted after its last step with the next one
    finally:
        free()
    # The turns before were not saved: this one is.
    row.faults += world.ask(row.case, told).faults
    _heals(world, told, row)
    return row


def _is_read(world: World, contexts: list[Told], row: Row) -> None:
    """Restore one of these contexts; a busy machine may miss a deadline, not of all."""
    for told in contexts:
        world.stack.forget_prefixes()
        after = world.ask(row.case, told)
        row.faults += after.faults
        if after.outcome in ("host", "disk"):
            return
    row.faults.append("no KV was read")


def slow_disk_case(world: World, slow: Callable[[], object], heal: Callable[[], object]) -> Row:
    """Every write and sync takes long: turns do not wait for it, KV is read on, and what was slow is stored later."""
    told, resting = world.new(), [world.new() for _ in range(3)]
    world.stack.forget_prefixes()
    slow()
    try:
        row = world.ask("disk: slow", told)
        other = world.new(sealed=False)
        row.faults += world.ask(row.case, other).faults
        _is_read(world, resting, row)
    finally:
        heal()
    row.faults += world.ask(row.case, told).faults
    _heals(world, told, row)
    return row


def clock_case(
    world: World, module: str, shift_ms: int, order: Callable[[str, int], object], *, errors: frozenset[str] = AWAY
) -> Row:
    """A part's clock is wrong during a turn, and right again after it: never a wrong answer, never a hang."""
    told = world.new()
    world.stack.forget_prefixes()
    order(module, shift_ms)
    try:
        # As long as orders take to be seen, and a collector's or sweeper's pass at the wrong time.
        time.sleep(2)
        row = world.ask(f"clock: {module} {shift_ms / 1000:+.0f} s", told, errors=errors)
        created = world.create()
        row.outcome += f" (create {created.status} {created.code})"
        if created.status != 200 and created.code not in errors:
            row.faults.append(f"create: {created.status} {created.code}")
    finally:
        order(module, 0)
    if row.outcome.startswith("context_expired"):
        return row
    time.sleep(0.1)
    recover(world, told, row, errors=errors)
    return row
