from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest
from tests.lab.arms.test_ruling import GATES
from tests.lab.made_up_run import made_up_measured, made_up_run

from kvrelay.core.gates.evidence import LABELS, Hardware, Layer, Registration
from kvrelay.core.traces.cut import CutCounts
from kvrelay.lab.arms.results import policy_results
from kvrelay.lab.arms.ruling import Run, rule_on
from kvrelay.lab.report.limitations import EXCLUDED_WORDS, limitations
from kvrelay.lab.report.markdown import render_markdown
from kvrelay.lab.report.page import render_page
from kvrelay.lab.report.table import Origin, Table, milliseconds, number, percent, tokens
from kvrelay.lab.report.view import failures_table, view_of


def test_table_is_aligned_text_and_escaped_html() -> None:
    table = Table(("policy", "hits"), (("round_robin", "7"), ("<b>", "1,000")), emphasis=(False, True))

    assert table.text() == "policy        hits\nround_robin      7\n<b>          1,000"
    assert table.transposed().text() == "policy  round_robin    <b>\nhits              7  1,000"
    assert '<tr class="winner"><th scope="row">&lt;b&gt;</th><td>1,000</td></tr>' in table.html()


def test_unknown_is_a_word_and_never_zero() -> None:
    assert (milliseconds(None), tokens(None), percent(None)) == ("unknown", "unknown", "unknown")
    assert (number(10_472.4), number(0.0), number(4.2921)) == ("10,472", "0", "4.292")
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


CUT = "filtered synthetic subset"


def of_layer(layer: Layer, hardware: Hardware) -> Run:
    """A run that never happened, on workers that it never had."""
    measured = made_up_measured(gates=GATES)
    fleet = msgspec.structs.replace(
        measured.manifest.stated.fleet, label=LABELS[layer], layer=layer.value, hardware=hardware.value
    )
    stated = msgspec.structs.replace(measured.manifest.stated, fleet=fleet, label=LABELS[layer])
    changed = msgspec.structs.replace(measured, manifest=msgspec.structs.replace(measured.manifest, stated=stated))
    return Run(changed, rule_on(changed, Path("/nonexistent"), Registration.REGISTERED))


@pytest.mark.covers("BM-31", "BM-07", "GT-08")
def test_mock_results_have_no_verdict_on_latency_and_no_layer_but_c_is_a_routing_result() -> None:
    mock = view_of(of_layer(Layer.MOCK, Hardware.MOCK))
    assert (mock.label, mock.verdict.heading) == (f"mock, {CUT}", "Verdict on modelled times")
    assert mock.verdict.judges is not None
    assert all(row[0].startswith("modelled ") for row in mock.verdict.judges.rows)
    assert Origin.MODELLED in mock.overview.origins
    assert mock.charts[0].title == "Modelled time to first token"

    one = view_of(of_layer(Layer.ONE_WORKER, Hardware.GPU))
    assert one.label == f"single_worker_baseline, {CUT}" and "no routing result" in one.limitations[0]

    fleet = view_of(of_layer(Layer.FLEET, Hardware.CPU))
    assert (fleet.label, fleet.verdict.heading) == (f"routing_result, {CUT}", "Verdict")
    assert Origin.MODELLED not in fleet.overview.origins
    assert "not promotable: hardware is unknown" in " ".join(fleet.verdict.chips)
    assert "on CPUs" in fleet.limitations[0]  # as stated; what the arms found was something else, so it is unknown


@pytest.mark.covers("BM-35")
def test_every_figure_says_whether_it_was_measured_modelled_derived_or_stated() -> None:
    view = view_of(made_up_run())

    for table in (view.overview, view.together, view.failures, view.first_wave, *(one.table for one in view.charts)):
        assert len(table.origins) == len(table.header) - 1, table.header
    page = render_page(view)
    for origin in Origin:
        assert f'<abbr class="origin">{origin.value[:3]}</abbr>' in page


@pytest.mark.covers("BM-33", "BM-34")
def test_five_fields_stand_together_and_the_first_wave_is_told_from_the_rest() -> None:
    view = view_of(made_up_run())

    assert view.together.header[1:] == (
        "hit rate", "p95 TTFT ms, failed ones last", "transfer cost", "wrong context", "isolation of arms",
    )  # fmt: skip
    assert all(cell for row in view.together.rows for cell in row)
    first, later = (int(view.first_wave.rows[0][column]) for column in (1, 4))
    assert first == 5 * 4 * 3 and first + later == made_up_run().measured.results["round_robin"].ttft_ms.count


@pytest.mark.covers("BM-24")
def test_failures_stay_and_name_what_happened() -> None:
    measured = made_up_measured()
    data = measured.arms[0]
    broken = msgspec.structs.replace(data.samples[0], failure="HTTP 503", ttft_ms=None, first_token_ms=None)
    arms = (msgspec.structs.replace(data, samples=(broken, *data.samples[2:])), *measured.arms[1:])
    measured = msgspec.structs.replace(measured, arms=arms, results=policy_results(arms, measured.rows))

    table = failures_table(measured)
    assert table.header == ("policy", "planned", "answered", "without content", "retries", "no record", "HTTP 503")
    assert table.rows[0] == ("round_robin", "354", "352", "0", "0", "1", "1")


def test_markdown_has_the_verdict_first_and_every_table() -> None:
    text = render_markdown(view_of(of_layer(Layer.MOCK, Hardware.MOCK)))

    titles = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert titles[:2] == ["Verdict on modelled times", "Figures"]
    assert re.search(r"^\*\*(PASS|FAIL|UNKNOWN): cache_load against round_robin\*\*$", text, re.MULTILINE)
    assert "| gate | outcome | measured, and what was asked |" in text
    assert "What this run cannot show" in titles and "| **cache_load (winner)** |" in text
