"""What reaches the name of a chunk, and what is read off an engine to name it by."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvrelay.core.contract.fields import Contract, ContractError
from kvrelay.core.contract.identity import Namespace
from kvrelay.edge.connectors.vllm.kv.chain import Chain, Medium, media_by_chunk, namespace_for, rank_key
from kvrelay.edge.connectors.vllm.kv.digests import FileDigests
from kvrelay.edge.connectors.vllm.kv.facts import MemoryFacts, engine_contract
from kvrelay.edge.connectors.vllm.kv.records import given_id
from kvrelay.edge.connectors.vllm.kv.register import ContractRegister
from kvrelay.edge.connectors.vllm.kv.settings import Epochs, Settings, SettingsError, chunk_blocks, read_settings
from kvrelay.edge.connectors.vllm.kv.store import Fetched, Found, Places, open_store
from kvrelay.edge.stores.tiered import ChunkShape

MEMORY = MemoryFacts(
    layer_names=("model.layers.0", "model.layers.1"),
    page_shape=(1, 32, 64),
    page_strides=(2048, 64, 1),
    page_bytes=8192,
    dtype="float32",
    device="cpu",
    backend="CPU_ATTN",
    kernel="vec",
)


def model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name, content in (
        ("model.safetensors", "weights"),
        ("config.json", "{}"),
        ("tokenizer.json", "{}"),
        ("tokenizer_config.json", json.dumps({"chat_template": "t", "a": 1})),
    ):
        (folder / name).write_text(content)
    return folder


def engine(folder: Path, **changes: Any) -> Any:
    members: dict[str, Any] = {
        "model": str(folder),
        "revision": None,
        "tokenizer": str(folder),
        "tokenizer_revision": None,
        "quantization": None,
        "dtype": "torch.float32",
        "hf_overrides": {},
        "hf_text_config": SimpleNamespace(rope_theta=10_000.0, max_position_embeddings=4096),
    }
    cache = {"cache_dtype": "auto", "block_size": 32, "prefix_caching_hash_algo": "sha256", "kv_cache_layout": "LBHNC"}
    parallel = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1}
    parts = {"model_config": members, "cache_config": cache, "parallel_config": parallel}
    parts["load_config"] = {"load_format": "auto"}
    for name, value in changes.items():
        section, _, member = name.partition("__")
        parts[section][member] = value
    return SimpleNamespace(**{name: SimpleNamespace(**part) for name, part in parts.items()})


def contract(config: Any, memory: MemoryFacts = MEMORY, **more: Any) -> Contract:
    given: dict[str, Any] = {
        "versions": {"vllm": "0.32.0"},
        "tenant": "default",
        "digests": FileDigests(None),
        "stated": {},
    }
    return engine_contract(config, memory, **(given | more))


def change(folder: Path, name: str, content: str) -> None:
    (folder / name).write_text(content)


@pytest.mark.covers("CC-01", "CC-02", "CC-03", "CC-04", "CC-05", "CC-06", "CC-07", "CC-08", "CC-11", "CC-13")
def test_each_fact_that_changes_alone_is_named(tmp_path: Path) -> None:
    folder = model(tmp_path / "a")
    base = contract(engine(folder))
    rope = SimpleNamespace(rope_theta=500_000.0, max_position_embeddings=4096)

    def memory(**changes: Any) -> MemoryFacts:
        return MemoryFacts(**(MEMORY.__dict__ | changes))

    cases: list[tuple[str, Contract]] = [
        ("weight_quantization", contract(engine(folder, model_config__quantization="awq"))),
        ("attention_backend", contract(engine(folder), memory(backend="FLASH_ATTN"))),
        ("kv_dtype", contract(engine(folder, cache_config__cache_dtype="fp8"))),
        ("block_size", contract(engine(folder, cache_config__block_size=64))),
        ("layer_layout", contract(engine(folder), memory(page_shape=(32, 1, 64)))),
        ("kernel_layout", contract(engine(folder), memory(kernel="amx"))),
        ("parallel_geometry", contract(engine(folder, parallel_config__tensor_parallel_size=2))),
        ("rope_config", contract(engine(folder, model_config__hf_text_config=rope))),
        ("tenant_namespace", contract(engine(folder), tenant="other")),
        ("engine_build", contract(engine(folder), versions={"vllm": "0.33.0"})),
        ("hash_algorithm", contract(engine(folder, cache_config__prefix_caching_hash_algo="xxhash"))),
        ("model_revision", contract(engine(folder, model_config__hf_overrides={"num_layers": 1}))),
    ]
    for number, (field, name, content) in enumerate(
        (
            ("model_revision", "model.safetensors", "WEIGHTS"),
            ("tokenizer_hash", "tokenizer.json", '{"more": 1}'),
            ("chat_template_version", "tokenizer_config.json", json.dumps({"chat_template": "u", "a": 1})),
        )
    ):
        other = model(tmp_path / str(number))
        change(other, name, content)
        cases.append((field, contract(engine(other))))
    assert contract(engine(model(tmp_path / "same"))) == base
    for field, changed in cases:
        assert base.differing_fields(changed) == (field,)
        assert changed.digest() != base.digest()


@pytest.mark.parametrize(
    ("changes", "memory", "missing"),
    [
        ({"load_config__load_format": "dummy"}, {}, "model_revision"),
        ({"model_config__model": "/nowhere/at/all"}, {}, "model_revision"),
        ({"model_config__hf_overrides": len}, {}, "model_revision"),
        ({}, {"backend": ""}, "attention_backend"),
        ({}, {"kernel": None}, "kernel_layout"),
    ],
)
@pytest.mark.covers("S33")
def test_what_is_not_known_stops_sharing_and_is_named(
    tmp_path: Path, changes: dict[str, Any], memory: dict[str, Any], missing: str
) -> None:
    config = engine(model(tmp_path / "m"), **changes)
    with pytest.raises(ContractError, match=f"missing: `{missing}`"):
        contract(config, MemoryFacts(**(MEMORY.__dict__ | memory)))
    assert contract(config, MemoryFacts(**(MEMORY.__dict__ | memory)), stated={missing: "stated by the operator"})


@pytest.mark.covers("CC-01")
def test_weights_replaced_under_the_same_path_size_and_time_are_seen(tmp_path: Path) -> None:
    folder, memory = model(tmp_path / "m"), tmp_path / "digests.json"
    first = contract(engine(folder), digests=FileDigests(memory))
    assert contract(engine(folder), digests=FileDigests(memory)) == first
    weights = folder / "model.safetensors"
    before = weights.stat()
    weights.write_text("WEIGHTS")
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert weights.stat().st_size == before.st_size
    assert first.differing_fields(contract(engine(folder), digests=FileDigests(memory))) == ("model_revision",)


def keys(**changes: Any) -> tuple[bytes, ...]:
    given: dict[str, Any] = {
        "contract_digest": bytes(32),
        "tenant": "t",
        "secret": b"s" * 16,
        "epoch": 0,
        "salt": None,
        "adapter": None,
    }
    media = changes.pop("media", ())
    return Chain(namespace_for(**(given | changes)), 4, media).keys(range(12), 3)


@pytest.mark.covers("CC-09", "CC-10", "CC-11", "CC-14", "S34")
def test_everything_that_matters_reaches_every_name() -> None:
    variants = [
        keys(),
        keys(contract_digest=b"x" * 32),
        keys(tenant="u"),
        keys(secret=b"z" * 16),
        keys(epoch=1),
        keys(salt="a"),
        keys(salt="b"),
        keys(adapter="a"),
        keys(adapter="b"),
        keys(media=[Medium("cat", 1, 2)]),
        keys(media=[Medium("dog", 1, 2)]),
        keys(media=[Medium("dog", 2, 2)]),
    ]
    assert len({key for variant in variants for key in variant}) == 3 * len(variants)


def test_a_chain_that_grows_keeps_its_names() -> None:
    namespace = Namespace(bytes(32), "t", b"", 0)
    growing = Chain(namespace, 4, [Medium("cat", 5, 2)])
    parts = [growing.keys(range(4 * n), n) for n in (1, 2, 3)]
    assert parts[-1] == Chain(namespace, 4, [Medium("cat", 5, 2)]).keys(range(12), 3)
    assert parts[0] == parts[-1][:1]


def test_media_count_where_they_lie() -> None:
    assert media_by_chunk([Medium("cat", 3, 3), Medium("dog", 9, 100)], chunks=4, chunk_tokens=4) == [
        "cat@3",
        "cat@-1",
        "dog@1",
        "dog@-3",
    ]


def test_ranks_have_names_of_their_own() -> None:
    names = {rank_key(b"k" * 32, rank, ranks) for ranks in (1, 2, 4) for rank in range(ranks)}
    assert len(names) == 7 and b"k" * 32 in names


@pytest.mark.parametrize(
    ("engine_id", "given"),
    [
        ("cmpl-mine-0-0123abcd", "mine"),
        ("chatcmpl-a-b-c-0123abcd", "a-b-c"),
        ("1_cmpl-mine-0-0123abcd", "mine"),
        ("strange", "strange"),
    ],
)
def test_the_engines_id_leads_to_the_one_that_was_given(engine_id: str, given: str) -> None:
    assert given_id(engine_id) == given


def test_an_epoch_file_is_read_again_and_a_broken_one_is_no_guess(tmp_path: Path) -> None:
    file = tmp_path / "epoch"
    file.write_text("3\n")
    epochs = Epochs(Settings(store={}, epoch_file=str(file)))
    assert epochs.now() == 3
    file.with_suffix(".new").write_text("4")
    os.replace(file.with_suffix(".new"), file)
    assert epochs.now() == 4
    file.with_suffix(".new").write_text("four")
    os.replace(file.with_suffix(".new"), file)
    with pytest.raises(ValueError):
        epochs.now()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"store": {}, "chunk_tokenz": 1}, "did you mean `chunk_tokens`?"),
        ({}, "exactly one of `config`"),
        ({"store": {}, "config": "x"}, "exactly one of `config`"),
        ({"store": {}, "load_threads": 0}, "`load_threads` is 0"),
        ({"store": {}, "epoch": "x"}, "epoch"),
    ],
)
def test_settings_that_cannot_be_used_say_which_and_why(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        read_settings(given)


def test_chunks_are_whole_blocks_of_about_a_mebibyte() -> None:
    def blocks(chunk_tokens: int, block_bytes: int, block: int = 32) -> int:
        return chunk_blocks(
            Settings(store={}, chunk_tokens=chunk_tokens), block_size_tokens=block, block_bytes=block_bytes
        )

    assert [blocks(0, size) for size in (16_384, 700_000, 1 << 20, 1 << 23)] == [4, 2, 1, 1]
    assert (blocks(64, 1), blocks(0, 1, block=256)) == (2, 1)
    with pytest.raises(SettingsError, match="multiple of the engine's block size, 32 tokens"):
        blocks(48, 1)


class Shelf:
    """A store that keeps what it gets."""

    def __init__(self) -> None:
        self.kept: dict[bytes, bytes] = {}

    def lookup(self, namespace: Namespace, keys: Sequence[bytes], shape: ChunkShape) -> Found:
        return Found(next((i for i, key in enumerate(keys) if key not in self.kept), len(keys)))

    def fetch(
        self,
        namespace: Namespace,
        keys: Sequence[bytes],
        places: Sequence[Places],
        shape: ChunkShape,
        into: Sequence[memoryview],
    ) -> Fetched:
        for key, view in zip(keys, into, strict=True):
            view[:] = self.kept[key]
        return Fetched(("hit",) * len(keys), 1.0)

    def save(
        self, namespace: Namespace, key: bytes, shape: ChunkShape, payload: memoryview, *, first_token: int
    ) -> str:
        self.kept.setdefault(key, bytes(payload))
        return "stored"

    def observe_prefill(self, tokens: int, ms: float) -> None: ...
    def observe_fetch(self, bytes_by_tier: Mapping[str, int], ms_by_tier: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


@pytest.mark.covers("S33", "CC-19")
def test_the_register_names_what_the_most_similar_other_differs_in(tmp_path: Path) -> None:
    folder = model(tmp_path / "m")
    register = ContractRegister(Shelf(), tenant="t", secret=b"")
    first = contract(engine(folder))
    assert register.join(first) == ()
    assert register.join(first) == ()
    assert register.join(contract(engine(folder, cache_config__cache_dtype="fp8"))) == ("kv_dtype",)
    both = contract(engine(folder, cache_config__cache_dtype="fp8", model_config__quantization="awq"))
    assert register.join(both) == ("weight_quantization",)
    assert register.join(first) == ("kv_dtype",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        ("[store", "is not TOML"),
        ("a = 1", "has no section"),
        ("[store]\ntierz = []", "did you mean `tiers`?"),
        ('[store]\n[[store.tiers]]\nurl = "floppy:///a"', "is no store"),
    ],
)
def test_a_store_that_cannot_be_opened_is_refused_at_the_start(
    tmp_path: Path, content: str | None, message: str
) -> None:
    file = tmp_path / "store.toml"
    if content is not None:
        file.write_text(content)
    with pytest.raises(SettingsError, match=message):
        open_store(Settings(config=str(file)))


def test_a_store_is_opened_from_a_file_or_inline(tmp_path: Path) -> None:
    file = tmp_path / "store.toml"
    file.write_text(f'[store]\n[[store.tiers]]\nkind = "file"\nurl = "file://{tmp_path}/kv"\n')
    for settings in (Settings(config=str(file)), Settings(store={"tiers": [{"url": f"file://{tmp_path}/kv"}]})):
        open_store(settings).close()
