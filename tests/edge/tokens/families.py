"""Tokenizers of three families, made here from made-up words, and a chat template with tools for each."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest

LETTERS = "abcdefghijklmnopqrstuvwxyz"
OTHERS = ("naïve", "Ångström", "漢字", "かな", "👩‍🔬", "don't", "3.14", "{x}", "İ", "ﬁn", "é", "</b>")
MARKS = ("<|im_start|>", "<|im_end|>", "<|tool|>")

CHATML = (
    "{% if tools %}<|im_start|>system\n# Tools\n{% for tool in tools %}<|tool|>{{ tool | tojson }}\n{% endfor %}"
    "<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}\n<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
INST = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }}</s>"
    "{% else %}{% if loop.first and tools %}[TOOLS]{{ tools | tojson }}{% endif %}[INST] {{ m.content }} [/INST]"
    "{% endif %}{% endfor %}"
)
CLS = "[CLS]{% for m in messages %}{{ m.role }}: {{ m.content }}[SEP]{% endfor %}{{ tools | tojson if tools else '' }}"


def words(chance: random.Random, count: int = 4000) -> list[str]:
    return ["".join(chance.choices(LETTERS, k=chance.randint(2, 9))) for _ in range(count)]


def _corpus(chance: random.Random) -> Iterator[str]:
    known = words(chance)
    for _ in range(1500):
        yield " ".join(chance.choices((*known, *OTHERS), k=20))


def byte_level() -> Any:
    """As Qwen, Llama 3, GPT."""
    return _copy_of(_byte_level())


def metaspace(*, prepend: str = "first") -> Any:
    """As Mistral and Llama 2: a space for every word, and its own beginning for a text."""
    return _copy_of(_metaspace(prepend))


def wordpiece() -> Any:
    """As BERT."""
    return _copy_of(_wordpiece())


def _copy_of(trained: str) -> Any:
    """Tests change what they get; and training anew would not give the same vocabulary again."""
    return pytest.importorskip("tokenizers").Tokenizer.from_str(trained)


@cache
def _byte_level() -> str:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.normalizer = tokenizers.normalizers.NFC()
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.post_processor = tokenizers.processors.ByteLevel(trim_offsets=False)
    _train(tokenizers, made, MARKS, alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made.add_tokens([tokenizers.AddedToken("<tool_call>", normalized=False)])
    trained: str = made.to_str()
    return trained


@cache
def _metaspace(prepend: str) -> str:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme=prepend, split=False)
    _train(tokenizers, made, ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOLS]"))
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))]
    )
    trained: str = made.to_str()
    return trained


@cache
def _wordpiece() -> str:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    made.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    special = ["[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = tokenizers.trainers.WordPieceTrainer(vocab_size=3000, special_tokens=special, show_progress=False)
    made.train_from_iterator(_corpus(random.Random(1)), trainer)
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[(mark, made.token_to_id(mark)) for mark in ("[CLS]", "[SEP]")]
    )
    trained: str = made.to_str()
    return trained


FAMILIES: dict[str, tuple[Callable[[], Any], str]] = {
    "byte_level": (byte_level, CHATML),
    "metaspace": (metaspace, INST),
    "wordpiece": (wordpiece, CLS),
}


def _train(tokenizers: Any, made: Any, special: tuple[str, ...], alphabet: Any = ()) -> None:
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=6000, special_tokens=list(special), initial_alphabet=list(alphabet), show_progress=False
    )
    made.train_from_iterator(_corpus(random.Random(1)), trainer)
