"""Every public cut is recognised and has the counts that its publisher's page gives."""

from __future__ import annotations

import pytest
from tests.core.traces.public_traces import FOLDER, lines, needs_public_traces, public_trace

from kvrelay.core.traces.formats.registry import format_of
from kvrelay.core.traces.trace import NotTold, TraceError

# file -> format, block size (told where it is not 0 and does not follow), root sessions, requests
COUNTS = {
    "mooncake_conversation_full.jsonl.gz": ("mooncake", 512, 12031, 12031),
    "mooncake_conversation_first1000.jsonl": ("mooncake", 512, 1000, 1000),
    "mooncake_synthetic_full.jsonl.gz": ("mooncake", 512, 3993, 3993),
    "mooncake_synthetic_first1000.jsonl": ("mooncake", 512, 1000, 1000),
    "mooncake_arxiv_toolmix_93.jsonl": ("mooncake", 512, 93, 93),
    "weka_first40_sessions.jsonl.gz": ("weka", 64, 40, 3330),
    "weka_small10_sessions.jsonl.gz": ("weka", 64, 10, 225),
    "weka_small10_as_mooncake_blk64.jsonl.gz": ("mooncake", 64, 16, 225),
    "aiperf_inference_day_4sessions.jsonl": ("mooncake", 512, 4, 33),
    "azure2023_conv_first2000.csv.gz": ("azure", 0, 2000, 2000),
    "azure2023_code_first2000.csv.gz": ("azure", 0, 2000, 2000),
    "tracelab_example_rounds.jsonl": ("tracelab", 0, 2, 19),
}


@needs_public_traces
@pytest.mark.parametrize("file", COUNTS)
def test_counts(file: str) -> None:
    trace = public_trace(file)

    roots = sum(session.parent_id is None for session in trace.sessions)
    assert (format_of(lines(file)[0]), trace.block_size_tokens, roots, trace.requests) == COUNTS[file]


@needs_public_traces
def test_the_template_whose_rows_contradict_each_other_needs_its_block_size_told() -> None:
    file = "aiperf_template_production_trace.jsonl"

    with pytest.raises(NotTold):
        public_trace(file)
    assert public_trace(file, 512).requests == 10


@needs_public_traces
def test_sub_agents_are_sessions_that_know_their_parents() -> None:
    trace = public_trace("weka_small10_sessions.jsonl.gz")

    assert sum(session.parent_id is not None for session in trace.sessions) == 6


@needs_public_traces
def test_no_public_file_was_forgotten() -> None:
    files = {path.name for path in FOLDER.iterdir() if path.suffix in (".jsonl", ".gz")}

    others = {"aiperf_template_production_trace.jsonl", "published_kvcacheai_hit_tokens.json.gz"}
    assert files == set(COUNTS) | others


def test_an_unknown_file_is_told_what_is_known() -> None:
    with pytest.raises(TraceError, match=r"none of the known formats; one of kvrelay .*, weka .*, tracelab"):
        format_of(b"a,b,c")
