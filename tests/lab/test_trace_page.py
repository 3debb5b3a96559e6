"""The page of a trace in a real browser: everything fits, on a desk, on a phone, and in the dark."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.async_api import async_playwright

from kvrelay.core.traces.facts import examine
from kvrelay.lab.replay.trace_file import TraceFile, read_trace
from kvrelay.lab.traces.page import trace_page

WIDTHS = (360, 900, 1400)


def page_of(source: TraceFile) -> str:
    return trace_page(source, examine(source.trace))


async def test_nothing_runs_out_of_the_page_and_no_text_lies_on_another(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(page_of(read_trace(Path("preset:agents"))))
    async with async_playwright() as play:
        browser = await play.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        page = await browser.new_page()
        problems: list[str] = []
        page.on("console", lambda message: problems.append(message.text))
        await page.goto(path.as_uri())
        for width in WIDTHS:
            await page.set_viewport_size({"width": width, "height": 900})
            assert await page.evaluate("document.documentElement.scrollWidth") <= width
            assert await page.evaluate(OVERLAPS) == []
        await browser.close()
    assert problems == []


OVERLAPS = """() => [...document.querySelectorAll('svg')].flatMap((svg) => {
  const boxes = [...svg.querySelectorAll('text')].map((text) => [text.textContent, text.getBoundingClientRect()]);
  return boxes.flatMap(([a, one], n) => boxes.slice(n + 1).filter(([, two]) =>
    one.left < two.right - 1 && two.left < one.right - 1 && one.top < two.bottom - 1 && two.top < one.bottom - 1,
  ).map(([b]) => `${a} over ${b}`));
})"""


def test_names_from_the_file_are_text_and_nothing_else() -> None:
    source = read_trace(Path("preset:rag"))
    name = "<img src=x onerror=alert(1)>"

    page = page_of(TraceFile(name, source.sha256, source.format, source.trace))

    assert "<img" not in page and "&lt;img" in page


@pytest.mark.parametrize("name", ["prefix_repetition", "cold_warm_restart", "hot_prefix", "agents", "rag"])
def test_the_same_trace_gives_the_same_page(name: str) -> None:
    source = read_trace(Path(f"preset:{name}"))

    assert page_of(source) == page_of(source)
