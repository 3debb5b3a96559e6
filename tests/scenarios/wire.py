"""S29 to S31 over HTTP: bodies, headers and keys as a direct call would have them."""

from __future__ import annotations

import gzip
from itertools import product

from kvrelay.core.model.units import Status
from tests.edge.gateway.direct import masked
from tests.scenarios.client import COMPLETIONS, Client, Seen
from tests.scenarios.stage import Stage

RIGHT, WRONG = "the-right-key", "somebody-elses"


async def s29_encodings_and_lengths(stage: Stage) -> None:
    prompt = stage.prompt(64)
    for streams, encoding in product((False, True), ("gzip, deflate", "identity", "")):
        headers = (("accept-encoding", encoding),) if encoding else ()
        direct, relayed = await _both(stage, {"prompt": prompt, "max_tokens": 4, "stream": streams}, headers)
        if stage.calm:
            assert relayed.status == 200 and relayed.body == direct.body
            assert ("content-length" in relayed.headers) == ("content-length" in direct.headers) == (not streams)
    packed = gzip.compress(b'{"prompt":[1,2,3],"max_tokens":4}')
    await stage.client.send(COMPLETIONS, packed, headers=(("content-encoding", "gzip"),))
    hops = (("connection", "keep-alive, x-hop"), ("x-hop", "1"), ("te", "trailers"))
    seen = await stage.client.complete(prompt, headers=hops)
    if stage.calm:
        assert seen.status == 200 and not {"connection", "keep-alive", "te"} & seen.headers.keys()


async def s30_usage_options_of_streams(stage: Stage) -> None:
    prompt = stage.prompt(64)
    for options in ({}, {"stream_options": {"include_usage": False}}, {"stream_options": {"include_usage": True}}) * 4:
        body = {"prompt": prompt, "max_tokens": 6, "stream": True, **options}
        direct, relayed = await _both(stage, body)
        if stage.calm:
            assert relayed.body == direct.body and relayed.complete
            asked = options.get("stream_options", {}).get("include_usage", False)
            assert (b'"usage":{' in relayed.body) is asked
            assert stage.receipt(relayed).completion_tokens == 6


async def s31_keys(stage: Stage) -> None:
    """The workers want a key; the gateway has it for its own calls, and clients bring theirs."""
    for key, status in ((RIGHT, 200), (WRONG, 401), (None, 401), (RIGHT, 200)) * 4:
        headers = () if key is None else (("authorization", f"Bearer {key}"),)
        seen = await stage.client.complete(stage.prompt(), headers=headers)
        texts = await stage.client.complete("some text", headers=headers, stream=True)
        if stage.calm:
            assert (seen.status, texts.status) == (status, status)
            expected = Status.OK if status == 200 else Status.CLIENT_ERROR
            assert stage.receipt(seen).status is expected
    if stage.calm:
        assert all(worker.up and worker.routable for worker in stage.gateway.status().workers)


async def _both(stage: Stage, body: dict[str, object], headers: tuple[tuple[str, str], ...] = ()) -> tuple[Seen, Seen]:
    """Straight to the worker (once before, so that both hit its cache) and through the gateway; comparable bodies."""
    direct_client = Client(stage.fleet.worker("w0").url)
    await direct_client.send(COMPLETIONS, body, headers=headers)
    direct = await direct_client.send(COMPLETIONS, body, headers=(*headers, ("x-request-id", "scenario")))
    relayed = await stage.client.send(COMPLETIONS, body, headers=headers)
    for seen, name in ((direct, "scenario"), (relayed, relayed.request_id)):
        seen.body = masked(seen.body).replace(name.encode(), b"ID")
    return direct, relayed
