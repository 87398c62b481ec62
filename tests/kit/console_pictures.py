"""`python -m tests.kit.console_pictures`: draw the console's pictures of docs/guides/console.md from sample data.

`--all FOLDER` also writes every view, on a desk and on a phone, light and dark, to look at them.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path

from playwright.async_api import Browser, Page, Route

from tests.kit import chromium
from tests.kit.console_world import running_console
from tests.kit.gateway_parts import KEY, OPERATOR_KEY

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
SIZES = {"desk": (1280, 900), "phone": (360, 740)}
SCHEMES = ("light", "dark")
SETTLED_S = 12
"""Two refreshes of the operations view, for its charts."""


async def _signed_in(browser: Browser, url: str, *, key: str, scheme: str, size: str) -> Page:
    width, height = SIZES[size]
    context = await browser.new_context(color_scheme=scheme, viewport={"width": width, "height": height})
    page = await context.new_page()
    await page.route("**/v1/context/ctx_*", _with_kv)
    await page.goto(f"{url}/console")
    await page.get_by_label("API key").fill(key)
    await page.get_by_role("button", name="Sign in").click()
    await page.get_by_role("heading", name="Contexts", exact=True).wait_for()
    return page


async def _with_kv(route: Route) -> None:
    """Answer a read of a context with sample KV: the sample pod has no sidecar."""
    answer = await route.fetch()
    found = await answer.json()
    if "holder" in found:
        kv = {"bytes": found["tokens"] * 23_040, "tiers": ["host", "disk"]}
        found |= kv | {"holder": {"endpoint": "pod-a", "state": "sealed"}}
    await route.fulfill(response=answer, json=found)


async def _show(page: Page, view: str, path: Path, *, whole: bool) -> None:
    await page.evaluate(f"location.hash = '#/{view}'")
    await page.wait_for_load_state("networkidle")
    await page.locator(".late").wait_for(state="detached")
    if view == "operations":
        await asyncio.sleep(SETTLED_S)
    await page.screenshot(path=path, full_page=whole)


async def draw(folder: Path | None) -> None:
    """Draw the pictures; with a folder, all views into it instead."""
    with tempfile.TemporaryDirectory() as directory:
        async with (
            running_console(Path(directory), num_contexts=40) as console,
            chromium.running_browser() as browser,
        ):
            page = await console.manager.manager.list_sessions("demo", limit=1)
            one = f"contexts/{page.sessions[0].session_id}"
            if folder is None:
                for view in ("contexts", "operations"):
                    seen = await _signed_in(browser, console.url, key=KEY, scheme="light", size="desk")
                    await _show(seen, view, PICTURES / f"console-{view}.png", whole=False)
                return
            for scheme in SCHEMES:
                for size in SIZES:
                    seen = await _signed_in(browser, console.url, key=KEY, scheme=scheme, size=size)
                    for view in ("contexts", one, "kept", "playground", "operations"):
                        name = f"{view.split('/')[0] + ('-one' if '/' in view else '')}-{size}-{scheme}.png"
                        await _show(seen, view, folder / name, whole=size == "desk")
                    seen = await _signed_in(browser, console.url, key=OPERATOR_KEY, scheme=scheme, size=size)
                    await _show(seen, "operations", folder / f"operator-{size}-{scheme}.png", whole=True)


def main() -> None:
    """Parse the arguments and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", type=Path, dest="folder", help="folder for every view")
    folder = parser.parse_args().folder
    if not chromium.is_there():
        parser.exit(1, "needs Chromium: apt-get install chromium\n")
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    asyncio.run(draw(folder))


if __name__ == "__main__":
    main()
