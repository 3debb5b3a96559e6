"""One process of a group: a whole gateway with a router of its own, on the port of all. `python -m` runs it."""

from __future__ import annotations

import asyncio
import shutil
import signal
import sys
from pathlib import Path

from kvrelay.edge.gateway.gateway import Gateway, UnsafeListener
from kvrelay.edge.gateway.place import Place
from kvrelay.edge.group.frames import Kind, encode
from kvrelay.edge.group.link import Link, connect
from kvrelay.edge.group.orders import Orders, read_orders
from kvrelay.edge.observe.logs import log_to
from kvrelay.edge.system.config import Config, WorkerConfig
from kvrelay.edge.system.event_loop import calm_the_collector, loop_factory

DID_NOT_START = 1
GROUP_FOLLOWS_S = 0.3


def main() -> None:
    orders = read_orders(sys.stdin.buffer.read())
    log_to(label=f"p{orders.process}")
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        raise SystemExit(runner.run(_run(orders)))


async def _run(orders: Orders) -> int:
    """Until the group asks for the end, or somebody does by SIGTERM: then it drains, and the group starts a new one.

    A SIGINT of a terminal reaches the whole foreground group of processes; the group's own process deals with it.
    """
    link = await connect(Path(orders.hub_socket), orders.process)
    loop = asyncio.get_running_loop()
    told_to_leave = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, told_to_leave.set)
    for number in (signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, lambda: None)
    gateway = _gateway(orders, link)
    try:
        await gateway.start()
    except (UnsafeListener, OSError, ImportError, ValueError) as problem:
        link.failed(problem)
        await link.hang_up()
        return DID_NOT_START
    link.attach(gateway.router, gateway.host.feed)
    calm_the_collector()
    link.say(Kind.READY)
    if await _leaves_alone(link, told_to_leave):
        gateway.leave_port()
    cut = await _drain(gateway, link)
    link.stop_talking()
    await gateway.stop()
    link.say(Kind.ENDED, encode(cut))
    await link.hang_up()
    if link.group_lost:  # it cannot tidy up any more
        shutil.rmtree(Path(orders.hub_socket).parent, ignore_errors=True)
    return 0


async def _leaves_alone(link: Link, told_to_leave: asyncio.Event) -> bool:
    """Waits for the end. True: it is for this process only, so its siblings should take what comes.

    Who ends a service often signals all its processes at once. Then the group's word follows close behind the signal,
    and the port must stay open to say that nobody takes requests any more.
    """
    by_group = asyncio.ensure_future(link.drain_asked.wait())
    by_signal = asyncio.ensure_future(told_to_leave.wait())
    await asyncio.wait((by_group, by_signal), return_when=asyncio.FIRST_COMPLETED)
    await asyncio.wait((by_group,), timeout=GROUP_FOLLOWS_S)
    for waiting in (by_group, by_signal):
        waiting.cancel()
    return not link.drain_asked.is_set()


async def _drain(gateway: Gateway, link: Link) -> int:
    """Answers how many requests were cut."""
    draining = asyncio.ensure_future(gateway.drain())
    impatient = asyncio.ensure_future(link.cut_asked.wait())
    await asyncio.wait((draining, impatient), return_when=asyncio.FIRST_COMPLETED)
    if draining.done():
        impatient.cancel()
        return draining.result()
    draining.cancel()
    return await gateway.cut_short()


def _gateway(orders: Orders, link: Link) -> Gateway:
    config = Config.model_validate(orders.config)
    place = Place(
        process=orders.process,
        port=orders.port,
        admin_socket=Path(orders.admin_socket),
        fingerprint_secret=orders.fingerprint_secret,
        receipts=None if config.receipts.path is None else link,
        share=link.share,
        workers=tuple(WorkerConfig.model_validate(worker) for worker in orders.workers),
        policy=orders.policy,
        scorer=orders.scorer,
        drained=tuple(orders.drained),
        epochs=orders.epochs,
        settle_s=orders.settle_s,
    )
    return Gateway(config, seed=orders.seed, key_seed=orders.key_seed, place=place)


if __name__ == "__main__":
    main()
