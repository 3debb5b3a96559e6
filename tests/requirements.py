"""The ids that tests may claim to cover: one per line in `requirement_ids.txt`."""

from __future__ import annotations

from pathlib import Path

IDS: tuple[str, ...] = tuple(Path(__file__).with_name("requirement_ids.txt").read_text().split())
