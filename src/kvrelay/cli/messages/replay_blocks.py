"""Wording of a replay in blocks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from kvrelay.cli.messages.replay import MOCK

if TYPE_CHECKING:
    from kvrelay.lab.arms.blocks import Block

BEFORE = {"nothing": "caches kept", "reset": "caches emptied", "restart": "workers started again"}


def not_with_blocks(flag: str, given: object, trace: str) -> str:
    return (
        f"error: `{flag}` is `{given}`, and `{trace}` is a replay in blocks\n"
        "  blocks run on mock workers, which can be emptied and started again, and are compared with each other\n"
        "hint: any other trace can be replayed on a fleet and judged by gates"
    )


def running(policy: str, blocks: Sequence[str]) -> str:
    return f"{policy}: {', '.join(blocks)} ..."


def blocks(trace: str, found: Mapping[str, Sequence[Block]], folder: object) -> str:
    """A table per policy: blocks in the order in which they ran."""
    head = f"{'before it':24}{'requests':>9}{'failed':>8}{'hits':>9}{'p50 ttft ms':>13}{'p95':>9}"
    lines = [MOCK, f"{trace}: the same prompts in every block; hits are tokens that the engines did not compute"]
    for policy, own in found.items():
        lines += ["", f"{policy:16}{head}", *(_block(block) for block in own)]
    return "\n".join([*lines, "", f"{folder} has blocks.json and samples.jsonl"]) + "\n"


def _block(block: Block) -> str:
    share = "unknown" if block.hit_share is None else f"{block.hit_share:.1%}"
    times = f"{_ms(block.ttft_ms.p50):>13}{_ms(block.ttft_ms.p95):>9}"
    return f"{block.name:16}{BEFORE[block.before]:24}{block.requests:>9}{block.failures:>8}{share:>9}{times}"


def complaints(found: Mapping[str, Sequence[Block]], with_tiers: Collection[str] = ()) -> list[str]:
    """What must not happen in blocks. Tiers outlive a restart: hits after it are what they are for."""
    said = []
    for policy, own in found.items():
        for block in own:
            if block.failures:
                said.append(f"{policy}, {block.name}: {block.failures} requests failed")
            survives = block.before == "restart" and policy in with_tiers
            if block.before != "nothing" and block.cached_tokens and not survives:
                why = "although " + BEFORE[block.before]
                said.append(f"{policy}, {block.name}: {block.cached_tokens} tokens were hit {why} before it")
    return said


def _ms(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1f}"
