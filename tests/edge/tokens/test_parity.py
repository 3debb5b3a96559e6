"""Our tokenizer beside the workers' own: real mock workers, and scripted ones that disagree."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvrelay.core.receipts.receipt import Receipt
from kvrelay.edge.gateway.gateway import Gateway
from kvrelay.edge.http.server import Exchange
from kvrelay.edge.system.config import load_config
from kvrelay.edge.tokens.parity import _compared
from kvrelay.edge.worker.launch import MockFleet
from kvrelay.edge.worker.spec import MockSpec
from kvrelay.edge.worker.tokenizer import SPECIAL_TOKENS
from tests.edge.gateway.scripted import JSON, Client, ScriptedWorker, client_of, receipts, running, until

MOCK_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n"
    "{% for t in tools %}{{ t | tojson }}{{ '' if loop.last else '\\n' }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '\\n' ~ c | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BLOCK = 16
LONG = "A conversation of some length, so that there are blocks to share. " * 4


@pytest.fixture(scope="module")
def worker_url() -> Iterator[str]:
    with MockFleet([MockSpec(name="m0", decode_ms=1.0, prefill_tokens_per_s=200_000.0)]) as fleet:
        yield fleet.workers[0].url


@pytest.fixture
def as_the_mock(tmp_path: Path) -> dict[str, object]:
    """The mock's tokenizer, one token per byte, as a file of the kind that models come with."""
    tokenizers = pytest.importorskip("tokenizers")
    shown = [
        *range(33, 127),
        *range(161, 173),
        *range(174, 256),
    ]  # written as they are
    hidden = [byte for byte in range(256) if byte not in shown]
    vocabulary = {chr(byte): byte for byte in shown} | {chr(256 + at): byte for at, byte in enumerate(hidden)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.add_special_tokens(list(SPECIAL_TOKENS))
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "template.jinja").write_text(MOCK_TEMPLATE)
    return {"tokens.tokenizer": tmp_path / "tokenizer.json", "tokens.template": tmp_path / "template.jinja"}


@asynccontextmanager
async def before_mock(url: str, settings: dict[str, object]) -> AsyncIterator[tuple[Gateway, Client]]:
    given = {
        "workers": [{"name": "m0", "url": url}],
        "gateway.port": 0,
        "gateway.admin_port": 0,
        "health.interval_s": 0.1,
        **settings,
    }
    async with Gateway(load_config(Path("/dev/null"), {}, given), seed=1, key_seed=b"test") as gateway:
        await until(lambda: any(worker.routable for worker in gateway.status().workers))
        async with client_of(gateway) as client:
            yield gateway, client


def verdicts(gateway: Gateway, worker: str) -> dict[str, str]:
    return {probe: found.verdict for probe, found in gateway.describe_tokens()["parity"].get(worker, {}).items()}


async def answered(gateway: Gateway, client: Client, content: object) -> Receipt:
    known = len(receipts(gateway))
    assert (await client.post(body_of(content), "/v1/chat/completions"))[0] == 200
    await until(lambda: len(receipts(gateway)) > known)
    return receipts(gateway)[0]


def body_of(content: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 2}


async def until_indexed(client: Client, content: object, tokens: int) -> None:
    """Events come after the answer."""
    async with asyncio.timeout(20):
        while await matched_tokens(client, content) < tokens:  # noqa: ASYNC110  a question over HTTP
            await asyncio.sleep(0.02)


async def matched_tokens(client: Client, content: object) -> int:
    _, answer = await client.admin("POST", "/admin/match", body_of(content))
    found: int = answer["candidates"][0]["matched_tokens"]
    return found


@pytest.mark.covers("S19")
@pytest.mark.parametrize("who", ["here", "worker"])
async def test_parts_are_scored_as_the_engine_sees_them(
    worker_url: str, as_the_mock: dict[str, object], who: str
) -> None:
    settings = as_the_mock if who == "here" else {}
    async with before_mock(worker_url, settings) as (gateway, client):
        first = await answered(gateway, client, f"{who} {LONG}\n{LONG}")
        assert first.unscored_because is None and first.matched_tokens_at_route == 0
        assert first.prompt_tokens is not None
        await until_indexed(client, f"{who} {LONG}\n{LONG}", first.prompt_tokens - BLOCK)
        one_part = [{"type": "text", "text": f"{who} {LONG}\n{LONG}"}]
        two_parts = [{"type": "text", "text": f"{who} {LONG}"}, {"type": "text", "text": LONG}]
        for content in (one_part, two_parts):
            receipt = await answered(gateway, client, content)
            claimed, actual = receipt.matched_tokens_at_route, receipt.actual_cached_tokens
            assert claimed is not None and actual is not None and claimed > 400, (claimed, actual)
            assert abs(claimed - actual) <= BLOCK and receipt.prompt_tokens == first.prompt_tokens
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
        receipt = await answered(gateway, client, [*one_part, image])
        assert receipt.unscored_because == "multimodal_input" and receipt.eligible_prefix_tokens is None


@pytest.mark.covers("S21")
async def test_equal_tokenizers_are_found_equal_and_the_rest_is_told(
    worker_url: str, as_the_mock: dict[str, object]
) -> None:
    async with before_mock(worker_url, as_the_mock) as (gateway, client):
        await until(lambda: verdicts(gateway, "m0"))
        assert verdicts(gateway, "m0") == {"text": "same", "chat": "same", "tools": "same"}
        for number in range(3):
            await answered(gateway, client, f"{LONG * 3} and then {number}")
        _, status = await client.admin("GET", "/admin/status")
        tokens = status["tokens"]
        assert (tokens["tokenizer"], tokens["cache"], tokens["why"]) == ("local", "on", None)
        assert tokens["hits"] > 0 and tokens["misses"] > 0 and 0 < tokens["hit_ratio"] < 1
        assert tokens["parity"]["m0"]["text"] == {"verdict": "same", "detail": None}
        _, page = await client.admin("GET", "/metrics")
        assert f"kvrelay_token_cache_hits_total {float(tokens['hits'])}" in page
        assert f"kvrelay_token_cache_misses_total {float(tokens['misses'])}" in page
        await gateway.fleet.remove("m0")
        assert gateway.describe_tokens()["parity"] == {}


@pytest.mark.covers("S21")
async def test_a_template_that_the_worker_does_not_use_is_reported_when_it_joins(
    worker_url: str, as_the_mock: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    template = as_the_mock["tokens.template"]
    assert isinstance(template, Path)
    template.write_text("{{ tools | tojson if tools else '' }}" + MOCK_TEMPLATE)
    with caplog.at_level(logging.WARNING):
        async with before_mock(worker_url, as_the_mock) as (gateway, client):
            await until(lambda: verdicts(gateway, "m0"))
            assert verdicts(gateway, "m0") == {"text": "same", "chat": "same", "tools": "differs"}
            assert (await answered(gateway, client, "still served")).status == "ok"
    assert "worker m0 tokenizes otherwise" in caplog.text and "(tools: from token 0 on, " in caplog.text
    assert "look_up" not in caplog.text


async def test_a_worker_that_cannot_be_asked_is_unknown_and_serves(as_the_mock: dict[str, object]) -> None:
    class Mute(ScriptedWorker):
        def _handle(self, exchange: Exchange) -> None:
            if exchange.path == "/tokenize":
                exchange.respond(501, (JSON,), b'{"error": "no"}')
            else:
                super()._handle(exchange)

    flags = {name.replace(".", "__"): value for name, value in as_the_mock.items()}
    async with running(Mute("mute"), ScriptedWorker("other"), **flags) as gateway, client_of(gateway) as client:
        await until(lambda: verdicts(gateway, "mute") and verdicts(gateway, "other"))
        assert set(verdicts(gateway, "mute").values()) == {"unknown"}
        assert "worker: " in gateway.describe_tokens()["parity"]["mute"]["text"].detail
        assert set(verdicts(gateway, "other").values()) == {"differs"}
        assert (await client.post({"model": "m", "prompt": "hello"}))[0] == 200


async def test_without_a_tokenizer_of_our_own_there_is_nothing_to_compare() -> None:
    async with running(ScriptedWorker("a")) as gateway:
        about: dict[str, Any] = gateway.describe_tokens()
        assert about["tokenizer"] == "worker" and about["cache"] == "off" and "parity" not in about
        assert "tokens.tokenizer" in about["why"] and b"kvrelay_token_cache" not in gateway.metrics.render()


def test_a_difference_says_where_it_begins_and_names_no_token() -> None:
    def ids(*values: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
        return np.array(values, dtype=np.uint32)

    assert msgspec.to_builtins(_compared(ids(1, 2), ids(1, 2))) == {"verdict": "same", "detail": None}
    assert _compared(ids(1, 2, 3), ids(1, 9, 3)).detail == "from token 1 on, 3 tokens here and 3 there"
    assert _compared(ids(1, 2), ids(1, 2, 3)).detail == "from token 2 on, 2 tokens here and 3 there"
    assert _compared(ids(), ids(1)).detail == "from token 0 on, 0 tokens here and 1 there"
