"""One prompt is computed and saved; then engines that differ in one thing each ask for it.

variants.py MODEL STORE PORT SCRATCH
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine import InProcess, clean_up, say

PROMPT = [7 * i % 251 for i in range(300)]


def replaced_weights(folder: Path) -> None:
    """Under the same path, of the same size."""
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.self_attn.k_proj.weight"] *= 1.25
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def other_tokenizer(folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"] = dict(reversed(list(content["model"]["vocab"].items())))
    (folder / "tokenizer.json").write_text(json.dumps(content))


def other_template(folder: Path) -> None:
    file = folder / "chat_template.jinja"
    file.write_text(file.read_text() + " ")


CHANGES: dict[str, tuple[str, Callable[[Path], None] | None, dict[str, Any]]] = {
    "replaced weights": ("model_revision", replaced_weights, {}),
    "tokenizer": ("tokenizer_hash", other_tokenizer, {}),
    "chat template": ("chat_template_version", other_template, {}),
    "model type": ("kv_dtype", None, {"dtype": "bfloat16"}),
    "KV type": ("kv_dtype", None, {"kv_cache_dtype": "fp8_e5m2"}),
    "block size": ("block_size", None, {"block_size": 64}),
    "rope": ("rope_config", None, {"hf_overrides": {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}}),
    "hash algorithm": ("hash_algorithm", None, {"prefix_caching_hash_algo": "sha256_cbor"}),
    "tenant": ("tenant_namespace", None, {"tenant": "other"}),
}


def main(model: str, store: str, port: str, scratch: str) -> None:
    folder = Path(scratch) / "model"
    results = {}
    for number, (name, (field, change, options)) in enumerate({"itself": ("", None, {}), **CHANGES}.items()):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(model, folder)
        if change is not None:
            change(folder)
        try:
            engine = InProcess(str(folder), store, int(port) + number, **options)
        except Exception as reason:
            results[name] = {"field": field, "impossible": f"{type(reason).__name__}: {reason}"[:300]}
            clean_up()
            continue
        if number == 0:
            engine.generate(PROMPT)
            engine.wait_until_saved(len(PROMPT) // 64, PROMPT)
            engine.llm.reset_prefix_cache()
        answer, contract = engine.generate(PROMPT), engine.ask("contract")
        results[name] = {
            "field": field,
            "kv": answer["kv"],
            "differs": contract.get("contract_differs", []),
            "fault": contract["fault"],
        }
        engine.close()
    say(results)


if __name__ == "__main__":
    main(*sys.argv[1:5])
