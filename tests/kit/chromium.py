"""A real Chromium, Debian's, driven by Playwright, and axe-core: installed where that can be done, else named."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from playwright.async_api import Browser, async_playwright

PROGRAM = "/usr/bin/chromium"
# Nothing of the browser's own leaves the machine; root has no sandbox.
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
ARGUMENTS += ["--disable-component-update", "--disable-sync"]


def is_there() -> bool:
    """Install the browser as root on a Debian; return whether it is there then."""
    if not Path(PROGRAM).exists() and os.geteuid() == 0 and shutil.which("apt-get"):
        env = dict(os.environ) | {"DEBIAN_FRONTEND": "noninteractive"}
        for words in (["update"], ["install", "--yes", "--no-install-recommends", "chromium"]):
            subprocess.run(["apt-get", "-q", *words], env=env, check=False, capture_output=True, timeout=600)
    return Path(PROGRAM).exists()


@asynccontextmanager
async def running_browser() -> AsyncIterator[Browser]:
    """Start one, without a screen, and end it."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=PROGRAM, args=ARGUMENTS)
        try:
            yield browser
        finally:
            await browser.close()


def axe_script() -> str:
    """Return axe-core, installed as `axe/package-lock.json` names it."""
    installed = Path(".build/axe").absolute()
    script = installed / "node_modules" / "axe-core" / "axe.min.js"
    shutil.copytree(Path(__file__).parent / "axe", installed, dirs_exist_ok=True)
    if not script.exists():
        npm_ci = [Path(sys.executable).parent / "npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
        subprocess.run(npm_ci, cwd=installed, check=True, timeout=300)
    return script.read_text()
