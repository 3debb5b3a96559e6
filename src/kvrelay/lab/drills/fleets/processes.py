"""Mock worker processes for a drill, each behind a proxy for its HTTP and one for its events: both can be broken."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterable
from pathlib import Path

from kvrelay.edge.chaos.events import EventProxy
from kvrelay.edge.chaos.tcp import TcpProxy
from kvrelay.edge.worker.launch import RunningWorker, start_workers, stop_workers
from kvrelay.edge.worker.spec import MockSpec
from kvrelay.lab.drills.drill import Setup, WorkerPlan
from kvrelay.lab.drills.fleets.shared_store import CHUNK_BLOCKS, SharedStore
from kvrelay.lab.drills.reference import MODEL, tenant_key, tenant_salt

SHUFFLED_BATCHES = 400


class Process:
    """A worker's process, or the last one that there was, with its proxies, which outlive it."""

    def __init__(self, running: RunningWorker, network: TcpProxy, events: EventProxy, plan: WorkerPlan) -> None:
        self.running = running
        self.network = network
        self.events = events
        self.plan = plan
        self.frozen = False
        self.adapter = "mock"
        self.kv_report = ""  # where its KV connector answers, if not at its own port

    @property
    def url(self) -> str:
        """For the gateway."""
        return f"http://{self.network.address}"


class Processes:
    """All workers of one drill. `stop` ends them, whatever was done to them."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self.store: SharedStore | None = None
        self.by_name: dict[str, Process] = {}
        self._ended: list[RunningWorker] = []

    async def add(self, plans: Iterable[WorkerPlan]) -> None:
        plans = tuple(plans)
        started = await asyncio.to_thread(start_workers, [self._spec(plan) for plan in plans])
        for plan, running in zip(plans, started, strict=True):
            host, _, port = running.url.removeprefix("http://").rpartition(":")
            network = TcpProxy(host, int(port))
            await network.__aenter__()
            assert running.events is not None
            events = EventProxy(running.events, replay=running.replay)
            await asyncio.to_thread(events.start)
            await asyncio.to_thread(events.wait_until_connected, 10.0)
            self.by_name[plan.name] = Process(running, network, events, plan)

    async def stop(self) -> None:
        for process in self.by_name.values():
            if process.frozen:
                process.running.signal(signal.SIGCONT)
            process.running.signal(signal.SIGKILL)
        ended = [*self._ended, *(process.running for process in self.by_name.values())]
        await asyncio.to_thread(stop_workers, ended)
        for process in self.by_name.values():
            await process.network.__aexit__(None, None, None)
            await asyncio.to_thread(process.events.stop)

    async def restart(self, name: str) -> None:
        """A new life at the same addresses."""
        process = self.by_name[name]
        old = process.running
        old.signal(signal.SIGKILL)
        await asyncio.to_thread(old.process.wait)
        self._ended.append(old)
        (process.running,) = await asyncio.to_thread(start_workers, [old.spec])
        process.frozen = False

    def _spec(self, plan: WorkerPlan) -> MockSpec:
        return MockSpec(
            name=plan.name,
            model=MODEL,
            revision=plan.revision,
            adapters=plan.adapters,
            blocks=plan.blocks,
            max_model_len=min(8192, plan.blocks * 16),
            max_num_seqs=plan.max_num_seqs,
            prefill_tokens_per_s=self._setup.prefill_tokens_per_s,
            decode_ms=self._setup.decode_ms,
            drain_s=10.0,
            store=None if self.store is None else self.store.options(),
            store_chunk_blocks=CHUNK_BLOCKS,
        )


def shuffle_script(first_seq: int) -> str:
    """Every other batch waits for the one after it."""
    return "; ".join(f"reorder {seq} {seq + 1}" for seq in range(first_seq, first_seq + SHUFFLED_BATCHES, 2))


def gateway_config(setup: Setup, processes: Processes, folder: Path, *, interval_s: float) -> str:
    """A `kvrelay.toml` for the drill's workers."""
    receipts = "/dev/full" if setup.receipts_on_full_disk else str((folder / "receipts.jsonl").resolve())
    ttl = [] if setup.affinity_ttl_s is None else ["[affinity]", f"ttl_s = {setup.affinity_ttl_s}"]
    lines = [
        "[gateway]",
        "port = 0",
        "admin_port = 0",
        f'policy = "{setup.policy}"',
        f'epochs_file = "{(folder / "epochs.json").resolve()}"',
        "[gateway.timeouts]",
        f"first_byte_s = {setup.first_byte_s}",
        f"idle_s = {setup.idle_s}",
        "[gateway.limits]",
        f"queue_depth = {setup.queue_depth}",
        f"queue_wait_s = {setup.queue_wait_s}",
        "[gateway.drain]",
        "grace_s = 1.0",
        "[health]",
        f"interval_s = {interval_s}",
        "[retry]",
        f"attempts = {setup.retry_attempts}",
        f"budget_ratio = {setup.retry_budget_ratio}",
        "[receipts]",
        f'path = "{receipts}"',
        *ttl,
    ]
    for tenant in setup.tenants:
        keys, salt = _written(folder, f"{tenant}.keys", tenant_key(tenant)), tenant_salt(tenant) or ""
        salt_file = _written(folder, f"{tenant}.salt", salt)
        lines += [f"[tenants.{tenant}]", f'api_keys_file = "{keys}"', f'salt_file = "{salt_file}"']
    for name, process in processes.by_name.items():
        lines += ["[[workers]]", f'name = "{name}"', f'url = "{process.url}"', f'adapter = "{process.adapter}"']
        lines += [f'events = "{process.events.events}"', f'replay = "{process.events.replay}"']
        lines += [f'kv_report = "{process.kv_report}"'] if process.kv_report else []
        lines += [f"max_active_requests = {process.plan.max_active_requests}"]
    return "\n".join(lines) + "\n"


def _written(folder: Path, name: str, secret: str) -> Path:
    path = (folder / name).resolve()
    path.touch(mode=0o600)
    path.write_text(secret + "\n", encoding="utf-8")
    return path
