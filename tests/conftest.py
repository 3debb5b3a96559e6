"""Shared by all tests: the `covers` marker is checked against the published ids when they are at hand."""
