from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from kvrelay.core.traces.trace import TraceError
from kvrelay.lab.replay.trace_file import bundled_trace, read_trace

ROW = b'{"timestamp": 0, "input_length": 1030, "output_length": 5, "hash_ids": [0, 1, 2]}\n'


def test_formats_are_told_apart_and_the_digest_is_of_the_unpacked_bytes(tmp_path: Path) -> None:
    plain, packed = tmp_path / "rows.jsonl", tmp_path / "rows.jsonl.gz"
    plain.write_bytes(ROW)
    packed.write_bytes(gzip.compress(ROW, mtime=0))

    first, second = read_trace(plain), read_trace(packed)

    assert (first.format, first.sha256, first.trace) == (second.format, second.sha256, second.trace)
    assert first.format == "mooncake" and bundled_trace().format == "weka"


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"", "an empty file"),
        (gzip.compress(ROW, mtime=0)[:-9], "damaged gzip"),
        (b"a,b,c\n1,2,3\n", "none of the known formats"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes, found: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)

    with pytest.raises(TraceError, match=found):
        read_trace(path)


def test_presets_are_named_like_files() -> None:
    smoke = read_trace(Path("preset:prefix_repetition"))

    assert (smoke.name, smoke.format, smoke.trace.requests) == ("preset:prefix_repetition", "preset", 100)
    assert smoke.preset is not None and smoke.preset.max_in_flight == 4
    assert smoke.sha256 == read_trace(Path("preset:prefix_repetition")).sha256
    with pytest.raises(TraceError, match=r"unknown preset `agent`; one of .*preset:agents"):
        read_trace(Path("preset:agent"))
