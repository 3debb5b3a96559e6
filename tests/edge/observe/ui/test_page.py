"""The live page as people get it: in a browser, by keyboard, on a phone, in the dark, behind a token, no errors."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Browser, Page, async_playwright, expect

from kvrelay.edge.gateway.gateway import Gateway
from tests.edge.gateway.scripted import ScriptedWorker, client_of, running, stream, token_body

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PATIENCE_MS = 20_000
expect.set_options(timeout=PATIENCE_MS)
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-dev-shm-usage")

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Watched:
    """A page, and everything it complained of or asked others for."""

    def __init__(self, page: Page, gateway: Gateway) -> None:
        self.page = page
        self.complaints: list[str] = []
        page.on("console", lambda said: said.type == "error" and self.complaints.append(said.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda sent: sent.url.startswith(gateway.admin_url) or self.complaints.append(sent.url))

    async def text(self, selector: str) -> str:
        return await self.page.inner_text(selector)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.fail("no Chromium on this machine: install the Debian package `chromium` (apt-get install chromium)")
    async with async_playwright() as playwright:
        running = await playwright.chromium.launch(executable_path=found, args=list(FLAGS))
        yield running
        await running.close()


@asynccontextmanager
async def opened(
    browser: Browser, gateway: Gateway, *, width: int = 1280, dark: bool = False
) -> AsyncIterator[Watched]:
    scheme: Any = "dark" if dark else "light"
    context = await browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    context.set_default_timeout(PATIENCE_MS)
    page = await context.new_page()
    watched = Watched(page, gateway)
    await page.goto(f"{gateway.admin_url}/ui")
    yield watched
    await context.close()


@asynccontextmanager
async def busy(**flags: object) -> AsyncIterator[Gateway]:
    """Two workers and some requests that have ended; one of a client who writes markup."""
    async with running(ScriptedWorker("a", stream), ScriptedWorker("b", stream), **flags) as gateway:
        async with client_of(gateway) as client:
            for number in range(6):
                await client.post(token_body(), x_session_id=f"<b>s{number}</b>")
        yield gateway


async def serious(page: Page) -> list[str]:
    found = (await Axe().run(page)).response["violations"]
    bad = [one for one in found if one["impact"] in ("serious", "critical")]
    return [f"{one['id']}: {one['help']}: {one['nodes'][0]['html']}" for one in bad]


async def live(watched: Watched) -> None:
    await expect(watched.page.locator("#link .text")).to_have_text("live")
    await expect(watched.page.locator("#requests li")).to_have_count(6)


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (400, False)])
async def test_it_is_live_accessible_and_fits_in_light_dark_and_a_phone(
    browser: Browser, width: int, dark: bool
) -> None:
    async with busy() as gateway, opened(browser, gateway, width=width, dark=dark) as watched:
        await live(watched)
        page = watched.page
        assert await page.evaluate("document.documentElement.scrollWidth") <= width
        assert "policy cache_load (predict)" in await watched.text("#about")
        assert await page.locator(".worker h3").all_inner_texts() == ["a", "b"]
        assert "approximate" in await watched.text("#workers"), "what is guessed is said to be"
        assert "unavailable: waiting requests" in await watched.text("#workers")
        assert "hit" in await watched.text("#gates")
        await page.click("#findings summary")
        assert await serious(page) == []
        await page.click("#requests li:first-child button")
        await expect(page.locator("#receipt-body .first")).to_contain_text("Request ")
        assert "because" in await watched.text("#receipt-body")
        assert await page.locator("#receipt-body tbody tr").count() == 2
        assert await serious(page) == []
        assert watched.complaints == []


async def test_everything_can_be_done_by_keyboard(browser: Browser) -> None:
    async with busy() as gateway, opened(browser, gateway) as watched:
        await live(watched)
        page = watched.page
        await page.keyboard.press("Tab")
        assert await page.evaluate("document.activeElement.className") == "skip"
        await page.keyboard.press("Enter")
        assert await page.evaluate("document.activeElement.id") == "main"
        await page.focus("#requests li:first-child button")
        await page.keyboard.press("Enter")
        await expect(page.locator("#receipt")).to_be_visible()
        await expect(page.locator("#receipt-body .first")).to_be_visible()
        await page.keyboard.press("Escape")
        await expect(page.locator("#receipt")).to_be_hidden()
        assert await page.evaluate("document.activeElement.parentElement.parentElement.id") == "requests"
        await page.focus("#theme")
        await page.keyboard.press("Enter")
        await page.keyboard.press("Enter")
        assert await page.evaluate("document.documentElement.dataset.theme") == "dark"
        await page.focus("#pause")
        await page.keyboard.press("Space")
        await expect(page.locator("#link .text")).to_have_text("paused")
        await page.keyboard.press("Space")
        await expect(page.locator("#link .text")).to_have_text("live")
        assert watched.complaints == []


async def test_what_if_asks_without_sending_and_says_what_is_wrong_with_a_body(browser: Browser) -> None:
    async with busy() as gateway, opened(browser, gateway) as watched:
        await live(watched)
        page = watched.page
        before = gateway.status().live_requests, len(gateway.receipts.recent(100))
        await page.fill("#body", json.dumps({"prompt": list(range(40))}))
        await page.click("#ask button")
        await expect(page.locator("#answer .first")).to_contain_text("It would go to")
        assert await page.locator("#answer tbody tr").count() == 2
        assert (gateway.status().live_requests, len(gateway.receipts.recent(100))) == before
        await page.fill("#body", "{")
        await page.click("#ask button")
        await expect(page.locator("#answer .problem")).to_contain_text("JSON")
        assert watched.complaints == []


async def test_what_clients_write_stays_text_and_sessions_are_listed(browser: Browser) -> None:
    async with busy(affinity__ttl_s=60.0, gateway__policy="sticky") as gateway, opened(browser, gateway) as watched:
        await live(watched)
        page = watched.page
        await page.click("#list-sessions")
        await expect(page.locator("#sessionlist tbody tr")).to_have_count(6)
        assert "<b>s0</b>" in await watched.text("#sessionlist")
        assert await page.locator("#sessionlist b").count() == 0
        assert watched.complaints == []


async def test_the_name_of_a_worker_is_shown_whole(browser: Browser) -> None:
    """Names that come from URLs differ in their last letters."""
    name = "a-worker-with-a-long-name.example:18100"
    async with busy() as gateway, opened(browser, gateway) as watched:
        await live(watched)
        hidden = await watched.page.evaluate(
            """name => {
                const where = document.querySelector(".flow .where");
                where.textContent = name;
                return [where.scrollWidth - where.clientWidth, where.scrollHeight - where.clientHeight];
            }""",
            name,
        )
        assert max(hidden) <= 1, f"so many pixels of it are out of sight: {hidden}"


async def test_a_worker_that_is_lost_is_shown_spoken_and_explained(browser: Browser) -> None:
    worker = ScriptedWorker("b", stream)
    async with running(ScriptedWorker("a", stream), worker) as gateway, opened(browser, gateway) as watched:
        await expect(watched.page.locator("#link .text")).to_have_text("live")
        await expect(watched.page.locator(".worker")).to_have_count(2)
        await worker.stop()
        await expect(watched.page.locator("#spoken")).to_contain_text("worker b is")
        await expect(watched.page.locator(".finding.fail")).to_contain_text("routes nothing to b")
        await watched.page.click(".finding.fail a")
        await expect(watched.page.locator("h3#router")).to_be_in_viewport()
        assert await serious(watched.page) == []
        assert watched.complaints == []


async def test_behind_a_token_the_page_asks_and_keeps_it_in_memory_only(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("s3cret\n")
    async with busy(gateway__admin_token_file=str(tmp_path / "token")) as gateway, opened(browser, gateway) as watched:
        page = watched.page
        await expect(page.locator("#token")).to_be_visible()
        assert await serious(page) == []
        await page.fill("#token-value", "wrong")
        await page.keyboard.press("Enter")
        await expect(page.locator("#token-why")).to_have_text("That was not the token of this gateway.")
        await page.fill("#token-value", "s3cret")
        await page.keyboard.press("Enter")
        await live(watched)
        assert await page.evaluate("JSON.stringify([localStorage, sessionStorage, document.cookie])") == '[{},{},""]'
        refused = [one for one in watched.complaints if "401" not in one]
        assert refused == []


@pytest.mark.covers("OP-13")
async def test_results_of_drills_and_gates_are_shown_with_a_badge(browser: Browser, tmp_path: Path) -> None:
    promises = [{"promise": "answers are right", "verdict": "pass", "observed": "40 compared"}]
    drill = {"drill": "worker_lost", "fleet": "mock", "verdict": "pass", "promises": promises}
    (tmp_path / "drills.json").write_text(json.dumps([drill]))
    async with busy(observe__results=str(tmp_path)) as gateway, opened(browser, gateway) as watched:
        await expect(watched.page.locator("#results .badge")).to_contain_text("All drills passed")
        await watched.page.click("#results summary")
        assert "answers are right: 40 compared" in await watched.text("#results")
        assert await serious(watched.page) == []
