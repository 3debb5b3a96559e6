"""The report as a reader gets it: opened from disk in a browser that has no network."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright
from tests.lab.made_up_run import made_up_run

from kvrelay.lab.report.page import render_page
from kvrelay.lab.report.view import view_of

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-dev-shm-usage")

CHARTS = 8


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.fail("no Chromium on this machine: install the Debian package `chromium` (apt-get install chromium)")
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=found, args=list(FLAGS))
        yield running
        running.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(render_page(view_of(made_up_run())), encoding="utf-8")
    return path


def opened(browser: Browser, report: Path, *, width: int, dark: bool) -> tuple[Page, list[str]]:
    """The page after its charts were drawn, and everything it complained of or asked the network for."""
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme="dark" if dark else "light", offline=True
    )
    page, complaints = context.new_page(), []
    page.on("console", lambda message: complaints.append(f"console {message.type}: {message.text}"))
    page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
    page.on("request", lambda sent: None if sent.url.startswith(("file:", "data:")) else complaints.append(sent.url))
    page.goto(report.as_uri())
    page.locator(".plot svg[role=img]").nth(CHARTS - 1).wait_for(state="attached")
    return page, complaints


@pytest.mark.parametrize(("width", "dark"), [(1200, False), (1200, True), (400, False)])
def test_report_draws_its_charts_without_network_and_without_complaints(
    browser: Browser, report: Path, width: int, dark: bool
) -> None:
    page, complaints = opened(browser, report, width=width, dark=dark)

    assert complaints == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("document.querySelectorAll('.plot path, .plot circle, .plot rect').length") > 200
    page.context.close()


def test_every_chart_has_a_name_and_its_numbers_as_a_table(browser: Browser, report: Path) -> None:
    page, _ = opened(browser, report, width=900, dark=False)

    names = page.eval_on_selector_all(".plot svg[role=img]", "all => all.map(one => one.getAttribute('aria-label'))")
    tables = page.eval_on_selector_all("figure.chart", "all => all.map(one => one.querySelectorAll('td').length)")
    assert len(names) == CHARTS and all(len(name) > 40 for name in names)
    assert all(cells >= 9 for cells in tables)
    page.context.close()


@pytest.mark.covers("BM-24", "BM-31", "BM-35")
def test_verdict_stands_before_the_charts_and_says_that_it_is_a_mock(browser: Browser, report: Path) -> None:
    page, _ = opened(browser, report, width=900, dark=False)

    assert page.eval_on_selector_all("main h2", "all => all.map(one => one.textContent)")[:3] == [
        "Who is ahead", "Figures", "Why",
    ]  # fmt: skip
    assert "MOCK" in page.inner_text("header")
    assert "not the performance of any engine" in page.inner_text("header")
    page.context.close()
