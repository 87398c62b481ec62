"""The directory on disk: durable writing, putting aside, leftovers, and the lock that keeps a second process out.

Every change goes temp -> fsync -> rename -> fsync of the directory. `step` is called with `<verb> <file name>` before
each step and after the last, so that tests can stop the world between any two; in a real process it is a crash point.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import shutil
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from contextcache.errors import CorruptBlock, SidecarUnavailable, StorageFull
from contextcache.process.crash_points import VARIABLE
from kv_sidecar.crash_points import at_step
from kv_sidecar.tiers.store import Buffer

log = logging.getLogger(__name__)

Step = Callable[[str], None]
Result = TypeVar("Result")
_FAN_OUT = re.compile(r"[0-9a-f]{2}", re.ASCII)
MAX_QUARANTINED = 32
"""Files put aside for a person to look at; the oldest go first."""
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_UNREADABLE = {errno.EIO, errno.EBADMSG, errno.ENODATA, errno.EUCLEAN, errno.EACCES, errno.EPERM}
"""Faults of one file, which will be there at the next read too; others, such as too many open files, pass."""
_NO_FILE = {errno.ELOOP, errno.ENXIO, errno.ENOTDIR}
"""Errors of an open where a link, device or socket lies in the place of a file, or a file in that of a directory."""
_SHORT = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}
"""Errors of a short supply: they pass, and say nothing about the file."""


class DataDirectory:
    """`blocks/`, `tails/`, `manifests/`, `quarantine/` and `tmp/` under one root, owned by one process."""

    def __init__(
        self, root: Path, *, step: Step | None = None, statvfs: Callable[[Path], os.statvfs_result] = os.statvfs
    ) -> None:
        """`step`: None: a crash point where the process has any, else nothing."""
        self.root = root
        self._statvfs = statvfs
        self.tmp = root / "tmp"
        self._tmp = str(self.tmp)
        self.quarantine = root / "quarantine"
        self._step = step or (at_step if VARIABLE in os.environ else lambda _: None)
        self._count_lock, self._clearing = threading.Lock(), threading.Lock()
        self._unsynced: set[str] = set()
        """Directories that a power cut may take: they are new, and no file in them is durable yet."""
        self.num_quarantined = 0
        """Files put aside since the start."""
        self.on_quarantined: Callable[[], None] = lambda: None
        """Called in any thread for each of them."""
        self._lock: int | None = None

    def open(self) -> None:
        """Create missing directories, take the lock and remove unfinished writes. Raises OSError when it is locked."""
        self.root.mkdir(parents=True, exist_ok=True)
        self._lock = _open_lock(self.root / "lock")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            self.close()
            raise OSError(f"{self.root} is in use by another kv-sidecar") from exc
        make_real_directory(self.tmp)
        make_real_directory(self.quarantine)
        for entry in entries(self.tmp):
            remove_whatever(Path(entry.path))

    def inodes(self) -> tuple[int, int] | None:
        """Return how many files the filesystem still takes, and how many it has in all; None: it does not say."""
        try:
            found = self._statvfs(self.root)
        except OSError:
            return None
        return (found.f_favail, found.f_files) if found.f_files else None

    def close(self) -> None:
        """Give the lock back."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def publish(self, data: Buffer, final: Path | str) -> None:
        """Make `data` appear at `final`, whole and durable, or not at all. Raises StorageFull, OSError.

        Where a file was before, it may be either of the two after an error.
        """
        final = os.fspath(final)
        folder, _, name = final.rpartition("/")
        temporary = f"{self._tmp}/{name}.{os.urandom(8).hex()}"
        try:
            self._step(f"write {name}")
            _write_synced(temporary, data)
            self._clear_the_way(final, folder)
            self._step(f"rename {name}")
            is_new = not os.path.lexists(final)
            os.rename(temporary, final)  # noqa: PTH104  # paths are texts here: each block passes
        except OSError as exc:
            remove_whatever(Path(temporary))
            raise _full_or(exc) from exc
        try:
            self._step(f"sync {name}")
            _fsync_directory(folder)
        except OSError as exc:
            if is_new:  # no caller was told of the file, so it must not stay
                remove_whatever(Path(final))
            raise _full_or(exc) from exc
        self._step(f"published {name}")

    def remove(self, path: Path) -> None:
        """Remove a file if it is there; it may come back after a crash. A directory in its place is put aside."""
        self._step(f"unlink {path.name}")
        try:
            path.unlink(missing_ok=True)
        except NotADirectoryError:
            return  # its directory was replaced by a file
        except IsADirectoryError:
            self.put_aside(path)

    def remove_for_good(self, paths: Iterable[Path]) -> dict[Path, OSError]:
        """Remove files so that none comes back after a crash; return the errors of files that stay.

        Each directory is synced once.
        """
        failed: dict[Path, OSError] = {}
        removed: dict[Path, list[Path]] = {}
        for path in paths:
            try:
                self.remove(path)
            except OSError as exc:
                failed[path] = exc
            else:
                removed.setdefault(path.parent, []).append(path)
        for directory, gone in removed.items():
            try:
                self._step(f"sync-unlink {gone[0].name}")
                _fsync_directory(directory)
                self._step(f"unlinked {gone[0].name}")
            except OSError as exc:
                failed |= dict.fromkeys(gone, exc)
        return failed

    def put_aside(self, path: Path) -> None:
        """Move a bad file, or another thing in its place, into `quarantine/`, which keeps `MAX_QUARANTINED` files.

        A file in the place of its directory is moved instead. Raises OSError when the move fails.
        """
        while path.parent != self.root and not _is_directory(path.parent):
            path = path.parent
        self._step(f"quarantine {path.name}")
        aside = self.quarantine / path.name
        if path.is_symlink() or path.exists():
            remove_whatever(aside)
        try:
            path.rename(aside)
            os.utime(aside, follow_symlinks=False)
        except FileNotFoundError:
            return
        with self._count_lock:
            self.num_quarantined += 1
        self.on_quarantined()
        kept = sorted(self.quarantine.iterdir(), key=_modified_ns)
        for old in kept[:-MAX_QUARANTINED]:
            remove_whatever(old)

    def remove_leftovers(self, before_ms: int) -> int:
        """Remove unfinished and quarantined files last written before a Unix time in ms; return their bytes."""
        return remove_old(self.tmp, before_ms=before_ms) + remove_old(self.quarantine, before_ms=before_ms)

    def fan_out_files(self, name: str, *, is_ours: Callable[[str, str], bool]) -> tuple[list[str], int]:
        """Return the paths of files of `<name>/<2 hex>/` with a name of ours, and the number of other things there.

        `is_ours`: of the directory's and the file's name.

        A thing of such a name that is no file, or in the place of a directory of ours, is put aside: it would block a
        save for ever. Everything else is left alone. No link is followed. Raises OSError.
        """
        root = self.root / name
        make_real_directory(root)
        found: list[str] = []  # paths are texts here: a start reads 100 000
        strangers = 0
        for directory in entries(root):
            if not _FAN_OUT.fullmatch(directory.name):
                strangers += 1
            elif not directory.is_dir(follow_symlinks=False):
                self.put_aside_or_leave(Path(directory.path))
            else:
                for entry in entries(Path(directory.path)):
                    if not is_ours(directory.name, entry.name):
                        strangers += 1
                    elif entry.is_file(follow_symlinks=False):
                        found.append(entry.path)
                    else:
                        self.put_aside_or_leave(Path(entry.path))
        return found, strangers

    def put_aside_or_leave(self, path: Path) -> None:
        """Move something that cannot be a file of ours into quarantine; a start does not fail for it."""
        log.warning("not a file of ours: set aside", extra={"directory": path.parent.name})
        try:
            self.put_aside(path)
        except OSError:
            log.warning("file not set aside", exc_info=True)

    def _clear_the_way(self, final: str, folder: str) -> None:
        """Create a fan-out directory that outlives a crash; put aside a thing that blocks a rename."""
        for place in (folder.rpartition("/")[0], folder):
            if _is_directory(place) and place not in self._unsynced:
                continue
            directory = Path(place)
            with self._clearing:
                if not _is_directory(place):
                    self._unsynced.add(place)
                    if os.path.lexists(place):
                        self.put_aside(directory)
                    directory.mkdir(exist_ok=True)
                if place in self._unsynced:  # another thread may have been faster
                    _fsync_directory(directory.parent)
                    self._unsynced.remove(place)
        if _is_directory(final):
            self.put_aside(Path(final))


def _open_lock(path: Path) -> int:
    """Open the lock file; a thing in its place that is no file is removed."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    if regular_size(path) is None:
        remove_whatever(path)
    return os.open(path, flags, 0o600)


def _full_or(error: OSError) -> Exception:
    return StorageFull("the disk is full") if error.errno in _NO_ROOM else error


def _is_directory(path: Path | str) -> bool:
    """Return whether a directory lies there, and no link to one."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False


def _modified_ns(path: Path) -> int:
    try:
        return path.lstat().st_mtime_ns
    except FileNotFoundError:
        return 0  # another thread was faster


def _write_synced(path: str, data: Buffer) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640)
    try:
        view = memoryview(data)
        while view:  # one `write` takes at most 2 GiB and may take less
            view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _fsync_directory(path: Path | str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def entries(directory: Path) -> Iterator[os.DirEntry[str]]:
    """Yield the entries of a directory; none when it is a link or cannot be read. Raises OSError for `_SHORT`."""
    try:
        if directory.is_symlink():
            return
        with os.scandir(directory) as found:
            yield from found
    except OSError as exc:
        if exc.errno in _SHORT:
            raise  # its files would count as gone, and their contexts would be removed
        log.warning("directory unreadable", extra={"directory": directory.name})


def remove_whatever(path: Path) -> int:
    """Remove a file, link, FIFO, socket or a whole directory; return a file's bytes. Raises nothing."""
    try:
        status = path.lstat()
        if stat.S_ISDIR(status.st_mode):
            shutil.rmtree(path)
            return 0
        path.unlink()
    except FileNotFoundError:
        return 0
    except OSError:
        log.warning("leftover file not removed", extra={"directory": path.parent.name}, exc_info=True)
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


def remove_old(directory: Path, *, before_ms: int) -> int:
    """Remove entries last written before a Unix time in ms; return the bytes of the files."""
    removed_bytes = 0
    for entry in entries(directory):
        try:
            is_old = entry.stat(follow_symlinks=False).st_mtime_ns // 1_000_000 < before_ms
        except OSError:
            continue  # its owner was faster
        if is_old:
            removed_bytes += remove_whatever(Path(entry.path))
    return removed_bytes


def make_real_directory(path: Path) -> None:
    """Create a directory that outlives a crash; a file or link in its place is removed, never the target of a link.

    Raises OSError.
    """
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        log.warning("file in the place of a directory removed", extra={"directory": path.name})
        path.unlink()
    if not path.is_dir():
        path.mkdir(parents=True)
        _fsync_directory(path.parent)


def read_with(path: Path | str, read: Callable[[int, int], Result]) -> Result:
    """Return the result of `read`, called with a descriptor and the file's size. Every read of stored KV passes here.

    Never waits for a writer. Raises FileNotFoundError, CorruptBlock when something else lies there or the file cannot
    be read, SidecarUnavailable for a fault that passes.
    """
    try:
        descriptor, size_bytes = open_regular(path)
        try:
            return read(descriptor, size_bytes)
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        raise
    except OSError as exc:
        if exc.errno in _UNREADABLE:
            raise CorruptBlock("the file cannot be read") from exc
        raise SidecarUnavailable("the disk cannot be read") from exc


def open_regular(path: Path | str) -> tuple[int, int]:
    """Return a descriptor to read from, and the file's size in bytes.

    Raises FileNotFoundError, CorruptBlock when something else lies there, OSError.
    """
    try:
        # Without O_NONBLOCK the open of a FIFO waits for a writer, for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as exc:
        if exc.errno in _NO_FILE:
            raise CorruptBlock("the path is not a regular file") from exc
        raise
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise CorruptBlock("the path is not a regular file")
    return descriptor, status.st_size


def is_no_file(path: Path) -> bool:
    """Return whether something lies there that is no regular file. Raises OSError."""
    return regular_size(path) is None and os.path.lexists(path)


def regular_size(path: Path | str) -> int | None:
    """Return the size of a regular file in bytes; None when there is none, or something else. Raises OSError."""
    try:
        status = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None
