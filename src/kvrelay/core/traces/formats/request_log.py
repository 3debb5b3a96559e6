"""Logs of OpenAI requests become block ids the moment they are read. No text, name or id of a client is kept.

A line is a request body (`messages` or `prompt`), or holds one as `body` or `request` (the form of batch files), with a
time beside it; the answer's `usage` is used if it is there. What a prompt's blocks are is fingerprinted with a key and
chained, then numbered from 0 in order of appearance, so not even the fingerprints leave this module. Names of
sessions are keyed fingerprints: the same key gives the same names in the next import.

Without the model's tokenizer, a token is taken to be 4 bytes of UTF-8. Equal beginnings stay equal, but lengths are
estimates.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec

from kvrelay.core.traces.formats.options import ImportOptions, Lines, empty_file
from kvrelay.core.traces.formats.rows import Row, json_lines, trace_of
from kvrelay.core.traces.formats.times import parse_time_ms
from kvrelay.core.traces.trace import NotTold, Trace, TraceError

BYTES_PER_TOKEN = 4
TIME_MEMBERS = ("timestamp", "time", "ts", "created_at", "created")
SESSION_MEMBERS = ("session_id", "conversation_id", "thread_id", "chat_id")
SECONDS_BELOW = 1e11  # as milliseconds since 1970 this would be 1973
LEGAL = "a request body with `messages` or `prompt`, or an object that holds one as `body` or `request`"


class _Log(msgspec.Struct, frozen=True):
    """One line, taken apart."""

    at_ms: float
    tokens: Sequence[Any]  # ids, or pieces of text
    output_tokens: int
    used_tokens: int | None  # of the prompt, as the answer counted them
    session: str | None


def looks_like(first: bytes) -> bool:
    return first.lstrip().startswith(b"{") and (b'"messages"' in first or b'"prompt"' in first)


def read(lines: Lines, options: ImportOptions = ImportOptions()) -> Trace:
    """Raises TraceError, which names members and lines but never quotes what is in them."""
    if options.block_size_tokens is None:
        raise NotTold(1, "a request log, which has no blocks", "the block size told", option="block_size")
    numbers: dict[bytes, int] = {}
    rows, estimated, counted = [], 0, 0
    for line, record in json_lines(lines, dict[str, Any], LEGAL):
        log = _log(line, record, options)
        ids = _ids(log.tokens, options.block_size_tokens, options.key, numbers)
        rows.append(Row(line, log.at_ms, len(log.tokens), log.output_tokens, ids, log.session))
        if log.used_tokens is not None:
            estimated, counted = estimated + len(log.tokens), counted + log.used_tokens
    if not rows:
        raise empty_file(LEGAL)
    return trace_of(rows, options, _notices(options, estimated, counted))


def _notices(options: ImportOptions, estimated: int, counted: int) -> list[str]:
    said = ["Prompts are hashed with a key; no text is kept."]
    if options.tokenize is None:
        said.append(f"Lengths are estimates: {BYTES_PER_TOKEN} bytes are taken as one token.")
    if estimated:
        said.append(f"The answers counted {counted / estimated:.2f} x as many prompt tokens.")
    return said


def _log(line: int, record: dict[str, Any], options: ImportOptions) -> _Log:
    body = next((record[name] for name in ("body", "request") if isinstance(record.get(name), dict)), record)
    usage = _usage(record)
    output = usage.get("completion_tokens", body.get("max_completion_tokens", body.get("max_tokens")))
    if not isinstance(output, int):
        raise TraceError(line, "no `usage` and no `max_tokens`", "one of them, for the length of the answer")
    used = usage.get("prompt_tokens")
    return _Log(
        at_ms=_time_ms(line, record, body),
        tokens=_tokens(line, body, options),
        output_tokens=output,
        used_tokens=used if isinstance(used, int) else None,
        session=_session(record, body, options.key),
    )


def _usage(record: dict[str, Any]) -> dict[str, Any]:
    answer = record.get("response")
    holders = [record, answer, answer.get("body") if isinstance(answer, dict) else None]
    found = [one["usage"] for one in holders if isinstance(one, dict) and isinstance(one.get("usage"), dict)]
    return found[0] if found else {}


def _time_ms(line: int, record: dict[str, Any], body: dict[str, Any]) -> float:
    for holder in (record, body):
        for name in TIME_MEMBERS:
            value = holder.get(name)
            if isinstance(value, str):
                value = parse_time_ms(value)
            elif isinstance(value, int | float) and value < SECONDS_BELOW:
                value = value * 1000.0
            if isinstance(value, int | float):
                return float(value)
    legal = f"one of {', '.join(TIME_MEMBERS)}: seconds or milliseconds since 1970, or ISO 8601"
    raise TraceError(line, "no time of the request", legal)


def _session(record: dict[str, Any], body: dict[str, Any], key: bytes) -> str | None:
    metadata = body.get("metadata")
    for holder in (record, body, metadata if isinstance(metadata, dict) else {}):
        for name in SESSION_MEMBERS:
            value = holder.get(name)
            if isinstance(value, str | int):
                return "session-" + hashlib.blake2b(str(value).encode(), key=key, digest_size=8).hexdigest()
    return None


def _tokens(line: int, body: dict[str, Any], options: ImportOptions) -> Sequence[Any]:
    """What is equal at the beginning of two prompts is equal at the beginning of the results."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and all(isinstance(token, int) for token in prompt):
        return prompt
    if isinstance(prompt, str):
        text = prompt
    elif isinstance(body.get("messages"), list):
        head = {name: body[name] for name in ("tools", "response_format") if name in body}
        parts = [head, *body["messages"]] if head else body["messages"]
        text = "\n".join(msgspec.json.encode(part, order="deterministic").decode() for part in parts)
    else:
        raise TraceError(line, "neither `messages` nor a `prompt` of text or token ids", LEGAL)
    if options.tokenize is not None:
        return options.tokenize(text)
    plain = text.encode("utf-8", "replace")
    return [plain[start : start + BYTES_PER_TOKEN] for start in range(0, len(plain), BYTES_PER_TOKEN)]


def _ids(tokens: Sequence[Any], size: int, key: bytes, numbers: dict[bytes, int]) -> tuple[int, ...]:
    """Of the full blocks. Each fingerprint covers everything before its block, so an id stands for a whole prefix."""
    chain, ids = b"", []
    for start in range(0, len(tokens) - size + 1, size):
        block = msgspec.msgpack.encode(list(tokens[start : start + size]))
        chain = hashlib.blake2b(chain + block, key=key, digest_size=16).digest()
        ids.append(numbers.setdefault(chain, len(numbers)))
    return tuple(ids)
