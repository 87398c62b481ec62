"""`python -m tests.mutants`: every promise has a test that notices when it is broken.

The `.toml` files here list the mutants, by subject. Each is made in a copy of the tree, never in the tree itself, and
its tests must fail there; in a copy that nothing was changed in, all of them must pass.

Exit status 1 for a finding: a mutant lives, its text does not stand in its file exactly once, its tests do not run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.kit.seed import SEED, VARIABLE
from tests.mutants.mutant import Mutant, read_mutants

ROOT = Path(__file__).parents[2]
DEADLINE_S = 120
"""Of one mutant; its tests take seconds."""
_OPTIONS = (
    *("-x", "-q", "--no-header", "--tb=no", "-rfE", "--randomly-dont-reorganize"),
    *("-p", "no:cacheprovider", "-p", "no:schemathesis"),
)
_NOT_KILLED = {0: "LIVED", 2: "its tests cannot be imported", 4: "its tests are not there", -9: "its tests hang"}


def main(arguments: list[str] | None = None) -> int:
    """Make the mutants that were asked for; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--only", action="append", default=[], help="one mutant; may be given more than once")
    parser.add_argument("--lists", type=Path, default=Path(__file__).parent, help="directory of the lists")
    parser.add_argument("--root", type=Path, default=ROOT, help="the tree")
    parser.add_argument("--shard", metavar="K/N", default="0/1", help="every N-th mutant, from the K-th on")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="so many at a time")
    parser.add_argument("--seed", type=int, default=SEED, help="of what the tests draw")
    options = parser.parse_args(arguments)
    os.environ[VARIABLE] = str(options.seed)
    mutants = [mutant for mutant in read_mutants(options.lists) if not options.only or mutant.name in options.only]
    number, count = map(int, options.shard.split("/"))
    mutants = mutants[number::count]
    if not mutants:
        parser.error("there is no such mutant")
    return asyncio.run(_run(mutants, options.root, options.jobs))


async def _run(mutants: list[Mutant], root: Path, jobs: int) -> int:
    task, turns, began_s = asyncio.current_task(), asyncio.Semaphore(jobs), time.monotonic()
    assert task
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    width = max(len(mutant.name) for mutant in mutants)

    async def one(mutant: Mutant | None, base: Path) -> bool:
        async with turns:
            one_began_s = time.monotonic()
            is_well, said = await (_all_pass(mutants, base) if mutant is None else _dies(mutant, base))
        name, file = (mutant.name, mutant.file) if mutant else ("-", "nothing changed")
        print(f"{name:{width}}  {time.monotonic() - one_began_s:5.1f} s  {file}: {said}", flush=True)
        return is_well

    with TemporaryDirectory(prefix="mutants-") as directory:
        base = _snapshot(root, Path(directory) / "base")
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(mutant, base)) for mutant in (None, *mutants)]
    findings = sum(not done.result() for done in tasks)
    print(f"{len(mutants)} mutants, {findings} findings, {time.monotonic() - began_s:.0f} s")
    return 1 if findings else 0


async def _all_pass(mutants: Sequence[Mutant], base: Path) -> tuple[bool, str]:
    """Return whether all tests pass where nothing was changed, and what to say."""
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    with _overlay(base) as tree:
        status, failed = await _pytest(tree, tests, DEADLINE_S * 3)
    return status == 0, f"{len(tests)} tests pass" if status == 0 else f"tests do not pass: {status} {failed}"


async def _dies(mutant: Mutant, base: Path) -> tuple[bool, str]:
    """Return whether a test notices a mutant, and what to say."""
    if (copies := mutant.copies(base)) != 1:
        return False, f"STALE: the text stands there {copies} times"
    with _overlay(base) as tree:
        mutant.apply(tree)
        status, failed = await _pytest(tree, mutant.tests, DEADLINE_S)
    return status == 1, f"killed by {failed}" if status == 1 else _NOT_KILLED.get(status, f"pytest ends with {status}")


async def _pytest(tree: Path, tests: Sequence[str], deadline_s: float) -> tuple[int, str]:
    """Return pytest's exit status, -9 past the deadline, and the first test that failed."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pytest", *_OPTIONS, *tests),
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    output = b""
    try:
        with contextlib.suppress(TimeoutError):
            output, _ = await asyncio.wait_for(process.communicate(), deadline_s)
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        status = await process.wait()
    failed = [line.split()[1] for line in output.decode().splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return status, failed[0].removeprefix("tests/") if failed else ""


def _snapshot(root: Path, base: Path) -> Path:
    """Copy what git knows of or would add, compiled; what is installed is shared by links."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        check=True,
        capture_output=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (root / name).is_file():
            (base / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, base / name)
    for name in (".venv", ".build"):
        if (root / name).exists():
            (base / name).symlink_to((root / name).resolve())
    # By their contents: a mutant of the same size, made in the same second, is another file.
    compile_all = (sys.executable, "-m", "compileall", "-q", "-x", r"/\.", "--invalidation-mode", "checked-hash", ".")
    subprocess.run(compile_all, cwd=base, check=True)
    return base


@contextlib.contextmanager
def _overlay(base: Path) -> Iterator[Path]:
    """Give a tree of links to the files of `base`, and remove it."""
    with TemporaryDirectory(dir=base.parent) as directory:
        tree = Path(directory) / "tree"
        shutil.copytree(base, tree, copy_function=os.link, symlinks=True)
        yield tree


if __name__ == "__main__":
    sys.exit(main())
