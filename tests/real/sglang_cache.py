"""SGLang's own radix cache, event recorder and publisher, driven by lines of JSON. Run with a Python that has torch.

SGLang's server needs a GPU toolchain. Its cache does not: `RadixCache.create_simulated` keeps the tree without memory
pools. What this part of it never calls is replaced by empty modules, and its compiled hash by SHA-256 in Python: the
names of blocks are opaque to routers.

    python sglang_cache.py PACKAGES ENDPOINT REPLAY_ENDPOINT PAGE_SIZE
    {"insert": [tokens], "salt": text or null} | {"evict": tokens} | {"reset": true}  ->  {"batches": published so far}
    {"match": [tokens], "salt": text or null}  ->  {"tokens": longest prefix, "batches": ...}
"""

import hashlib
import importlib.abc
import importlib.machinery
import json
import sys
import time
import types
from array import array
from typing import Any, ClassVar
from unittest.mock import MagicMock

EMPTY = {"torchvision", "gguf", "IPython", "traitlets", "orjson"}


class _Empty(types.ModuleType):
    __path__: ClassVar[list[str]] = []
    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock()


class _EmptyModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] not in EMPTY:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        return


def main(packages: str, endpoint: str, replay_endpoint: str, page_size: str) -> None:
    sys.meta_path.insert(0, _EmptyModules())
    sys.path.insert(0, packages)
    from sglang.srt.disaggregation import kv_events
    from sglang.srt.mem_cache import radix_cache, utils

    utils.get_native_hash = _hashes
    cache = radix_cache.RadixCache.create_simulated(
        mock_allocator=MagicMock(device="cpu"), page_size=int(page_size), enable_kv_cache_events=True
    )
    publisher = kv_events.ZmqEventPublisher(
        0, endpoint=endpoint, replay_endpoint=replay_endpoint, topic="kv@m", buffer_steps=10_000
    )
    published = 0
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        answer = _obey(cache, json.loads(line))
        events = cache.take_events()
        if events:
            publisher.publish(kv_events.KVEventBatch(ts=time.time(), events=events))
            published += 1
        print(json.dumps({**answer, "batches": published}), flush=True)
    publisher.shutdown()


def _obey(cache: Any, order: dict[str, Any]) -> dict[str, int]:
    import torch
    from sglang.srt.mem_cache import base_prefix_cache as base
    from sglang.srt.mem_cache.radix_cache import RadixKey

    def key(name: str) -> Any:
        return RadixKey(token_ids=array("q", order[name]), extra_key=None, cache_salt=order.get("salt"))

    if "insert" in order:
        aligned = len(order["insert"]) // cache.page_size * cache.page_size
        cache.insert(base.InsertParams(key=key("insert").page_aligned(cache.page_size), value=torch.arange(aligned)))
    elif "evict" in order:
        cache.evict(base.EvictParams(num_tokens=order["evict"]))
    elif "reset" in order:
        cache.reset()
    else:
        return {"tokens": int(cache.match_prefix(base.MatchPrefixParams(key=key("match"))).device_prefix_len)}
    return {}


def _hashes(key: Any, prior_digest: bytes | None, page_size: int | None = None) -> Any:
    tokens, digest = list(key), prior_digest or b""
    names: list[str] = []
    for start in range(0, len(tokens), page_size or len(tokens) or 1):
        digest = hashlib.sha256(digest + repr(tokens[start : start + (page_size or len(tokens))]).encode()).digest()
        names.append(digest.hex())
    return names if page_size else names[0]


if __name__ == "__main__":
    main(*sys.argv[1:])
