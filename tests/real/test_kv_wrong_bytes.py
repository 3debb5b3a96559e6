"""What other systems answered from wrong bytes: each of it tried between two real vLLM workers, on the stored objects.

In every case the request is served, what is wrong is not used, the answer is that of a worker without any cache (to the
bit where nothing was loaded), and the report says what was really loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.real.kv_pair import ADAPTER, KvPair, prompt_of
from tests.real.kv_worker import CHUNK_TOKENS, Answered, wait_for
from tests.real.test_kv_sharing import damage

pytestmark = [pytest.mark.real, pytest.mark.timeout(1500)]

TOKENS = 5 * CHUNK_TOKENS + 10


def truncate(files: list[Path]) -> None:
    for file in files:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def delete(files: list[Path]) -> None:
    for file in files:
        file.unlink()


def cross(files: list[Path]) -> None:
    """Each takes the place of another: sound ciphertexts of the same tenant, under wrong names."""
    contents = [file.read_bytes() for file in files]
    for file, content in zip(files, [*contents[1:], contents[0]], strict=True):
        file.write_bytes(content)


@pytest.mark.covers("CN-05", "CN-06", "CN-07", "CC-15", "CC-16")
@pytest.mark.parametrize(
    ("what", "outcomes"),
    [
        (damage, {"corrupt"}),
        (truncate, {"partial", "corrupt"}),
        (delete, {"hit", "none"}),
        (cross, {"foreign", "corrupt"}),
    ],
)
@pytest.mark.parametrize("all_of_them", [True, False])
def test_bytes_that_are_not_what_they_should_be_are_not_used(
    kv_pair: KvPair, what: Callable[[list[Path]], None], outcomes: set[str], all_of_them: bool
) -> None:
    prompt = prompt_of(TOKENS, seed=hash_of(what, all_of_them))
    files, cold = kv_pair.compute_on_a(prompt)
    assert isinstance(cold, Answered) and len(files) == 5
    kv_pair.shared.leave("folder")
    ordered = sorted(files, key=lambda file: file.stat().st_mtime_ns)
    what(ordered if all_of_them else ordered[2:])
    kv_pair.b.forget()
    answered = kv_pair.b.complete(prompt)
    assert answered.kv["outcome"] in outcomes
    loaded = answered.kv.get("loaded_tokens", 0)
    assert loaded <= (0 if all_of_them else 2 * CHUNK_TOKENS)
    if loaded:  # the engine splits its work otherwise than for a cold prompt, which shows in the last digits
        assert answered.token_ids == cold.token_ids
        assert answered.logprobs == pytest.approx(cold.logprobs, abs=1e-4)
    else:
        assert answered.exact == cold.exact
    assert answered.kv["cached_tokens"] == loaded


@pytest.mark.covers("CC-09", "S33")
def test_an_adapter_never_gets_the_base_models_kv(kv_pair: KvPair) -> None:
    prompt = prompt_of(TOKENS, seed=301)
    _, base = kv_pair.compute_on_a(prompt)
    kv_pair.b.forget()
    saved = kv_pair.b.stats().get("saves_stored", 0)
    adapted = kv_pair.b.complete(prompt, model=ADAPTER)
    assert (adapted.kv["outcome"], adapted.kv["cached_tokens"]) == ("none", 0)
    assert isinstance(base, Answered) and adapted.exact != base.exact
    kv_pair.b.wait_until_saved(saved + 5)
    kv_pair.a.forget()
    loaded = kv_pair.a.complete(prompt, model=ADAPTER)
    assert (loaded.kv["outcome"], loaded.kv["loaded_tokens"]) == ("hit", 5 * CHUNK_TOKENS)
    assert loaded.exact == adapted.exact


@pytest.mark.covers("S34", "CC-11")
def test_a_tenants_salt_finds_only_what_it_saved_itself(kv_pair: KvPair) -> None:
    prompt = prompt_of(TOKENS, seed=302)
    kv_pair.compute_on_a(prompt, cache_salt="tenant-a")
    kv_pair.a.forget()
    for salt, loaded in (("tenant-b", 0), ("tenant-a", 5 * CHUNK_TOKENS)):
        kv_pair.b.forget()
        answered = kv_pair.b.complete(prompt, cache_salt=salt)
        assert answered.kv.get("loaded_tokens", 0) == loaded


@pytest.mark.covers("S39")
def test_a_tier_that_dies_costs_its_contents_and_comes_back(kv_pair: KvPair) -> None:
    prompt = prompt_of(TOKENS, seed=303)
    _, cold = kv_pair.compute_on_a(prompt)
    assert isinstance(cold, Answered)
    kv_pair.shared.leave("valkey")
    kv_pair.shared.valkey.kill()
    try:
        kv_pair.b.forget()
        answered = kv_pair.b.complete(prompt)
        assert answered.exact == cold.exact
        assert answered.kv["cached_tokens"] == 0
    finally:
        kv_pair.shared.valkey.start()
    other = prompt_of(TOKENS, seed=304)
    wait_for(lambda: _comes_through_valkey(kv_pair, other), within_s=30)


def _comes_through_valkey(kv_pair: KvPair, prompt: list[int]) -> bool:
    prompt[0] = (prompt[0] + 1) % 256
    kv_pair.compute_on_a(prompt)
    kv_pair.shared.leave("valkey")
    return kv_pair.b.complete(prompt).kv["outcome"] == "hit"


def hash_of(what: Callable[[list[Path]], None], all_of_them: bool) -> int:
    return 310 + 2 * [damage, truncate, delete, cross].index(what) + all_of_them
