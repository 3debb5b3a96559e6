from __future__ import annotations

import json
import re

import msgspec
import pytest
from tests.lab.made_up_run import made_up_run

from kvrelay.core.traces.cut import CutCounts
from kvrelay.lab.report.limitations import EXCLUDED_WORDS, limitations
from kvrelay.lab.report.page import render_page
from kvrelay.lab.report.table import Table, milliseconds, percent, tokens
from kvrelay.lab.report.view import view_of


def test_table_is_aligned_text_and_escaped_html() -> None:
    table = Table(("policy", "hits"), (("round_robin", "7"), ("<b>", "1,000")), emphasis=(False, True))

    assert table.text() == "policy        hits\nround_robin      7\n<b>          1,000"
    assert table.transposed().text() == "policy  round_robin    <b>\nhits              7  1,000"
    assert '<tr class="winner"><th scope="row">&lt;b&gt;</th><td>1,000</td></tr>' in table.html()


def test_unknown_is_a_word_and_never_zero() -> None:
    assert (milliseconds(None), tokens(None), percent(None)) == ("unknown", "unknown", "unknown")
    assert (milliseconds(0.0), milliseconds(12.34), milliseconds(1234.5)) == ("0.0", "12.3", "1,234")
    assert (tokens(5, signed=True), tokens(-5, signed=True), tokens(0, signed=True)) == ("+5", "-5", "0")


def test_page_is_one_file_that_refers_to_nothing_outside() -> None:
    page = render_page(view_of(made_up_run()))

    assert "default-src 'none'" in page
    assert not re.findall(r"<(?:script|img|link|iframe)[^>]+(?:src|href)=[\"'](?!data:)", page)


@pytest.mark.covers("BM-14", "BM-16", "BM-17")
def test_limitations_name_the_subset_the_scale_and_the_scope() -> None:
    measured = made_up_run().measured
    facts = measured.manifest.stated.trace
    text = " ".join(limitations(measured))

    assert f"filtered synthetic subset: {facts.requests_retained} of {facts.requests_received} requests" in text
    assert facts.requests_retained + sum(facts.excluded.values()) == facts.requests_received
    assert set(EXCLUDED_WORDS) == set(CutCounts.__struct_fields__) - {"received", "retained"}
    assert "local to a session" in text and "mocks" in text


def test_names_cannot_break_out_of_the_page() -> None:
    view = view_of(made_up_run())
    evil = "</script><script>alert(1)</script>"
    chart = msgspec.structs.replace(view.charts[0], rows=({"policy": evil, "value": 1.0},))
    page = render_page(msgspec.structs.replace(view, title=evil, receipt_words=evil, charts=(chart,)))

    assert evil not in page
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page)
    assert data is not None and json.loads(data[1])["charts"]["ttft"]["rows"][0]["policy"] == evil
