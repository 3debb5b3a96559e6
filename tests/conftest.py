"""Rules for all tests: what a `covers` marker names must exist, and no example of a property is timed."""

from __future__ import annotations

import difflib

import hypothesis
import pytest

from tests.requirements import IDS

# How long an example takes says how busy the machine is, and nothing about the code.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


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
