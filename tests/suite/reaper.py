"""`python -m tests.suite.reaper <command>`: runs a command and adopts the processes that it leaves behind.

A killed engine's children lose their parent. Linux then hands them to this process, so that their CPU seconds count in
the usage of the part that started them. SIGTERM interrupts the command.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys

_PR_SET_CHILD_SUBREAPER = 36


def main(command: list[str]) -> int:
    """Run the command, wait for it and for every process that ends meanwhile; return its exit status."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    process = subprocess.Popen(command)
    # An interrupt from the terminal reaches the command itself.
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: process.send_signal(signal.SIGINT))
    while True:
        pid, status = os.wait()
        if pid == process.pid:
            break
    exit_status = process.returncode = os.waitstatus_to_exitcode(status)
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
    return exit_status if exit_status >= 0 else 128 - exit_status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
