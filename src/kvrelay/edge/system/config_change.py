"""What of a new configuration can take effect while the gateway runs.

Whatever is not named in `LIVE` keeps its old value until the next start, so a key that somebody adds is not promised by
mistake.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from msgspec import Struct
from pydantic import BaseModel

from kvrelay.edge.system.config import Config, keys

LIVE = (
    "gateway.policy",
    "gateway.scorer",
    "gateway.insecure",
    "gateway.admin_token_file",
    "gateway.tls_cert",
    "gateway.tls_key",
    "gateway.timeouts",
    "gateway.limits",
    "gateway.drain",
    "workers",
    "health",
    "affinity",
    "retry",
    "policy",
    "tenants",
)
_TLS = ("gateway.tls_cert", "gateway.tls_key")


class ConfigState(Struct):
    """Which configuration is in force, as /admin/status shows it. Times are UTC, ISO 8601."""

    generation: int = 1  # counts the configurations that were taken
    loaded_at: str = ""
    last_error: str | None = None  # why the last one was refused; None when it was taken
    last_error_at: str | None = None
    needs_restart: tuple[str, ...] = ()  # keys that changed in the file and wait for the next start

    def taken(self, needs_restart: tuple[str, ...]) -> None:
        self.generation += 1
        self.loaded_at = _now()
        self.last_error = self.last_error_at = None
        self.needs_restart = needs_restart

    def refused(self, problem: str) -> None:
        self.last_error, self.last_error_at = problem, _now()


def first_state() -> ConfigState:
    return ConfigState(loaded_at=_now())


def is_live(key: str) -> bool:
    """Whether a change of this key (dotted) takes effect without a new start."""
    return any(key == live or key.startswith((f"{live}.", f"{live}[")) for live in LIVE)


def takes_effect(running: Config, wanted: Config) -> tuple[Config, tuple[str, ...]]:
    """`wanted` with the running values of all keys that cannot change now, and the names of those that differ."""
    fixed = [name for name in dict.fromkeys(_attribute(key) for key, _ in keys()) if not is_live(name)]
    if (running.gateway.tls_cert is None) != (wanted.gateway.tls_cert is None):
        fixed += _TLS  # a listener speaks TLS or does not; a certificate that replaces another is read at once
    differing = tuple(name for name in fixed if _get(running, name) != _get(wanted, name))
    for name in differing:
        wanted = _with(wanted, name.split("."), _get(running, name))
    return wanted, differing


def _attribute(key: str) -> str:
    """`store.tiers[].url` is a part of the attribute `store.tiers`."""
    return key.partition("[")[0].removesuffix(".NAME").split(".NAME.")[0]


def _get(config: BaseModel, name: str) -> Any:
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _with(model: BaseModel, parts: list[str], value: Any) -> Any:
    first, *rest = parts
    return model.model_copy(update={first: _with(getattr(model, first), rest, value) if rest else value})


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
