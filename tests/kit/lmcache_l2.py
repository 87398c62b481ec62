"""Our adapter for LMCache's second tier, in LMCache's own environment: a process that does what it is told.

    python -P lmcache_l2.py '<adapter_params as JSON>'

Speaks JSON lines, one order in, one answer out. It loads the adapter as LMCache's server does (type `plugin`) and calls
it as its controllers do: submit, wait for the event, ask for the result. `Adapter` is the caller's end.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

_MARK = "answer: "
_DEADLINE_S = 60
ROOT = Path(__file__).parents[2]
Key = tuple[str, str]
"""Salt, and chunk hash in hex."""


class Adapter:
    """The caller's end; bytes are strings of latin-1."""

    def __init__(self, environment: Path, **params: Any) -> None:
        command = [str(environment / "bin" / "python"), "-P", __file__, json.dumps(params)]
        env = {**os.environ, "PYTHONPATH": str(ROOT), "LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env, text=True
        )
        self.log: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.order("close")
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process.wait(60)

    def order(self, what: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"what": what, **arguments}) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith(_MARK):
                return json.loads(line.removeprefix(_MARK))
            self.log.append(line)
        raise AssertionError("the adapter's process ended:\n" + "".join(self.log[-40:]))

    def store(self, objects: dict[Key, str]) -> int:
        """Return the bytes that were saved; -1: not all."""
        return self.order("store", keys=list(objects), texts=list(objects.values()))  # type: ignore[no-any-return]

    def lookup(self, *keys: Key) -> list[bool]:
        return self.order("lookup", keys=keys)  # type: ignore[no-any-return]

    def load(self, *keys: Key, size_bytes: int) -> list[str | None]:
        """Return each object, or None where it was not loaded."""
        return self.order("load", keys=keys, size_bytes=size_bytes)  # type: ignore[no-any-return]

    def delete(self, *keys: Key) -> str:
        """Return the name of the error, or nothing."""
        return self.order("delete", keys=keys)  # type: ignore[no-any-return]


class _Room:
    """What the adapter takes of LMCache's memory objects."""

    def __init__(self, data: bytes) -> None:
        self.byte_array = memoryview(bytearray(data))


class _Served:
    """The adapter's end."""

    def __init__(self, params: dict[str, Any]) -> None:
        from lmcache.v1.distributed.l2_adapters.factory import create_l2_adapter_from_registry
        from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig

        named = {"module_path": "integrations.lmcache.second_tier", "class_name": "SidecarL2Adapter"}
        config = PluginL2AdapterConfig.from_dict({**named, "adapter_params": params})
        self._adapter = create_l2_adapter_from_registry(config)
        self._adapter.set_backend_identity("plugin")

    def store(self, *, keys: list[Key], texts: list[str]) -> int:
        rooms = [_Room(text.encode("latin-1")) for text in texts]
        task = self._adapter.submit_store_task(_keys(keys), rooms)
        self._wait(self._adapter.get_store_event_fd())
        return int(self._adapter.pop_completed_store_tasks()[task])

    def lookup(self, *, keys: list[Key]) -> list[bool]:
        task = self._adapter.submit_lookup_and_lock_task(_keys(keys), {})
        self._wait(self._adapter.get_lookup_and_lock_event_fd())
        bits = self._adapter.query_lookup_and_lock_result(task)
        assert self._adapter.query_lookup_and_lock_result(task) is None, "a result is given once"
        self._adapter.submit_unlock(_keys(keys))
        return [bits.test(number) for number in range(len(keys))]

    def load(self, *, keys: list[Key], size_bytes: int) -> list[str | None]:
        rooms = [_Room(bytes(size_bytes)) for _ in keys]
        task = self._adapter.submit_load_task(_keys(keys), rooms)
        self._wait(self._adapter.get_load_event_fd())
        bits = self._adapter.query_load_result(task)
        found = [bytes(room.byte_array).decode("latin-1") for room in rooms]
        return [text if bits.test(number) else None for number, text in enumerate(found)]

    def delete(self, *, keys: list[Key]) -> str:
        try:
            self._adapter.delete(_keys(keys))
        except Exception as exc:  # noqa: BLE001  # whatever LMCache would be told
            return type(exc).__name__
        return ""

    def usage(self) -> int:
        return int(self._adapter.get_usage().total_bytes_used)

    def close(self) -> bool:
        self._adapter.close()
        return True

    def _wait(self, fd: int) -> None:
        from lmcache.v1.platform.event_notifier import consume_fd

        ready, _, _ = select.select([fd], [], [], _DEADLINE_S)
        assert ready, "no event came"
        consume_fd(fd)


def _keys(keys: list[Key]) -> list[Any]:
    from lmcache.v1.distributed.api import ObjectKey

    return [ObjectKey(bytes.fromhex(digest), "m/odel", 0, 0, salt) for salt, digest in keys]


def main() -> None:
    served = _Served(json.loads(sys.argv[1]))
    for line in sys.stdin:
        order = json.loads(line)
        answer = getattr(served, order.pop("what"))(**order)
        sys.stdout.write(f"\n{_MARK}{json.dumps(answer)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
