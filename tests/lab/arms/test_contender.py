from __future__ import annotations

from pathlib import Path

import pytest

from kvrelay.lab.arms.contender import Contender, Weights, differences, factor_of, plan_problems, read_flat
from kvrelay.lab.arms.contender_file import ContenderFileError, read_contenders

WORKER = '[[workers]]\nname = "a"\nurl = "http://127.0.0.1:{port}"\nrole = "{role}"\n'


def flat(
    folder: Path, *, policy: str = "sticky", port: int = 1, role: str = "both", more: str = ""
) -> dict[str, object]:
    path = folder / "gateway.toml"
    path.write_text(f'[gateway]\nport = {port}\npolicy = "{policy}"\n{more}' + WORKER.format(port=port, role=role))
    return read_flat(path)


@pytest.mark.covers("BM-25", "BM-02")
def test_ports_are_an_arms_own_and_everything_else_is_a_difference(tmp_path: Path) -> None:
    base = flat(tmp_path)

    assert differences(base, flat(tmp_path, port=2)) == ()
    (policy,) = differences(base, flat(tmp_path, policy="cache_load", port=2))
    assert (policy.key, policy.factor, policy.left, policy.right) == (
        "gateway.policy",
        "router",
        "sticky",
        "cache_load",
    )
    (retry,) = differences(base, flat(tmp_path, more="[retry]\nattempts = 5\n"))
    assert (retry.key, retry.factor, retry.left) == ("retry.attempts", "retry", None)
    (role,) = differences(base, flat(tmp_path, role="decode"))
    assert (role.key, role.factor) == ("workers[a].role", "disaggregation")


def test_a_key_of_no_known_factor_is_its_own() -> None:
    assert factor_of("gateway.drain.grace_s") == "gateway.drain.grace_s"


@pytest.mark.covers("BM-26")
def test_neighbours_differ_in_exactly_one_factor() -> None:
    router = Contender("router", {"gateway.policy": "cache_load"})
    tier = Contender("cpu tier", {"gateway.policy": "cache_load", "store.deadline_ms": 50})
    both = Contender("both", {"gateway.policy": "sticky", "store.deadline_ms": 50, "retry.attempts": 1})

    assert plan_problems([Contender.of_policy("round_robin"), router, tier]) == ()
    assert plan_problems([router, both]) == ("`router` and `both` differ in 3 factors: retry, router, store",)
    assert plan_problems([router, router]) == (
        "two contenders are called `router`",
        "`router` and `router` do not differ at all",
    )


def test_weights_are_one_factor_with_the_policy() -> None:
    one, other = (Contender.of_weights(Weights(alpha, 0.0, 0.0, 0.0)) for alpha in (1.0, 2.0))

    assert one.name == "1,0,0,0"
    assert plan_problems([Contender.of_policy("sticky"), one, other]) == ()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "tables none"),
        ("=", None),
        ('[[contender]]\nname = "a"', "`{'name': 'a'}`"),
        ('[[contender]]\nname = "a"\nset = { "gateway.polcy" = "sticky" }', "`a` sets `gateway.polcy`: unknown key"),
        ('[[contender]]\nname = "a"\nset = { "gateway.policy" = "clever" }', "`a` sets `gateway.policy`: bad value"),
    ],
)
def test_a_contender_that_no_gateway_would_take_is_refused_before_the_run(
    tmp_path: Path, text: str, found: str | None
) -> None:
    path = tmp_path / "arms.toml"
    path.write_text(text)

    with pytest.raises(ContenderFileError) as error:
        read_contenders(path)
    assert found is None or error.value.found == found


def test_contenders_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "arms.toml"
    path.write_text('[[contender]]\nname = "a"\nset = { "gateway.policy" = "sticky", "affinity.ttl_s" = 5.0 }\n')

    assert read_contenders(path) == (Contender("a", {"gateway.policy": "sticky", "affinity.ttl_s": 5.0}),)


def contenders(folder: Path, text: str) -> tuple[Contender, ...]:
    path = folder / "arms.toml"
    path.write_text('[[contender]]\nname = "a"\nset = { "gateway.policy" = "sticky" }\n' + text)
    return read_contenders(path)


@pytest.mark.covers("TR-09")
@pytest.mark.parametrize(
    ("text", "found", "legal"),
    [
        ('engine_args = ["--enable-hierarchical-cache", "--enable-lmcache"]', "`a` has HiCache and LMCache on at once",
         "one of them per arm"),
        ('store = { tiers = [ { url = "memory://x" } ] }\nengine_args = ["--enable-lmcache"]',
         "kvrelay store and LMCache", "one of them per arm"),
        ('store = { tiers = [ { url = "memory://x", sise = 3 } ] }', "sise", "members of the section `[store]`"),
        ("engine_args = 3", "`{'name': 'a'", "`store` and `engine_args`"),
        ("stoer = 3", "stoer", "`store` and `engine_args`"),
    ],
)  # fmt: skip
def test_one_implementation_of_tiers_per_arm(tmp_path: Path, text: str, found: str, legal: str) -> None:
    with pytest.raises(ContenderFileError) as refused:
        contenders(tmp_path, text)
    assert found in refused.value.found and legal in refused.value.legal


def test_an_arm_may_have_tiers(tmp_path: Path) -> None:
    (arm,) = contenders(tmp_path, 'store = { tiers = [ { url = "memory://x", bytes = 9 } ] }')
    assert arm.store == {"tiers": [{"url": "memory://x", "bytes": 9}]}
    assert arm.flat()["store.tiers[0].url"] == "memory://x"
