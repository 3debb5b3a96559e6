"""Puts a dossier together: reports from folders, the fleet as the doctor sees it, the deployment and its tiers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct, structs

from kvrelay.core.checklist.dossier import Dossier, Limits
from kvrelay.core.doctor.finding import examine
from kvrelay.core.doctor.rules import RULES
from kvrelay.core.sizing.breakeven import Prefill
from kvrelay.edge.connectors.lmcache.verdict import Host
from kvrelay.edge.doctor.collect import Wanted, collect
from kvrelay.edge.system.config import Config
from kvrelay.lab.checklist import place
from kvrelay.lab.checklist.reports import find


class Asked(Struct, frozen=True, kw_only=True):
    """What is to be looked at. `lmcache`: the fields of an LMCache configuration."""

    places: tuple[Path, ...]
    config: Config
    config_source: str
    router_url: str | None = None
    admin_token_file: Path | None = None
    lmcache: Mapping[str, Any] | None = None
    lmcache_source: str = ""
    host: Host | None = None
    rates: tuple[Prefill, ...] = ()
    limits: Limits = Limits()
    touches: bool = True  # sends requests to workers, and objects to tiers
    watch_s: float = 0.0


def gather(asked: Asked) -> tuple[Dossier, tuple[str, ...]]:
    """The dossier, and what looked like evidence and could not be read."""
    found = find(asked.places)
    known = place.deployment(asked.config, source=asked.config_source, host=asked.host)
    tiers = asked.config.store.tiers
    probes = place.probe_tiers(tiers) if asked.touches else ()
    if asked.lmcache is not None and asked.host is not None:
        known = place.with_lmcache(known, asked.lmcache, source=asked.lmcache_source, host=asked.host)
        remote = asked.lmcache.get("remote_url")
        if remote and asked.touches:
            probes = (*probes, place.probe_lmcache(str(remote)))
    dossier = Dossier(
        runs=found.runs,
        blocks=found.blocks,
        drills=found.drills,
        deployment=known,
        probes=probes,
        rates=asked.rates,
        formats=place.look_at_formats(tiers) if asked.touches else (),
        contract_blind=place.contract_blind(),
        limits=asked.limits,
    )
    if not asked.config.workers and asked.router_url is None:
        return dossier, found.unread
    facts = asyncio.run(
        collect(
            Wanted(
                config=asked.config,
                router_url=asked.router_url,
                admin_token_file=asked.admin_token_file,
                sends_probes=asked.touches,
                watch_s=asked.watch_s,
            )
        )
    )
    policy = facts.router.policy if facts.router is not None and facts.router.policy is not None else known.policy
    dossier = structs.replace(
        dossier,
        facts=facts,
        findings=examine(facts, RULES),
        deployment=structs.replace(known, policy=policy),
    )
    return dossier, found.unread
