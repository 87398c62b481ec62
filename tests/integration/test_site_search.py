"""The documentation's search in a real browser: the page that answers a question is the first result."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.kit import chromium

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(300)]
FIRST = {
    "409": "/operations/troubleshooting/",
    "every turn is a miss": "/operations/troubleshooting/",
    "compose": "/start/compose/",
}


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def url(tmp_path) -> Iterator[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    subprocess.run(command, env=os.environ | {"PYTHONPATH": str(Path().absolute())}, check=True, capture_output=True)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(tmp_path)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


async def test_the_first_result_answers_the_question_and_no_other_server_is_asked(url):
    """Seen to fail without the boost of the page on troubleshooting."""
    if not chromium.is_there():
        pytest.skip("needs Chromium: apt-get install chromium")
    asked: list[str] = []
    async with chromium.running_browser() as browser:
        page = await browser.new_page()
        page.on("request", lambda request: asked.append(request.url))
        for words, first in FIRST.items():
            await page.goto(url)
            await page.locator("input.md-search__input").fill(words)
            link = await page.locator(".md-search-result__link").first.get_attribute("href")
            assert first in str(link)

    assert [each for each in asked if not each.startswith((url, "data:"))] == []
