"""LMCache's settings as environment variables: lines as in a shell script, an env file or a manifest's `env`.

LMCACHE_CHUNK_SIZE=256
export LMCACHE_REMOTE_URL="redis://10.0.0.5:6379"
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

PREFIX = "LMCACHE_"
_LINE = re.compile(r"^\s*(?:export\s+)?(?P<name>LMCACHE_[A-Z0-9_]+)\s*=\s*(?P<value>.*?)\s*$")
_ELSEWHERE = frozenset(("LMCACHE_CONFIG_FILE", "LMCACHE_USE_EXPERIMENTAL", "LMCACHE_LOG_LEVEL"))
"""Not fields: where the file is, and how much is logged."""


def looks_like_environment(text: str) -> bool:
    """Whether every line that says anything sets a variable, and at least one is LMCache's."""
    said = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    assigned = [line for line in said if re.match(r"^\s*(?:export\s+)?[A-Za-z_][A-Za-z0-9_]*=", line)]
    return bool(said) and len(assigned) == len(said) and any(_LINE.match(line) for line in said)


def read_environment(text: str, scalar: Any) -> Mapping[str, Any]:
    """By the fields' names in the file. `scalar` reads a value as YAML would; later lines win, as in a shell."""
    found: dict[str, Any] = {}
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None or match["name"] in _ELSEWHERE:
            continue
        value = match["value"]
        if len(value) >= 2 and value[0] == value[-1] and value[0] in "\"'":
            value = value[1:-1]
        found[match["name"].removeprefix(PREFIX).lower()] = scalar(value)
    return found
