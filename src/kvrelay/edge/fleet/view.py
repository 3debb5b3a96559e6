"""What the fleet tells others about one of its workers."""

from __future__ import annotations

import ssl
from collections.abc import Mapping

from msgspec import Struct

from kvrelay.core.model.events import WorkerSpec
from kvrelay.core.model.ids import WorkerId
from kvrelay.edge.connectors.base import Connector, EventSource, Scrape
from kvrelay.edge.fleet.agent_link import AgentView


class WorkerView(Struct, frozen=True):
    """What is known of a worker at this moment. `worker` is None until it has answered for the first time."""

    name: str
    url: str
    headers: Mapping[str, str]  # to be sent with every request to it; holds its key, so never log it
    worker: WorkerId | None
    connector: Connector | None
    spec: WorkerSpec | None
    version: str | None
    engine: str
    last_probe_ok: bool | None
    last_probe_detail: str
    sources: tuple[EventSource, ...]
    last_seq: Mapping[int, int]  # per rank
    held_messages: int
    malformed_messages: int
    last_scrape: Scrape | None
    events_problem: str | None  # why its events seem not to reach us
    tells_lives: bool  # False: a new process of it looks like the old one
    agent: AgentView | None  # None: no agent is configured


class Access(Struct, frozen=True, eq=False):
    """What it takes to be let in by a worker, and to know that it is the worker."""

    headers: Mapping[str, str]  # holds the worker's key: never log it
    tls: ssl.SSLContext | None = None  # None: plain HTTP


class Upstream(Struct, frozen=True):
    """What is needed to send a request to a worker."""

    url: str
    headers: Mapping[str, str]  # holds the worker's key: never log it
    connector: Connector
    tls: ssl.SSLContext | None = None  # None: plain HTTP
    kv_report: str | None = None  # where its KV connector tells what a request really loaded
