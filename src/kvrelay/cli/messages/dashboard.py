"""What `kvrelay dashboard` says."""

from __future__ import annotations


def looking(url: str, seconds: float) -> str:
    return f"taking the baseline from {url} for {seconds:g} s"
