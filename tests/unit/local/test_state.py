"""What the stack remembers, on disk."""

import hashlib
import json
import stat

import pytest

from deploy.local.paths import StackPaths
from deploy.local.progress import StepFailed
from deploy.local.state import (
    RunningPart,
    make_secrets,
    mark_draining,
    read_settings,
    read_state,
    write_endpoints,
    write_part,
    write_settings,
)
from kv_sidecar.tiers.arena import SUFFIX


@pytest.fixture
def paths(tmp_path):
    return StackPaths(tmp_path)


def test_no_file_means_nothing_runs(paths):
    assert read_state(paths) == {}
    assert read_settings(paths) == {}


def test_parts_are_added_and_replaced_one_by_one(paths):
    write_part(paths, "redis", RunningPart(11, "redis://127.0.0.1:8010/0", "boot:1"))
    write_part(paths, "engine", RunningPart(12, "http://127.0.0.1:8013", "boot:2"))
    write_part(paths, "engine", RunningPart(13, "http://127.0.0.1:8013", "boot:3"))

    assert {name: part.pid for name, part in read_state(paths).items()} == {"redis": 11, "engine": 13}
    assert json.loads(paths.state.read_text())["redis"] == {
        "pid": 11,
        "url": "redis://127.0.0.1:8010/0",
        "started": "boot:1",
    }


def test_a_damaged_state_file_says_what_to_do(paths):
    paths.state.write_text('{"redis": {"pid"')

    with pytest.raises(StepFailed, match=r"state\.json is damaged .*make clean"):
        read_state(paths)


def test_settings_survive(paths):
    write_settings(paths, {"port": 8100, "dtype": "float32"})

    assert read_settings(paths) == {"port": 8100, "dtype": "float32"}


def test_files_leave_no_scratch_copy_behind(paths):
    write_settings(paths, {"port": 8100})

    assert [path.name for path in paths.root.iterdir()] == ["settings.json"]


def test_secrets_are_made_once_for_their_owner_only(paths):
    make_secrets(paths)
    first = paths.secret.read_text()
    make_secrets(paths)

    assert paths.secret.read_text() == first
    assert len(first) >= 32
    assert stat.S_IMODE(paths.secret.stat().st_mode) == 0o600
    assert stat.S_IMODE(paths.secret.parent.stat().st_mode) == 0o700


def test_api_keys_are_stored_as_hashes(paths):
    make_secrets(paths)
    stored = paths.api_keys.read_text()
    wanted = hashlib.sha256(b"test-key-1234567890").hexdigest()

    assert "test-key" not in stored
    assert {"sha256": wanted, "tenant": "demo"} in json.loads(stored)["keys"]
    assert stat.S_IMODE(paths.api_keys.stat().st_mode) == 0o600


def test_each_directory_has_its_own_sockets(tmp_path):
    first, second = StackPaths(tmp_path / "a"), StackPaths(tmp_path / "b")

    assert first.run != second.run
    assert first.run == StackPaths(tmp_path / "a").run


def test_the_socket_path_fits_however_deep_the_checkout_is(tmp_path):
    deep = StackPaths(tmp_path / ("d" * 100) / ("e" * 100))

    assert len(f"{deep.sidecar_socket('sidecar-3')}{SUFFIX}") < 107


def test_every_shell_finds_the_same_sockets(tmp_path, monkeypatch):
    before = StackPaths(tmp_path).run
    monkeypatch.setenv("TMPDIR", str(tmp_path / "elsewhere"))

    assert StackPaths(tmp_path).run == before


def test_one_engine_is_drained_and_given_work_again_and_the_others_are_not_touched(paths):
    write_endpoints(paths, [{"name": "engine-0", "draining": False}, {"name": "engine-1", "draining": False}])

    mark_draining(paths, "engine-1", draining=True)
    drained = json.loads(paths.endpoints.read_text())
    mark_draining(paths, "engine-1", draining=False)

    assert drained == [{"name": "engine-0", "draining": False}, {"name": "engine-1", "draining": True}]
    assert not any(entry["draining"] for entry in json.loads(paths.endpoints.read_text()))
