"""The effective configuration: flag > environment > file > default, every value with the place it came from.

All problems are found in one pass and raised together, so that one start shows everything that is to be mended.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from msgspec import Struct
from pydantic import BaseModel, Field, PrivateAttr, ValidationError, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError

from kvrelay.core.index.drift import DriftBounds
from kvrelay.core.model.place import HopCosts
from kvrelay.core.routing.capacity import Capacity
from kvrelay.core.routing.settings import RouterSettings, Spill, Weights
from kvrelay.edge.system.explained_key import legal_values
from kvrelay.edge.system.places import place_of_gateway
from kvrelay.edge.system.sections import (
    AffinitySection,
    GatewaySection,
    HealthSection,
    IndexSection,
    ObserveSection,
    PolicySection,
    ReceiptsSection,
    RetrySection,
    Section,
    StoreSection,
    TenantSection,
    TokensSection,
    TracingSection,
    WorkerConfig,
)
from kvrelay.edge.system.urls import mask_credentials

__all__ = [
    "Config",
    "ConfigError",
    "Problem",
    "WorkerConfig",
    "keys",
    "load_config",
    "router_settings",
    "run_digest",
]

ENV_PREFIX = "KVRELAY_"
DEFAULT_FILE = "kvrelay.toml"
DEFAULT_SOURCE = "default"
PLAIN_WORDS = {"a valid integer": "a whole number", "a valid number": "a number", "a valid boolean": "true or false"}
FLAG_NAMES = {"workers": "--worker"}  # every other flag is spelt like the last word of its key


class Config(Section):
    """The whole configuration, valid and frozen."""

    gateway: GatewaySection = GatewaySection()
    workers: tuple[WorkerConfig, ...] = ()
    health: HealthSection = HealthSection()
    affinity: AffinitySection = AffinitySection()
    retry: RetrySection = RetrySection()
    tokens: TokensSection = TokensSection()
    index: IndexSection = IndexSection()
    policy: PolicySection = PolicySection()
    receipts: ReceiptsSection = ReceiptsSection()
    observe: ObserveSection = ObserveSection()
    tracing: TracingSection = TracingSection()
    tenants: dict[str, TenantSection] = Field(default_factory=dict)
    store: StoreSection = StoreSection()

    _sources: dict[str, str] = PrivateAttr(default_factory=dict)

    @field_validator("workers")
    @classmethod
    def _workers_differ(cls, workers: tuple[WorkerConfig, ...]) -> tuple[WorkerConfig, ...]:
        for attribute in ("url", "name"):
            values = [getattr(worker, attribute) for worker in workers]
            twice = sorted({value for value in values if values.count(value) > 1})
            if twice:
                raise PydanticCustomError("duplicate", "{what} `{value}`", {"what": attribute, "value": twice[0]})
        return workers

    def source_of(self, dotted: str) -> str:
        """Where the value of a key came from."""
        return self._sources.get(dotted, DEFAULT_SOURCE)


class Problem(Struct, frozen=True):
    """One thing that is wrong with the configuration."""

    kind: str  # unknown_key | bad_value | missing | unsupported | duplicate | unreadable
    key: str
    source: str
    received: str = ""
    legal: str = ""
    known: tuple[str, ...] = ()
    nearest: str | None = None


class ConfigError(Exception):
    """The configuration is not usable; `problems` has all that is wrong with it."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__("; ".join(f"{p.kind}: {p.key} (from {p.source})" for p in problems))
        self.problems = problems


def load_config(
    path: Path | str | None = None,
    env: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
) -> Config:
    """The effective configuration.

    `path=None` reads `kvrelay.toml` from the working directory when it is there. `flags` maps dotted keys to values;
    a flag that was not given is None. Raises `ConfigError` with everything that is wrong.
    """
    layers = _Layers()
    layers.add_file(path)
    layers.add_environment(env or {})
    layers.add_flags(flags or {})
    try:
        config = Config.model_validate(layers.values)
    except ValidationError as error:
        layers.problems.extend(_problem(details, layers) for details in error.errors(include_url=False))
    if layers.problems:
        raise ConfigError(tuple(layers.problems))
    config._sources.update(layers.sources)
    return config


def router_settings(config: Config, *, key_seed: bytes, manifest_digest: str | None) -> RouterSettings:
    """What the configuration says about routing, in the router's own words."""
    factors = config.policy.cache_load
    return RouterSettings(
        policy=config.gateway.policy,
        scorer=config.gateway.scorer,
        weights=Weights(alpha=factors.alpha, beta=factors.beta, gamma=factors.gamma, delta=factors.delta),
        affinity_ttl_s=config.affinity.ttl_s or None,
        affinity_hard=config.affinity.hard,
        spill=Spill(config.policy.sticky_load.spill_ratio, config.policy.sticky_load.spill_requests),
        retry_attempts=config.retry.attempts,
        retry_budget_ratio=config.retry.budget_ratio,
        migrate=config.retry.migrate,
        place=place_of_gateway(config.gateway),
        hops=HopCosts(config.policy.hops.rack_ms, config.policy.hops.zone_ms, config.policy.hops.beyond_ms),
        capacity=Capacity(config.gateway.limits.prefill_weight, config.gateway.limits.decode_weight),
        queue_depth=config.gateway.limits.queue_depth,
        queue_wait_s=config.gateway.limits.queue_wait_s,
        approximate_ttl_s=config.index.guess_ttl_s,
        drift=DriftBounds(
            window_requests=config.index.drift_requests,
            min_ratio=config.index.drift_ratio,
            backoff_s=config.index.resync_backoff_s,
        ),
        health_failures=config.health.failures,
        health_successes=config.health.successes,
        key_seed=key_seed,
        manifest_digest=manifest_digest,
    )


def run_digest(config: Config, *, version: str, seed: int) -> str:
    """Names a run in its receipts: equal digests mean the same version, seed and effective configuration."""
    stated = {"version": version, "seed": seed, "config": config.model_dump(mode="json")}
    text = json.dumps(stated, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def keys(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every key by its dotted name; lists show as `workers[]`, named tables as `tenants.NAME`."""
    for name, info in model.model_fields.items():
        dotted = prefix + name
        nested, suffix = _nested_model(info)
        if nested is None:
            yield dotted, info
        else:
            yield from keys(nested, f"{dotted}{suffix}.")


class _Layers:
    """The values of all sources, later ones over earlier ones, and who said what."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.sources: dict[str, str] = {}  # of values
        self.table_sources: dict[str, str] = {}  # of the tables they stand in; needed when a table itself is wrong
        self.problems: list[Problem] = []

    def add_file(self, path: Path | str | None) -> None:
        if path is None and not Path(DEFAULT_FILE).is_file():
            return
        file = Path(path or DEFAULT_FILE)
        try:
            table = tomllib.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            self._unreadable(path, error.strerror or str(error))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            self._unreadable(path, f"not TOML: {error}")
        else:
            self._merge(table, str(file))

    def _unreadable(self, path: Path | str | None, reason: str) -> None:
        source = "the working directory" if path is None else "`--config`"
        self.problems.append(Problem("unreadable", str(path or DEFAULT_FILE), source, legal=reason))

    def add_environment(self, env: Mapping[str, str]) -> None:
        for variable in sorted(name for name in env if name.startswith(ENV_PREFIX)):
            dotted = ".".join(variable.removeprefix(ENV_PREFIX).lower().split("__"))
            self._set(dotted, _from_text(dotted, env[variable]), f"environment {variable}")

    def add_flags(self, flags: Mapping[str, object]) -> None:
        for dotted, value in flags.items():
            if value is not None:
                self._set(dotted, value, f"`{flag_name(dotted)}`")

    def _set(self, dotted: str, value: object, source: str) -> None:
        for part in reversed(dotted.split(".")):
            value = {part: value}
        assert isinstance(value, dict)
        self._merge(value, source)

    def _merge(self, table: Mapping[str, Any], source: str, into: dict[str, Any] | None = None, at: str = "") -> None:
        target = self.values if into is None else into
        for name, value in table.items():
            dotted = at + name
            if isinstance(value, Mapping):
                if not isinstance(target.get(name), dict):
                    target[name] = {}
                self.table_sources[dotted] = source
                self._merge(value, source, target[name], f"{dotted}.")
            else:
                target[name] = value
                self._attribute(dotted, value, source)

    def _attribute(self, dotted: str, value: object, source: str) -> None:
        """A list replaces the whole list of an earlier layer, so what was said of its entries goes."""
        self.sources = {key: said for key, said in self.sources.items() if not key.startswith(f"{dotted}[")}
        self.sources[dotted] = source
        for number, entry in enumerate(value if isinstance(value, list) else ()):
            for name in entry if isinstance(entry, Mapping) else ():
                self.sources[f"{dotted}[{number}].{name}"] = source


def flag_name(dotted: str) -> str:
    """How the flag for a key is spelt."""
    return FLAG_NAMES.get(dotted, "--" + dotted.rsplit(".", 1)[-1].replace("_", "-"))


def _from_text(dotted: str, text: str) -> object:
    """Environment text for a list is JSON, for `workers` also a comma-separated list of URLs; scalars stay text."""
    if text[:1] in "[{" and text:
        try:
            return json.loads(text)
        except json.JSONDecodeError:
            return text
    if dotted == "workers":
        return [{"url": url.strip()} for url in text.split(",") if url.strip()]
    return text


def _problem(details: ErrorDetails, layers: _Layers) -> Problem:
    dotted = _dotted(details["loc"])
    source = _source_of({**layers.table_sources, **layers.sources}, dotted)
    received = _shown(details["input"])
    match details["type"]:
        case "extra_forbidden":
            return _unknown_key(details["loc"], dotted, source)
        case "missing":
            return Problem("missing", dotted, source, legal=f"every entry has its `{details['loc'][-1]}`")
        case "unsupported":
            supported = ", ".join(f"`{_shown(value)}`" for value in details["ctx"]["supported"])
            return Problem("unsupported", dotted, source, received, legal=supported)
        case "literal_error" | "greater_than" | "greater_than_equal" | "less_than" | "less_than_equal":
            info = _field_at(details["loc"])
            assert info is not None, dotted
            near = difflib.get_close_matches(received, [str(name) for name in get_args(info.annotation)], n=1)
            return Problem("bad_value", dotted, source, received, legal_values(info), nearest=near[0] if near else None)
        case "tls_pair":
            given, absent = sorted(("tls_cert", "tls_key"), key=lambda name: not details["input"].get(name))
            source = _source_of(layers.sources, f"{dotted}.{given}")
            return Problem("missing", f"{dotted}.{absent}", source, legal=details["msg"])
        case "duplicate":
            return Problem(
                "duplicate", dotted, source, details["msg"], legal="each worker has a name and a url of its own"
            )
        case _:
            legal = details["msg"].removeprefix("Input should be ").partition(", unable to")[0]
            return Problem("bad_value", dotted, source, received, PLAIN_WORDS.get(legal, legal))


def _unknown_key(loc: tuple[int | str, ...], dotted: str, source: str) -> Problem:
    siblings = tuple(_model_at(loc[:-1]).model_fields)
    name = str(loc[-1])
    parent = dotted.rpartition(".")[0]
    close = difflib.get_close_matches(name, siblings, n=1, cutoff=0.5)
    nearest: str | None
    if close:
        nearest = f"{parent}.{close[0]}" if parent else close[0]
    else:  # right word, wrong table
        nearest = next((known for known, _ in keys() if known.rsplit(".", 1)[-1] == name), None)
    if nearest and source.startswith("environment ") and "[" not in nearest:
        nearest = ENV_PREFIX + nearest.upper().replace(".", "__")
    return Problem("unknown_key", dotted, source, known=siblings, nearest=nearest)


def _field_at(loc: tuple[int | str, ...]) -> FieldInfo | None:
    names = [part for part in loc if isinstance(part, str)]
    return _model_at(loc[:-1]).model_fields.get(names[-1]) if names else None


def _model_at(loc: tuple[int | str, ...]) -> type[BaseModel]:
    """The table that a validation location points to; list indices and tenant names lead nowhere deeper."""
    model: type[BaseModel] = Config
    for part in loc:
        info = model.model_fields.get(part) if isinstance(part, str) else None
        nested = _nested_model(info)[0] if info else None
        model = nested or model
    return model


def _nested_model(info: FieldInfo) -> tuple[type[BaseModel] | None, str]:
    annotation = info.annotation
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, ""
    models = [arg for arg in get_args(annotation) if isinstance(arg, type) and issubclass(arg, BaseModel)]
    if not models:
        return None, ""
    return models[0], ".NAME" if get_args(annotation)[0] is str else "[]"


def _dotted(loc: tuple[int | str, ...]) -> str:
    text = ""
    for part in loc:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _source_of(sources: Mapping[str, str], dotted: str) -> str:
    while dotted:
        if dotted in sources:
            return sources[dotted]
        dotted = dotted[: max(dotted.rfind("."), dotted.rfind("["), 0)]
    return DEFAULT_SOURCE


def _shown(value: object) -> str:
    return mask_credentials(value if isinstance(value, str) else json.dumps(value, default=str))
