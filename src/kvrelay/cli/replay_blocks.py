"""`kvrelay replay preset:cold_warm_restart`: a preset in blocks, on mock workers."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvrelay.cli import messages
from kvrelay.cli.demo import make_folder, run_to_end
from kvrelay.cli.messages import replay_blocks as words


def replay_blocks(
    source: Any,
    contenders: Sequence[Any],
    wishes: Any,
    refused: Mapping[str, Path | None],
    *,
    workers: int,
    seed: int,
    out: Path,
    as_json: bool,
) -> None:
    """Every contender goes through all blocks; a cold block that hit anything, or any failure, ends with status 1.

    `refused`: options that say nothing here, with their values.
    """
    from kvrelay.lab.arms.standing_settings import wished
    from kvrelay.lab.demo.settings import settings_for

    for flag, given in refused.items():
        if given is not None:
            messages.fail(words.not_with_blocks(flag, given, source.name))
    settings = wished(settings_for(source.trace, workers=workers, repeats=1, policies=(), seed=seed), wishes)
    make_folder(out)
    blocks = run_to_end(_measure(source, contenders, settings, out))
    result = {"label": source.trace.label, "workers": "mock", "trace": source.name, "sha256": source.sha256}
    result["policies"] = {
        name: [msgspec.to_builtins(block) | {"hit_share": block.hit_share} for block in own]
        for name, own in blocks.items()
    }
    encoded = msgspec.json.encode(result)
    (out / "blocks.json").write_bytes(msgspec.json.format(encoded, indent=2) + b"\n")
    sys.stdout.write(encoded.decode() + "\n" if as_json else words.blocks(source.name, blocks, out))
    complaints = words.complaints(blocks, [one.name for one in contenders if one.store is not None])
    if complaints:
        messages.fail(messages.demo_complaints(complaints), code=messages.VERDICT_FAIL)


async def _measure(source: Any, contenders: Sequence[Any], settings: Any, out: Path) -> dict[str, Any]:
    from kvrelay.core.traces.cut import cut
    from kvrelay.core.traces.plan import make_plan
    from kvrelay.lab.arms.blocks import run_blocks
    from kvrelay.lab.replay.sample_log import SampleLog

    plan = make_plan(cut(source.trace, settings.cut).trace, settings.scale, seed=settings.seed)
    found = {}
    with SampleLog(out / "samples.jsonl") as log:
        for contender in contenders:
            messages.say(words.running(contender.name, [phase.name for phase in source.preset.phases]))
            found[contender.name] = await run_blocks(
                plan,
                source.preset.phases,
                contender,
                settings,
                folder=out / "blocks" / contender.name,
                on_sample=log.write,
            )
    return found
