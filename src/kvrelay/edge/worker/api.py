"""The HTTP surface of a mock worker: vLLM's paths, and `/mock/...` for those who drive it."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import msgspec
from msgspec import Struct

from kvrelay import __version__
from kvrelay.edge.http.heads import Header
from kvrelay.edge.http.server import Exchange
from kvrelay.edge.worker import answers, audio, chat, completions, embeddings, messages, responses, tokenizer
from kvrelay.edge.worker.answers import (
    JSON_HEADERS,
    MOCK_HEADER,
    STREAM_END,
    STREAM_HEADERS,
    TEXT_HEADERS,
    RequestError,
)
from kvrelay.edge.worker.faults import Fault, FaultError, parse_fault
from kvrelay.edge.worker.generation import (
    Generation,
    OutOfVocabulary,
    adapter_of,
    check_vocabulary,
    decode_body,
    read_prompts,
)
from kvrelay.edge.worker.reply import MidFault
from kvrelay.edge.worker.spec import MockSpec

if TYPE_CHECKING:
    from kvrelay.edge.worker.worker import Worker

GARBAGE_HEADERS: tuple[Header, ...] = ((b"\x00\x01 not a header", b"\xff\xfe"),)
NO_FAULT = MidFault()
LOADS = "/loads/"

# By path: what needs the engine, and what is answered without it. A draining worker refuses all of it.
GENERATIONS: dict[str, Callable[[bytes, MockSpec], Generation]] = {
    "/v1/completions": completions.read,
    "/v1/chat/completions": chat.read,
    "/v1/responses": responses.read,
    "/v1/messages": messages.read,
}
JSON_ANSWERS: dict[str, Callable[[Exchange, MockSpec], None]] = {
    "/v1/embeddings": embeddings.embed,
    "/v1/messages/count_tokens": messages.count_tokens,
}


class Holding(Struct, kw_only=True):
    """Body of POST /mock/holds."""

    prompt: Any
    adapter: str | None = None
    cache_salt: str | None = None


class Sharing(Struct):
    """Body of PUT /mock/sharing."""

    on: bool


class Api:
    """Routes requests of one worker. Every answer carries the mock's header."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._loop = asyncio.get_running_loop()
        self._routes: dict[str, tuple[str, Callable[[Exchange], None]]] = {
            "/v1/models": ("GET", self._models),
            "/v1/embeddings": ("POST", self._json_answer),
            "/v1/messages/count_tokens": ("POST", self._json_answer),
            "/v1/audio/transcriptions": ("POST", self._transcribe),
            "/tokenize": ("POST", self._tokenize),
            "/detokenize": ("POST", self._detokenize),
            "/health": ("GET", self._health),
            "/ping": ("GET", self._health),
            "/version": ("GET", self._version),
            "/load": ("GET", self._load),
            "/metrics": ("GET", self._metrics),
            "/kv_event_sources": ("GET", self._kv_event_sources),
            "/reset_prefix_cache": ("POST", self._reset_prefix_cache),
            "/server_info": ("GET", self._server_info),
            "/settings": ("GET", self._kv_settings),
            "/mock/state": ("GET", self._state),
            "/mock/faults": ("GET POST DELETE", self._faults),
            "/mock/holds": ("POST", self._holds),
            "/mock/sharing": ("GET PUT", self._sharing),
        }

    def handle(self, exchange: Exchange) -> None:
        """Faults first, then the real answer. The path that switches faults off is exempt from them."""
        if exchange.path.startswith("/mock/"):
            self._answer(exchange, NO_FAULT)
            return
        struck = self._worker.faults.strike_request(exchange.path)
        delay_s = sum(fault.ms for fault in struck if fault.kind == "delay") / 1000.0
        rest = next((fault for fault in struck if fault.kind != "delay"), None)
        if delay_s == 0.0:
            self._answer_with_fault(exchange, rest)
            return
        timer = self._loop.call_later(delay_s, self._answer_with_fault, exchange, rest)
        exchange.on_gone = partial(self._left_while_delayed, exchange, timer)

    # --- faults ------------------------------------------------------------------------------------------------------

    def _answer_with_fault(self, exchange: Exchange, fault: Fault | None) -> None:
        exchange.on_gone = None
        if fault is None:
            self._answer(exchange, NO_FAULT)
            return
        match fault.kind:
            case "refuse":
                self._refuse(exchange, fault)
            case "429" | "503" | "500":
                self._refuse_politely(exchange, int(fault.kind), fault.retry_after_s)
            case "hang" if fault.after_chunks is None:
                exchange.on_gone = partial(self._note_abort, exchange)
            case "hang":
                self._answer(exchange, MidFault(hang_after_chunks=fault.after_chunks))
            case "die_after_chunks" if fault.chunks == 0:
                self._worker.die()
            case "die_after_chunks":
                self._answer(exchange, MidFault(die_after_chunks=fault.chunks, die=self._worker.die))
            case "garbage":
                exchange.respond(200, GARBAGE_HEADERS, b"\x00\xff garbage")
            case _:
                raise AssertionError(f"{fault.kind} does not strike requests")

    def _refuse(self, exchange: Exchange, fault: Fault) -> None:
        """Close without a byte; with `listener_down_s` the listener goes first, and every connection with it."""
        self._worker.metrics.refused_requests += 1
        if fault.listener_down_s is None:
            exchange.abort()
        else:
            self._worker.close_listener_for(fault.listener_down_s)

    def _refuse_politely(self, exchange: Exchange, status: int, retry_after_s: int | None) -> None:
        self._worker.metrics.refused_requests += 1
        headers = () if retry_after_s is None else ((b"retry-after", b"%d" % retry_after_s),)
        answers.respond_error(exchange, RequestError(status, "refused by a fault that is switched on"), headers)

    def _left_while_delayed(self, exchange: Exchange, timer: asyncio.TimerHandle) -> None:
        timer.cancel()
        self._note_abort(exchange)

    def _note_abort(self, exchange: Exchange) -> None:
        received = exchange.header(b"x-request-id")
        self._worker.note_abort("" if received is None else received.decode("latin-1"))

    # --- routing -----------------------------------------------------------------------------------------------------

    def _answer(self, exchange: Exchange, fault: MidFault) -> None:
        if not self._admits(exchange):
            exchange.respond(401, JSON_HEADERS, b'{"error":"Unauthorized"}')
            return
        try:
            read = GENERATIONS.get(exchange.path)
            if read is not None:
                _check_method(exchange, "POST")
                self._generate(exchange, read, fault)
                return
            route = self._routes.get(exchange.path)
            if exchange.path.startswith(LOADS) and exchange.method == "GET":
                self._load_report(exchange)
                return
            if route is None:
                raise RequestError(404, f"no such path: {exchange.path}")
            methods, handler = route
            _check_method(exchange, methods)
            handler(exchange)
        except RequestError as error:
            answers.respond_error(exchange, error)

    def _admits(self, exchange: Exchange) -> bool:
        key = self._worker.spec.api_key
        if key is None or not exchange.path.startswith("/v1"):
            return True
        return secrets.compare_digest(exchange.header(b"authorization") or b"", b"Bearer " + key.encode())

    # --- generations -------------------------------------------------------------------------------------------------

    def _generate(self, exchange: Exchange, read: Callable[[bytes, MockSpec], Generation], fault: MidFault) -> None:
        self._check_admission()
        _check_content_type(exchange)
        generation = read(exchange.body, self._worker.spec)
        try:
            check_vocabulary(generation.prompts, self._worker.spec)
        except OutOfVocabulary as error:
            if not generation.stream:
                raise
            _stream_error(exchange, error)
            return
        self._worker.generate(exchange, generation, fault)

    def _json_answer(self, exchange: Exchange) -> None:
        self._check_admission()
        _check_content_type(exchange)
        JSON_ANSWERS[exchange.path](exchange, self._worker.spec)

    def _transcribe(self, exchange: Exchange) -> None:
        self._check_admission()
        audio.transcribe(exchange, self._worker.spec)

    def _check_admission(self) -> None:
        if self._worker.draining:
            self._worker.metrics.refused_requests += 1
            raise RequestError(503, "the worker is draining and takes no new requests")

    # --- the engine's other paths ------------------------------------------------------------------------------------

    def _models(self, exchange: Exchange) -> None:
        spec = self._worker.spec
        entries = [(spec.model, None), *((adapter, spec.model) for adapter in spec.adapters)]
        data = [
            {
                "id": model,
                "object": "model",
                "created": int(self._worker.started_wall_s),
                "owned_by": "kvrelay-mock",
                "root": model,
                "parent": parent,
                "max_model_len": spec.context_tokens if parent is None else None,
            }
            for model, parent in entries
        ]
        answers.respond_json(exchange, {"object": "list", "data": data, "kvrelay_mock": self._mark()})

    def _tokenize(self, exchange: Exchange) -> None:
        _check_content_type(exchange)
        received = decode_body(exchange.body, dict)
        adapter_of(received.get("model"), self._worker.spec)
        tokens = chat.read_tokenize(received).tolist()
        wants_strs = bool(received.get("return_token_strs"))
        body = {
            "count": len(tokens),
            "max_model_len": self._worker.spec.context_tokens,
            "tokens": tokens,
            "token_strs": [tokenizer.decode((token_id,)) for token_id in tokens] if wants_strs else None,
            "kvrelay_mock": self._mark(),
        }
        answers.respond_json(exchange, body)

    def _detokenize(self, exchange: Exchange) -> None:
        _check_content_type(exchange)
        received = decode_body(exchange.body, dict)
        try:
            tokens = msgspec.convert(received.get("tokens"), list[int])
        except msgspec.ValidationError as error:
            raise RequestError(400, f"`tokens` must be a list of token ids: {error}") from error
        if any(token_id < 0 for token_id in tokens):
            raise RequestError(400, "a token id is negative", param="tokens")
        answers.respond_json(exchange, {"prompt": tokenizer.decode(tokens), "kvrelay_mock": self._mark()})

    def _health(self, exchange: Exchange) -> None:
        if self._worker.draining:
            raise RequestError(503, "draining")
        exchange.respond(200, (MOCK_HEADER,), b"")

    def _version(self, exchange: Exchange) -> None:
        answers.respond_json(exchange, {"version": f"{__version__}+mock", "kvrelay_mock": self._mark()})

    def _load(self, exchange: Exchange) -> None:
        answers.respond_json(exchange, {"server_load": len(self._worker.replies)})

    def _metrics(self, exchange: Exchange) -> None:
        exchange.respond(200, TEXT_HEADERS, self._worker.metrics_page())

    def _kv_event_sources(self, exchange: Exchange) -> None:
        source = self._worker.event_source
        answers.respond_json(exchange, {} if source is None else {"0": source})

    def _reset_prefix_cache(self, exchange: Exchange) -> None:
        answers.respond_json(exchange, {"success": self._worker.host.reset_cache()})

    def _server_info(self, exchange: Exchange) -> None:
        spec = msgspec.to_builtins(self._worker.spec)
        spec["api_key"] = None if spec["api_key"] is None else "(secret)"
        answers.respond_json(exchange, {"kvrelay_mock": {**self._mark(), "settings": spec}})

    # --- the mock's own paths ----------------------------------------------------------------------------------------

    def _state(self, exchange: Exchange) -> None:
        answers.respond_json(exchange, self._worker.state())

    def _load_report(self, exchange: Exchange) -> None:
        """On a real engine its KV connector answers this, on a port of its own."""
        told = self._worker.load_report(unquote(exchange.path.removeprefix(LOADS)))
        if told is None:
            raise RequestError(404, "no load is known of this request")
        answers.respond_json(exchange, told)

    def _kv_settings(self, exchange: Exchange) -> None:
        """Likewise."""
        settings = self._worker.kv_settings()
        if settings is None:
            raise RequestError(404, "this worker shares no KV")
        answers.respond_json(exchange, settings)

    def _holds(self, exchange: Exchange) -> None:
        """How much of a prompt is really cached: the truth that an index elsewhere estimates."""
        asked = decode_body(exchange.body, Holding)
        token_ids = read_prompts(asked.prompt)[0]
        blocks = self._worker.host.engine.cached_blocks(token_ids, adapter=asked.adapter, salt=asked.cache_salt)
        answers.respond_json(exchange, {"blocks": blocks, "tokens": blocks * self._worker.spec.block_size_tokens})

    def _sharing(self, exchange: Exchange) -> None:
        """Whether KV is loaded from the store and saved there; null without a store."""
        if exchange.method == "PUT":
            self._worker.share(decode_body(exchange.body, Sharing).on)
        answers.respond_json(exchange, {"on": self._worker.shares})

    def _faults(self, exchange: Exchange) -> None:
        said: dict[str, Any] = {}
        if exchange.method == "POST":
            try:
                fault = parse_fault(decode_body(exchange.body, dict))
            except FaultError as error:
                raise RequestError(400, str(error)) from error
            said = self._worker.add_fault(fault)
        elif exchange.method == "DELETE":
            self._worker.faults.clear()
        answers.respond_json(exchange, {"faults": self._worker.faults.active(), **said})

    def _mark(self) -> dict[str, Any]:
        return answers.mock_mark(self._worker.incarnation, self._worker.metrics.wrong_reuse_blocks)


def _check_method(exchange: Exchange, methods: str) -> None:
    if exchange.method not in methods.split():
        raise RequestError(405, f"{exchange.method} is not allowed on {exchange.path}; use {methods}")


def _check_content_type(exchange: Exchange) -> None:
    received = exchange.header(b"content-type") or b""
    if received.partition(b";")[0].strip().lower() != b"application/json":
        raise RequestError(400, "Unsupported Media Type: Only 'application/json' is allowed")


def _stream_error(exchange: Exchange, error: RequestError) -> None:
    exchange.start(200, STREAM_HEADERS)
    exchange.write(b"data: " + answers.error_body(error.status, error.message, param=error.param) + b"\n\n")
    exchange.write(STREAM_END)
    exchange.finish()
