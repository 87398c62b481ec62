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
from tests.kit.console_world import COMPUTES_TOKENS_PER_S, QUESTIONS, running_console
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
    """Answer a read of a context with sample KV and time saved: the sample pod has no sidecar to tell them."""
    answer = await route.fetch()
    found = await answer.json()
    if "holder" in found:
        kv = {"bytes": found["tokens"] * 23_040, "tiers": ["host", "disk"]}
        kv["saved_seconds"] = found["cached_tokens"] / COMPUTES_TOKENS_PER_S
        found |= kv | {"holder": {"endpoint": "pod-a", "state": "sealed"}}
    await route.fulfill(response=answer, json=found)


async def _converse(page: Page) -> None:
    """Create a context in the playground over a long document, and ask."""
    await page.evaluate("location.hash = '#/playground'")
    await page.get_by_label("Title (optional)").fill("River levels")
    await page.get_by_role("button", name="Use a long document").click()
    for number, question in enumerate(QUESTIONS, start=1):
        await page.get_by_label("Message", exact=True).fill(question)
        await page.locator("form.ask .primary").click()
        await page.locator(".turns tbody tr").nth(number - 1).wait_for()
        await page.get_by_role("button", name="Stop").wait_for(state="detached")


async def _show(page: Page, view: str) -> None:
    await page.evaluate(f"location.hash = '#/{view}'")
    await page.wait_for_load_state("networkidle")
    await page.locator(".late").wait_for(state="detached")
    if view == "operations":
        await asyncio.sleep(SETTLED_S)


async def _picture(page: Page, view: str) -> None:
    for scheme, ending in (("light", ""), ("dark", "-dark")):
        await page.emulate_media(color_scheme=scheme)
        await page.screenshot(path=PICTURES / f"console-{view}{ending}.png", full_page=view == "playground")


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
                seen = await _signed_in(browser, console.url, key=KEY, scheme="light", size="desk")
                for view in ("contexts", "operations"):
                    await _show(seen, view)
                    await _picture(seen, view)
                await _converse(seen)
                await _picture(seen, "playground")
                return
            for scheme in SCHEMES:
                for size in SIZES:
                    seen = await _signed_in(browser, console.url, key=KEY, scheme=scheme, size=size)
                    for view in ("contexts", one, "kept", "playground", "operations"):
                        name = f"{view.split('/')[0] + ('-one' if '/' in view else '')}-{size}-{scheme}.png"
                        await _show(seen, view)
                        await seen.screenshot(path=folder / name, full_page=size == "desk")
                    await _converse(seen)
                    await seen.screenshot(path=folder / f"playground-asked-{size}-{scheme}.png", full_page=True)
                    seen = await _signed_in(browser, console.url, key=OPERATOR_KEY, scheme=scheme, size=size)
                    await _show(seen, "operations")
                    await seen.screenshot(path=folder / f"operator-{size}-{scheme}.png", full_page=True)


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
