"""One suite for all connectors: what the gateway and the fleet rely on, whatever engine it is."""

from __future__ import annotations

import aiohttp
import pytest

from kvrelay.core.model.events import BlocksStored
from kvrelay.edge.connectors.base import (
    Connector,
    MalformedEvents,
    WorkerAnswerUnusable,
    WorkerUnreachable,
)
from kvrelay.edge.connectors.metrics_page import CANONICAL
from kvrelay.edge.connectors.registry import CONNECTORS, detect
from tests.conformance.connectors.doubles import DOUBLES, Described, Double
from tests.edge.connectors.serving import Answered, Asked, serving

KEY = {"authorization": "Bearer worker-key"}


@pytest.fixture(params=CONNECTORS)
def name(request: pytest.FixtureRequest) -> str:
    result: str = request.param
    return result


@pytest.fixture
def connector(name: str) -> Connector:
    return CONNECTORS[name]


@pytest.fixture
def double(name: str) -> Double:
    return DOUBLES[name]


def test_every_connector_has_a_double() -> None:
    assert CONNECTORS.keys() == DOUBLES.keys()
    assert all(connector.name == name for name, connector in CONNECTORS.items())


async def test_it_is_recognised_by_what_it_answers(name: str, double: Double) -> None:
    async with serving(double.pages) as url, aiohttp.ClientSession() as session:
        assert (await detect(session, url, KEY)).name == name


async def test_it_is_described(name: str, connector: Connector, double: Double) -> None:
    async with serving(double.pages) as url, aiohttp.ClientSession() as session:
        found = await connector.describe(session, url, KEY)
    spec = found.spec
    assert Described(spec.models, spec.block_size_tokens, found.version, found.sources, spec.ranks) == double.described
    assert (spec.engine, spec.url, spec.sends_events) == (name, url, bool(double.described.sources))


async def test_lives_are_told_apart_where_the_engine_allows_it(connector: Connector, double: Double) -> None:
    lives = []
    for pages in (double.pages, double.pages, {**double.pages, **double.another_life}):
        async with serving(pages) as url, aiohttp.ClientSession() as session:
            lives.append((await connector.describe(session, url, KEY)).incarnation)
    if double.tells_lives:
        assert lives[0] is not None and lives[0] == lives[1] != lives[2]
    else:
        assert lives == [None, None, None]


async def test_the_metrics_page_of_another_life_differs(connector: Connector, double: Double) -> None:
    """A restart between two probes is seen by nothing else."""
    pages = (double.pages, {**double.pages, **double.another_life})
    starts = []
    for shown in pages:
        async with serving(shown) as url, aiohttp.ClientSession() as session:
            scrape = await connector.scrape(session, url, KEY)
            description = await connector.describe(session, url, KEY)
        starts.append(None if scrape is None else scrape.process_start_s)
        assert description.process_start_s == starts[-1]
    assert (starts[0] != starts[1]) == double.tells_lives


async def test_a_description_without_models_is_an_error_and_nobody_there_another(connector: Connector) -> None:
    async with serving({}) as url, aiohttp.ClientSession() as session:
        with pytest.raises(WorkerAnswerUnusable):
            await connector.describe(session, url, KEY)
    async with aiohttp.ClientSession() as session:
        with pytest.raises(WorkerUnreachable) as raised:
            await connector.describe(session, url, KEY)
    assert raised.value.refused


async def test_health_is_its_own_word(connector: Connector, double: Double) -> None:
    async with serving(double.pages) as url, aiohttp.ClientSession() as session:
        assert await connector.probe(session, url, KEY) is None
    async with serving({**double.pages, **double.unhealthy}) as url, aiohttp.ClientSession() as session:
        assert "503" in (await connector.probe(session, url, KEY) or "")


async def test_load_is_read_in_canonical_words(connector: Connector, double: Double) -> None:
    async with serving(double.pages) as url, aiohttp.ClientSession() as session:
        assert await connector.scrape(session, url, KEY) == double.scrape


@pytest.mark.covers("OB-08", "OB-10")
def test_every_metric_has_a_unit_and_a_missing_one_is_unavailable(connector: Connector, double: Double) -> None:
    body = double.pages.get("GET /metrics", Answered()).body
    mapped = connector.metrics.read(body if isinstance(body, str) else body.decode()).mapped()
    assert {one.canonical: one.unit for one in mapped} == CANONICAL
    assert tuple(one.canonical for one in mapped if one.name is None) == double.unavailable
    assert CANONICAL["prefix_hits_tokens"] == CANONICAL["prefix_queries_tokens"] == "tokens, total"


@pytest.mark.covers("OB-10")
def test_an_empty_page_has_no_zeros(connector: Connector) -> None:
    page = connector.metrics.read("")
    assert all(one.name is None for one in page.mapped())
    assert page.loads() == {}


async def test_without_a_metrics_page_there_is_no_load(connector: Connector) -> None:
    async with serving({"GET /metrics": Answered(status=501)}) as url, aiohttp.ClientSession() as session:
        assert await connector.scrape(session, url, KEY) is None


@pytest.mark.covers("RC-09")
def test_usage_is_the_same_in_both_response_modes(connector: Connector, double: Double) -> None:
    assert connector.usage_from_body(double.body) == double.usage
    assert connector.usage_from_sse(double.stream) == double.usage
    assert connector.usage_from_sse(double.stream[20:]) == double.usage  # cut in an event


@pytest.mark.parametrize("garbage", [b"", b"<html>", b"data: {\n\n", b'{"usage": 7}', b"\xff\xfe"])
def test_answers_without_counts_are_unknown_and_no_crash(connector: Connector, garbage: bytes) -> None:
    assert connector.usage_from_body(garbage).cached_tokens is None
    assert connector.usage_from_sse(garbage).prompt_tokens is None


def test_it_has_events_or_is_approximate(connector: Connector, double: Double) -> None:
    if double.event is None:
        assert not double.described.sources
        assert double.described.block_size_tokens, "a guess needs a unit"
        with pytest.raises(MalformedEvents):
            connector.decode_events(b"\x93")
        return
    (event,) = connector.decode_events(double.event).events
    assert isinstance(event, BlocksStored) and event.token_ids is not None
    assert (event.hashes, event.token_ids.tolist()) == ((2**64 - 2, 7), [10, 11, 12, 130_000])


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x80\x04pickle", b"\x93\x01\x02\x03", b"\xdd\xff\xff\xff\xff"])
@pytest.mark.covers("S16")
def test_bytes_that_are_no_events_are_one_kind_of_error(connector: Connector, payload: bytes) -> None:
    with pytest.raises(MalformedEvents):
        connector.decode_events(payload)


async def test_a_reset_is_done_or_says_why_not(connector: Connector, double: Double) -> None:
    asked = Asked()
    async with serving(double.pages, asked) as url, aiohttp.ClientSession() as session:
        if double.resets is None:
            with pytest.raises(WorkerAnswerUnusable):
                await connector.reset(session, url, KEY)
            assert asked.lines == []
            return
        await connector.reset(session, url, KEY)
    assert asked.lines == [double.resets]


async def test_a_refused_reset_is_not_taken_for_one(connector: Connector, double: Double) -> None:
    if double.resets is None or double.refuses is None:
        assert double.resets is double.refuses is None
        return
    for answer in (double.refuses, Answered(status=404)):
        async with serving({**double.pages, double.resets: answer}) as url, aiohttp.ClientSession() as session:
            with pytest.raises(WorkerAnswerUnusable):
                await connector.reset(session, url, KEY)


async def test_texts_and_chats_become_tokens_where_it_has_a_tokenizer(connector: Connector, double: Double) -> None:
    asked = Asked()
    questions = ({"prompt": "ab"}, {"messages": [{"role": "user", "content": "ab"}]})
    async with serving(double.pages, asked) as url, aiohttp.ClientSession() as session:
        for question in questions:
            if double.tokenize is None:
                with pytest.raises(WorkerAnswerUnusable):
                    await connector.tokenize(session, url, question, KEY)
            else:
                tokens = await connector.tokenize(session, url, question, KEY)
                assert (tuple(tokens.tolist()), tokens.dtype.name) == (double.tokens, "uint32")
    for line, wanted in (double.tokenize or {}).items():
        bodies = [body for at, body in zip(asked.lines, asked.bodies, strict=True) if at == line]
        assert tuple(bodies) == wanted
