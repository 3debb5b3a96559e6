"""Which keys of a new configuration take effect while the gateway runs, and which wait for the next start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvrelay.edge.system.config import Config, keys
from kvrelay.edge.system.config_change import LIVE, first_state, is_live, takes_effect


def config(**sections: Any) -> Config:
    return Config.model_validate(sections)


def test_live_keys_are_taken_and_the_others_are_named_and_keep_their_value() -> None:
    running = config(gateway={"port": 1, "policy": "sticky"}, tokens={"cache_mb": 1})
    wanted = config(gateway={"port": 2, "policy": "random"}, tokens={"cache_mb": 2}, health={"failures": 9})
    taken, needs_restart = takes_effect(running, wanted)
    assert needs_restart == ("gateway.port", "tokens.cache_mb")
    assert taken == config(gateway={"port": 1, "policy": "random"}, tokens={"cache_mb": 1}, health={"failures": 9})


def test_a_certificate_may_be_replaced_but_tls_is_not_switched_on_or_off() -> None:
    plain = config()
    old, new = (config(gateway={"tls_cert": Path(name), "tls_key": Path("key")}) for name in ("old", "new"))
    assert takes_effect(old, new) == (new, ())
    assert takes_effect(plain, new) == (plain, ("gateway.tls_cert", "gateway.tls_key"))
    assert takes_effect(old, plain) == (old, ("gateway.tls_cert", "gateway.tls_key"))


def test_every_live_name_is_a_key_or_a_section_of_them() -> None:
    known = [key for key, _ in keys()]
    unused = [live for live in LIVE if not any(is_live(key) and key.startswith(live) for key in known)]
    assert unused == []
    assert not is_live("gateway.port") and not is_live("policyx.y") and is_live("workers[].url")


def test_the_state_says_which_generation_is_in_force_and_why_the_last_one_is_not() -> None:
    state = first_state()
    assert (state.generation, state.last_error) == (1, None) and state.loaded_at
    state.refused("unknown_key: gateway.prot (from f.toml)")
    assert (state.generation, state.last_error) == (1, "unknown_key: gateway.prot (from f.toml)")
    state.taken(("gateway.port",))
    assert (state.generation, state.last_error, state.last_error_at) == (2, None, None)
    assert state.needs_restart == ("gateway.port",)
