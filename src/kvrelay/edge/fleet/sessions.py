"""Sessions for our own questions to workers: probes, scrapes, `tokenize`. Each has the TLS settings of its workers."""

from __future__ import annotations

import ssl

import aiohttp


def question_session(timeout_s: float | None, tls: ssl.SSLContext | None = None) -> aiohttp.ClientSession:
    """With a connection of its own for each question: a kept one would hide a restart behind it."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True, ssl=True if tls is None else tls),
        timeout=aiohttp.ClientTimeout(total=timeout_s),
    )


class TlsSession:
    """The session of one worker that has TLS settings of its own; made anew when they or the timeout change."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._tls: ssl.SSLContext | None = None
        self._old: list[aiohttp.ClientSession] = []  # questions under way still need them

    def get(self, timeout_s: float | None, tls: ssl.SSLContext) -> aiohttp.ClientSession:
        session = self._session
        if session is not None and self._tls is tls and session.timeout.total == timeout_s:
            return session
        if session is not None:
            self._old.append(session)
        self._session, self._tls = question_session(timeout_s, tls), tls
        return self._session

    async def close(self) -> None:
        for session in self._old if self._session is None else (*self._old, self._session):
            await session.close()
        self._old.clear()
        self._session = None
