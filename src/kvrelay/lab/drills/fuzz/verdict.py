"""What must be true of a fuzzed fleet that was healed and has come to rest."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from kvrelay.core.model.events import RequestArrived
from kvrelay.core.model.prompt import Prompt
from kvrelay.core.model.units import IndexState, Status
from kvrelay.lab.drills.fuzz.invariant import hold
from kvrelay.lab.drills.fuzz.prompts import adapter_of, salted_now, tokens_of, weights_of
from kvrelay.lab.drills.fuzz.schedule import BLOCK_TOKENS, Ask, FleetPlan
from kvrelay.lab.drills.reference import text_of
from kvrelay.lab.sim.attempt import SimRequest
from kvrelay.lab.sim.world import World


def texts_are_right(world: World, requests: Mapping[str, SimRequest], fleet: FleetPlan) -> None:
    """An answer is the beginning of what an engine gives that knows nothing else."""
    receipts = {receipt.request_id: receipt for receipt in world.receipts}
    for request_id, answer in world.answers.items():
        receipt = receipts.get(request_id)
        if not answer.token_ids or receipt is None or receipt.epoch is None:
            continue  # without a receipt: cut with its gateway, nobody wrote down which epoch it was of
        request = requests[request_id]
        salt = _salt_of(request.tenant.salt, receipt.epoch)
        weights = weights_of(fleet, receipt.chosen_worker or "")
        right = text_of(request.token_ids, len(answer.token_ids), weights, request.adapter, salt, BLOCK_TOKENS)
        hold(bytes(answer.token_ids) == right, f"{request_id} was answered with KV that is not its own")


def _salt_of(salt: str | None, epoch: str) -> str | None:
    return salt if epoch == "0" else f"{salt or ''}~epoch-{epoch}"


def books_are_closed(world: World) -> None:
    status = world.router.status(world.now_s)
    booked = {worker.name: worker.targets[0].active_requests for worker in status.workers}
    hold(
        not (status.live_requests or any(booked.values()) or status.in_flight_prompts or status.queue_depth),
        f"at rest: {status.live_requests} live, booked {booked}, {status.in_flight_prompts} in flight, "
        f"{status.queue_depth} waiting",
    )


def everybody_serves(world: World, removed: Collection[str]) -> None:
    after = [receipt for receipt in world.receipts if receipt.request_id.startswith("after-")]
    failed = [receipt.request_id for receipt in after if receipt.status is not Status.OK]
    hold(not failed, f"healed, and still {len(failed)} of {len(after)} requests fail: {failed[:3]}")
    served = {receipt.chosen_worker for receipt in after}
    idle = [name for name in world.workers if name not in removed and name not in served]
    hold(not idle, f"healed, and still {idle} get none of {len(after)} requests")


def claims_are_true(world: World, asks: Iterable[Ask]) -> None:
    """Of every prompt ever sent: what is claimed equals what is held, or the index says that it is not whole."""
    router = world.router
    states = {seen.name: seen.targets[0].index_state for seen in router.status(world.now_s).workers}
    probes = {(ask.root, ask.turns, ask.tokens, ask.tenant, ask.adapter): ask for ask in asks}
    for ask in probes.values():
        tokens, adapter = tokens_of(ask.root, ask.turns, ask.tokens), adapter_of(ask)
        tenant = salted_now(ask, router.epochs)
        keys = {BLOCK_TOKENS: router.keyer.prompt_keys(tokens, BLOCK_TOKENS, adapter=adapter, salt=tenant.salt)}
        arrived = RequestArrived("probe", Prompt(len(tokens), keys), adapter=adapter, tenant=tenant)
        for candidate in router.match(world.now_s, arrived).candidates:
            claimed = candidate.tiers.get("gpu", 0) // BLOCK_TOKENS
            real = world.cached_blocks(candidate.worker, tokens, adapter=adapter, salt=tenant.salt)
            real = min(real, (len(tokens) - 1) // BLOCK_TOKENS)  # of a whole prompt one token is computed again
            whole = states[candidate.worker] is IndexState.LIVE
            where = f"{candidate.worker} ({states[candidate.worker]})"
            hold(
                claimed <= real and (claimed == real or not whole),
                f"{where}: {claimed} blocks claimed, {real} held of {ask.id}",
            )
