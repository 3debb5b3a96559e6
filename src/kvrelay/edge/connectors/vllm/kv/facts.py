"""The compatibility contract, read off the running engine: from its configuration, its files and its KV memory.

Nothing is assumed. A fact that cannot be read is left out; the contract then refuses to be formed and names what is
missing, and the engine serves as if we were not there. The setting `contract` may state a field instead.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrelay.core.contract.digest import keyed_digest
from kvrelay.core.contract.fields import Contract
from kvrelay.edge.connectors.vllm.kv.digests import FileDigests

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "config.json", "quantize_config.json")
_TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt"),
    *("special_tokens_map.json", "added_tokens.json", "tekken.json"),
)
_TEMPLATES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
_ADAPTER = ("adapter_config.json", "*.safetensors", "*.bin", "*.pt")
_ROPE_KEYS = ("rope_parameters", "rope_theta", "rope_scaling", "partial_rotary_factor", "rotary_pct")


@dataclass(frozen=True)
class MemoryFacts:
    """What one worker process saw of its KV memory when the engine handed it over."""

    layer_names: tuple[str, ...]
    page_shape: tuple[int, ...]  # of one block in one layer
    page_strides: tuple[int, ...]
    page_bytes: int
    dtype: str
    device: str
    backend: str
    kernel: str | None  # inner order of a block, where a backend has several


def memory_facts(kv_caches: Mapping[str, Any], layers: Mapping[str, Any]) -> MemoryFacts:
    """`layers`: the engine's attention layers by name."""
    names = tuple(kv_caches)
    tensor, layer = kv_caches[names[0]], layers.get(names[0])
    page = tensor[0]
    backend, kernel = getattr(layer, "attn_backend", None), getattr(layer, "isa", None)
    return MemoryFacts(
        layer_names=names,
        page_shape=tuple(page.shape),
        page_strides=tuple(page.stride()),
        page_bytes=page.numel() * page.element_size(),
        dtype=str(tensor.dtype).removeprefix("torch."),
        device=tensor.device.type,
        backend="" if backend is None else str(backend.get_name()),
        kernel=None if kernel is None else str(kernel),
    )


def engine_contract(
    config: Any,
    memory: MemoryFacts,
    *,
    versions: Mapping[str, str],
    tenant: str,
    digests: FileDigests,
    stated: Mapping[str, str],
) -> Contract:
    """`config`: the engine's whole configuration. Raises ContractError, which names every field that is missing."""
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    folder, tokenizer = (
        model_folder(model.model, model.revision),
        model_folder(model.tokenizer, model.tokenizer_revision),
    )
    found: dict[str, object] = {
        "model_revision": _model_revision(config, folder, digests),
        "weight_quantization": f"{model.quantization or 'none'}/{_plain(model.dtype)}",
        "tokenizer_hash": None if tokenizer is None else tokenizer_digest(tokenizer, digests),
        "chat_template_version": None if tokenizer is None else chat_template_version(tokenizer),
        "attention_backend": memory.backend or None,
        "kv_dtype": f"{memory.dtype}/{cache.cache_dtype}",
        "block_size": cache.block_size,
        "layer_layout": _layer_layout(memory, getattr(cache, "kv_cache_layout", None)),
        "kernel_layout": memory.kernel
        or (None if memory.device == "cpu" else f"{memory.backend}/{memory.page_strides}"),
        "parallel_geometry": _parallel_geometry(parallel),
        "rope_config": rope_config(model.hf_text_config),
        "lora_id": "",  # an adapter is part of a chunk's own name
        "multimodal_hash": "",  # so is what lies in a prompt beside tokens
        "tenant_namespace": tenant,
        "engine_build": "/".join(f"{name}-{version}" for name, version in versions.items()),
        "hash_algorithm": f"blake2b-256/{cache.prefix_caching_hash_algo}",
    }
    return Contract.from_mapping({**found, **stated}, source="the running vLLM")


def model_folder(name: str, revision: str | None) -> Path | None:
    """Where the model's files lie; None when that is not known on this machine."""
    if Path(name).is_dir():
        return Path(name)
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except Exception:  # whatever the library makes of a model that is not in its cache
        return None


def adapter_digest(path: str, digests: FileDigests) -> str:
    """An adapter by content. Raises OSError or ValueError."""
    folder = model_folder(path, None)
    if folder is None:
        raise ValueError("the adapter's files were not found")
    return digests.of_files(matching(folder, _ADAPTER), root=folder)


def weights_digest(folder: Path, digests: FileDigests) -> str | None:
    return _digest(digests, folder, _WEIGHTS)


def tokenizer_digest(folder: Path, digests: FileDigests) -> str | None:
    return _digest(digests, folder, _TOKENIZER, without_template=True)


def rope_config(text_config: Any) -> str:
    values = {key: getattr(text_config, key, None) for key in (*_ROPE_KEYS, "max_position_embeddings")}
    return json.dumps(values, sort_keys=True, default=str)


def chat_template_version(folder: Path) -> str:
    """The template decides nothing about KV beyond the tokens, which are in every name; it is kept so that a difference
    can be told."""
    fields = [(name, _template(folder / name)) for name in _TEMPLATES if (folder / name).is_file()]
    return keyed_digest(b"", fields, digest_bytes=16).hex()


def matching(folder: Path, patterns: Iterable[str]) -> list[Path]:
    return sorted({file for pattern in patterns for file in folder.glob(pattern) if file.is_file()})


def _model_revision(config: Any, folder: Path | None, digests: FileDigests) -> str | None:
    """Files, and what was said over them at the start. Weights that were made up have no name."""
    model, load_format = config.model_config, str(config.load_config.load_format)
    if folder is None or load_format == "dummy" or callable(model.hf_overrides):
        return None
    overrides = {key: value for key, value in model.hf_overrides.items() if key not in _ROPE_KEYS}
    weights = weights_digest(folder, digests)
    if weights is None or not overrides:
        return weights
    text = json.dumps(overrides, sort_keys=True, default=str)
    return keyed_digest(b"", [("weights", weights.encode()), ("overrides", text.encode())], digest_bytes=16).hex()


def _digest(
    digests: FileDigests, folder: Path, patterns: Iterable[str], *, without_template: bool = False
) -> str | None:
    try:
        edit = _without_template if without_template else None
        return digests.of_files(matching(folder, patterns), root=folder, edit=edit)
    except (OSError, ValueError):
        return None


def _without_template(file: Path) -> bytes | None:
    if file.name != "tokenizer_config.json":
        return None
    content = json.loads(file.read_bytes())
    content.pop("chat_template", None)
    return json.dumps(content, sort_keys=True).encode()


def _template(file: Path) -> bytes:
    if file.name != "tokenizer_config.json":
        return file.read_bytes()
    return json.dumps(json.loads(file.read_bytes()).get("chat_template")).encode()


def _layer_layout(memory: MemoryFacts, layout: object) -> str:
    names = keyed_digest(b"", [("layer", name.encode()) for name in memory.layer_names], digest_bytes=8).hex()
    shape = "x".join(map(str, memory.page_shape))
    return f"{layout}/{len(memory.layer_names)} layers {names}/{shape}/{memory.page_bytes} bytes"


def _parallel_geometry(parallel: Any) -> str:
    sizes = {
        "tp": parallel.tensor_parallel_size,
        "pp": parallel.pipeline_parallel_size,
        "pcp": getattr(parallel, "prefill_context_parallel_size", 1),
        "dcp": getattr(parallel, "decode_context_parallel_size", 1),
    }
    return " ".join(f"{name}={size}" for name, size in sizes.items())


def _plain(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
