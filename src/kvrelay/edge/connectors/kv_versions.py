"""Which of the packages that move KV, and the engine they move it for, are installed where this runs."""

from __future__ import annotations

from importlib import metadata

PACKAGES = ("kvrelay", "vllm", "lmcache")


def installed_versions() -> dict[str, str]:
    """By package; one that is not installed is left out. Distributions are read, nothing is imported."""
    found: dict[str, str] = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
