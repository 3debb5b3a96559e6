"""What the fields of an LMCache configuration mean: type, unit, range, and what turning each up or down does.

The same as a JSON schema, so that editors and reviews can hold a file against it before anything is started. What only
a host can tell (does the cache fit?) is not in it: `reader.py` judges that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from kvrelay.edge.connectors.lmcache.fields import NOT_NEEDED, REFUSED_WHEN_ON, REFUSED_WHEN_SET


class Knob(Struct, frozen=True, kw_only=True):
    """`more` and `less`: what happens when the value is raised or lowered, or switched on or off."""

    schema: Mapping[str, Any]
    unit: str = ""
    more: str
    less: str


KNOBS: Mapping[str, Knob] = {
    "chunk_size": Knob(
        schema={"type": "integer", "minimum": 1, "maximum": 4096},
        unit="tokens",
        more="fewer objects and less around each, but a longer tail of every prompt never hits",
        less="shorter common prefixes hit, for more objects and more look-ups",
    ),
    "local_cpu": Knob(
        schema={"type": "boolean"},
        more="on: host memory is the first tier, nearest and seen by this host only",
        less="off: every hit is fetched from disk or from the shared tier",
    ),
    "max_local_cpu_size": Knob(
        schema={"type": "number", "minimum": 0},
        unit="GiB of host memory, of each engine process",
        more="more hits nearby, until the host runs out of memory and the kernel ends a worker",
        less="more is fetched from further away: paying for sharing and walking the long way",
    ),
    "local_disk": Knob(
        schema={"anyOf": [{"type": "string"}, {"type": "null"}, {"type": "boolean"}]},
        more="set: a tier on disk, kept over restarts",
        less="unset: nothing on disk",
    ),
    "max_local_disk_size": Knob(
        schema={"type": "number", "minimum": 0},
        unit="GiB",
        more="older prefixes stay, until the disk is full",
        less="they are evicted sooner",
    ),
    "remote_url": Knob(
        schema={"anyOf": [{"type": "string"}, {"type": "null"}]},
        more="set: all workers share one store, and restarts do not begin empty; it has to be near",
        less="unset: nothing is shared between hosts",
    ),
    "remote_serde": Knob(
        schema={"anyOf": [{"type": "string", "enum": ["naive", "torch", "safetensor", "fast"]}, {"type": "null"}]},
        more="packed tighter (cachegen, kivi): fewer bytes, other numbers; refused here",
        less="naive: bytes as they are",
    ),
    "save_decode_cache": Knob(
        schema={"type": "boolean"},
        more="on: what was generated is there for the next turn, for more writes",
        less="off: the next turn computes the answer again",
    ),
    "cache_policy": Knob(
        schema={"type": "string", "enum": ["LRU", "LFU", "S3FIFO"]},
        more="LFU, S3FIFO: a scan of prompts used once does not flush what is used often",
        less="LRU: right for conversations",
    ),
    "blocking_timeout_secs": Knob(
        schema={"type": "number", "exclusiveMinimum": 0},
        unit="s",
        more="slow loads are waited for",
        less="a store that hangs costs less, and more is computed",
    ),
    "lookup_timeout_ms": Knob(
        schema={"type": "number", "exclusiveMinimum": 0},
        unit="ms",
        more="slow look-ups are waited for",
        less="more prompts are computed without an answer",
    ),
}


def json_schema() -> dict[str, Any]:
    """Draft 2020-12. Names that nobody knows are violations, as are switches that are refused when they are on."""
    properties: dict[str, Any] = {
        name: {
            **knob.schema,
            "description": "; ".join(
                filter(None, (knob.unit, f"more: {knob.more}", f"less: {knob.less}")),
            ),
        }
        for name, knob in KNOBS.items()
    }
    properties |= {
        name: {"anyOf": [{"enum": [False]}, {"type": "null"}], "description": reason}
        for name, reason in REFUSED_WHEN_ON.items()
    }
    properties |= {
        name: {"enum": [None, [], {}, ""], "description": reason} for name, reason in REFUSED_WHEN_SET.items()
    }
    properties |= {name: {"description": f"not needed: {reason}"} for name, reason in NOT_NEEDED.items()}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "LMCache configuration, as kvrelay reads it",
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
    }
