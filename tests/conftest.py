"""Rules for all tests: what a `covers` marker names must exist."""

from __future__ import annotations

import difflib

import pytest

from tests.requirements import IDS


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    unknown = [
        f"{item.nodeid}: unknown id `{name}`, nearest: {difflib.get_close_matches(name, IDS, n=1)}"
        for item in items
        for marker in item.iter_markers("covers")
        for name in marker.args
        if name not in IDS
    ]
    if unknown:
        raise pytest.UsageError("\n".join(unknown))
