"""Write a LoRA adapter with seeded random weights for a model of make_model.py. Run with the engine's own Python."""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

RANK = 8


def main(model: str, folder: str, seed: str) -> None:
    config = json.loads((Path(model) / "config.json").read_text())
    hidden, heads = config["hidden_size"], config["num_attention_heads"] * config["head_dim"]
    torch.manual_seed(int(seed))
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        weights[f"{name}.lora_A.weight"] = torch.randn(RANK, hidden) * 0.2
        weights[f"{name}.lora_B.weight"] = torch.randn(heads, RANK) * 0.2
    Path(folder).mkdir(parents=True, exist_ok=True)
    save_file(weights, str(Path(folder) / "adapter_model.safetensors"))
    facts = {"peft_type": "LORA", "r": RANK, "lora_alpha": 16, "target_modules": ["q_proj"], "bias": "none"}
    (Path(folder) / "adapter_config.json").write_text(json.dumps(facts | {"base_model_name_or_path": model}))


if __name__ == "__main__":
    main(*sys.argv[1:4])
