from __future__ import annotations

import gzip
from importlib import resources
from pathlib import Path

import pytest

from kvrelay.lab.demo.bundle import MAX_CONTEXT_TOKENS, MAX_SESSIONS, bundle
from kvrelay.lab.replay.trace_file import BUNDLED, bundled_trace

PUBLISHED = Path(__file__).parents[3] / "shared" / "traces" / "weka_first40_sessions.jsonl.gz"


def bundled_lines() -> list[bytes]:
    return gzip.decompress((resources.files("kvrelay.data") / BUNDLED).read_bytes()).splitlines()


def test_bundle_is_what_its_rule_makes_of_the_published_file() -> None:
    """A bundle is a fixed point of its rule, and where the published file is at hand, its image."""
    published = gzip.decompress(PUBLISHED.read_bytes()).splitlines() if PUBLISHED.exists() else bundled_lines()

    assert bundle(published) == bundled_lines() == bundle(bundled_lines())


def test_bundle_is_small_and_holds_real_sessions_with_growing_context() -> None:
    assert len((resources.files("kvrelay.data") / BUNDLED).read_bytes()) < 150_000
    sessions = bundled_trace().trace.sessions

    assert len([s for s in sessions if s.parent_id is None]) == MAX_SESSIONS
    assert len([s for s in sessions if s.parent_id]) == 6
    assert all(t.input_tokens + t.output_tokens <= MAX_CONTEXT_TOKENS for s in sessions for t in s.turns)
    grows = [b.block_ids[:9] == a.block_ids[:9] for s in sessions for a, b in zip(s.turns, s.turns[1:], strict=False)]
    assert sum(grows) > 0.95 * len(grows)


@pytest.mark.covers("BM-12")
def test_bundle_holds_no_text_members() -> None:
    assert not [line for line in bundled_lines() if b"messages" in line or b"content" in line or b"prompt" in line]
