"""What our KV connector inside a vLLM worker says of one request: in the answer itself, or on a port of its own.

The engine counts as cached what was planned to be loaded, also when the load failed and the tokens were computed after
all. The connector knows the outcome, so its figure replaces the engine's.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from kvrelay.core.model.prompt import Usage
from kvrelay.edge.system.unreadable import UNREADABLE


class _Told(Struct):
    outcome: str
    cached_tokens: int
    reason: str | None = None
    loaded_tokens: int = 0
    bytes_read: int = 0
    ms: dict[str, float] = {}
    predicted_fetch_ms: float | None = None
    predicted_recompute_ms: float | None = None
    contract_differs: tuple[str, ...] = ()
    tokens_by_scope: dict[str, int] | None = None


class _Parameters(Struct):
    kvrelay: _Told | None = None


class _Answer(Struct):
    kv_transfer_params: _Parameters | None = None


_decode_report = msgspec.json.Decoder(_Told).decode
_decode_answer = msgspec.json.Decoder(_Answer).decode


def with_report(usage: Usage, report: bytes) -> Usage:
    """Unchanged when the report cannot be read."""
    try:
        return _with(usage, _decode_report(report))
    except UNREADABLE:
        return usage


def with_report_in_body(usage: Usage, body: bytes) -> Usage:
    """From an answer that was not streamed; unchanged when nothing of ours is in it."""
    if b'"kvrelay"' not in body:
        return usage
    try:
        parameters = _decode_answer(body).kv_transfer_params
    except UNREADABLE:
        return usage
    return usage if parameters is None or parameters.kvrelay is None else _with(usage, parameters.kvrelay)


def _with(usage: Usage, told: _Told) -> Usage:
    predicted = {"predicted_fetch": told.predicted_fetch_ms, "predicted_recompute": told.predicted_recompute_ms}
    return msgspec.structs.replace(
        usage,
        cached_tokens=told.cached_tokens,
        remote_outcome=told.outcome,
        remote_reason=told.reason,
        remote_loaded_tokens=told.loaded_tokens,
        remote_bytes_read=told.bytes_read,
        remote_path_ms={**told.ms, **{name: ms for name, ms in predicted.items() if ms is not None}},
        contract_differs=told.contract_differs,
        tokens_by_scope=told.tokens_by_scope,
    )
