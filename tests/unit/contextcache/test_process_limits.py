"""What a part does to its own limits before it serves."""

import subprocess
import sys

import pytest

SERVE = """
import resource
from contextcache.process.run import run_part

async def serve(stop):
    print(*resource.getrlimit(resource.RLIMIT_CORE), *resource.getrlimit(resource.RLIMIT_NOFILE))

run_part("part", serve, log_level="INFO")
"""


@pytest.mark.timeout(60)
def test_a_part_writes_no_core_file_and_opens_as_many_descriptors_as_it_may():
    """Seen failing without either call in `run_part`: `4096` and `256` where the limits were set to them."""
    limits = 'set -e; ulimit -S -c 4096; ulimit -S -n 256; ulimit -H -n 512; exec "$0" -c "$1"'
    result = subprocess.run(
        ["sh", "-c", limits, sys.executable, SERVE], capture_output=True, text=True, timeout=60, check=True
    )
    core_soft, core_hard, files_soft, files_hard = result.stdout.split()

    assert core_soft == "0"
    assert core_hard != "0"
    assert (files_soft, files_hard) == ("512", "512")
