"""Write a tiny Llama as GGUF: seeded random weights, one token per byte. Run with the Python of the llama.cpp tests."""

import sys

import gguf
import numpy as np

EMBED, FEED_FORWARD, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 64, 128, 2, 2, 1, 32
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_chance = np.random.default_rng(7)


def main(path: str) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    vocabulary = _describe(writer)
    for name, shape in _shapes(vocabulary).items():
        writer.add_tensor(name, np.ones(shape, np.float32) if "norm" in name else _drawn(shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _describe(writer: gguf.GGUFWriter) -> int:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL, *[gguf.TokenType.BYTE] * 256]
    writer.add_name("tiny")
    writer.add_context_length(8192)
    writer.add_embedding_length(EMBED)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types(kinds)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(TEMPLATE)
    return len(tokens)


def _shapes(vocabulary: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (vocabulary, EMBED),
        "output_norm.weight": (EMBED,),
        "output.weight": (vocabulary, EMBED),
    }
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.attn_norm.weight": (EMBED,),
            f"blk.{layer}.ffn_norm.weight": (EMBED,),
            f"blk.{layer}.attn_q.weight": (HEADS * HEAD_DIM, EMBED),
            f"blk.{layer}.attn_k.weight": (KV_HEADS * HEAD_DIM, EMBED),
            f"blk.{layer}.attn_v.weight": (KV_HEADS * HEAD_DIM, EMBED),
            f"blk.{layer}.attn_output.weight": (EMBED, HEADS * HEAD_DIM),
            f"blk.{layer}.ffn_gate.weight": (FEED_FORWARD, EMBED),
            f"blk.{layer}.ffn_up.weight": (FEED_FORWARD, EMBED),
            f"blk.{layer}.ffn_down.weight": (EMBED, FEED_FORWARD),
        }
    return shapes


def _drawn(shape: tuple[int, ...]) -> np.ndarray:
    """Wide, so that another KV would show in the most likely token."""
    return _chance.normal(0, 0.25, shape).astype(np.float32)


if __name__ == "__main__":
    main(sys.argv[1])
