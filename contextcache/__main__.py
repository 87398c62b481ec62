"""`context-cache`: the command line for contexts and for `doctor`, and `serve` for every process.

`context-cache serve gateway` equals `python -m gateway`. It loads only that process, so it needs no other process's
dependencies. The command line needs none of them.
"""

from __future__ import annotations

import sys

from contextcache.cli.serve import MISUSED, PARTS, start


def main() -> None:
    """Run the command that the arguments name."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["serve"] and arguments[1:] and arguments[1] in PARTS:
        sys.exit(start(arguments[1], arguments[2:]))
    try:
        from contextcache.cli.app import run
    except ModuleNotFoundError as exc:
        if exc.name not in {"typer", "rich"}:
            raise
        print(f"the command line needs the package {exc.name}: pip install 'context-cache[cli]'", file=sys.stderr)
        sys.exit(MISUSED)
    sys.exit(run(arguments))


if __name__ == "__main__":
    main()
