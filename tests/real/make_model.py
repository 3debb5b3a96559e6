"""Write a tiny Llama with seeded random weights and a byte-level tokenizer. Run with the engine's own Python.

Weights are drawn wide (std 0.25): with the usual small values a wrong KV might not change the most likely token.
"""

import sys

import tokenizers
import torch
import transformers

SPECIAL = ("<|im_start|>", "<|im_end|>", "<pad>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


SIZES = {
    # prefills some 15,000 tokens per second on one core: computes rightly, and takes no time
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2},
    # under a thousand: what is loaded in place of being computed saves time that shows
    "medium": {
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
    },
    # a few thousand: slow enough for a queue, quick enough for many runs
    "small": {"hidden_size": 320, "intermediate_size": 864, "num_hidden_layers": 6, "num_attention_heads": 10},
    # the same body, and every token id that a synthesised prompt has; each of its tokens has a text
    "wide": {"hidden_size": 320, "intermediate_size": 864, "num_hidden_layers": 6, "num_attention_heads": 10},
}
VOCABULARY = {"tiny": 512, "small": 512, "medium": 512, "wide": 32_768}


def main(size: str, folder: str, seed: str = "7") -> None:
    vocabulary = _write_tokenizer(folder, words=VOCABULARY[size] if size == "wide" else 0)
    torch.manual_seed(int(seed))
    config = transformers.LlamaConfig(
        **({"num_key_value_heads": 1, "head_dim": 32} | SIZES[size]),
        vocab_size=VOCABULARY[size],
        max_position_embeddings=8192,
        eos_token_id=vocabulary["<|im_end|>"],
        pad_token_id=vocabulary["<pad>"],
        bos_token_id=None,
    )
    model = transformers.LlamaForCausalLM(config)
    for weights in model.parameters():
        torch.nn.init.normal_(weights, std=0.25)
    model.float().save_pretrained(folder)


def _write_tokenizer(folder: str, *, words: int) -> dict[str, int]:
    """`words`: size of the vocabulary that is filled up with made-up words, which text never becomes."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*letters, *SPECIAL])}
    vocabulary |= {f"w{i}": i for i in range(len(vocabulary), words)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizers.AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<pad>", chat_template=TEMPLATE
    )
    fast.save_pretrained(folder)
    return vocabulary


if __name__ == "__main__":
    main(*sys.argv[1:4])
