"""What `kvrelay rollback` says."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

_OF = {"off": "left alone", "none": "not there", "on": "STILL USED"}


class Shared(Struct, frozen=True):
    """What the gateway says of one worker."""

    worker: str
    sharing: str
    why: str | None = None


def rolled_back(before: str, now: str, url: str, shared: Sequence[Shared]) -> str:
    lines = [f"{url} routes by {now} from now on (before: {before})"]
    lines += [f"{each.worker}: {_said_of(each)}" for each in shared]
    return "\n".join(lines)


def _said_of(each: Shared) -> str:
    if each.sharing in _OF:
        return f"shared tier {_OF[each.sharing]}"
    return f"shared tier unknown: {each.why}"


def back_again(before: str, url: str, *, shared: bool) -> str:
    lines = [f'hint: back again: curl -X PUT {url}/admin/policy -d \'{{"policy": "{before}"}}\'']
    if shared:
        lines.append(
            f"      and: curl -X PUT {url}/admin/sharing -d '{{\"on\": true}}'; workers that start anew are told, too"
        )
    return "\n".join(lines)


def not_proven(workers: Sequence[str]) -> str:
    return (
        f"warning: whether {', '.join(workers)} still load KV from a shared tier is not known\n"
        "hint: start them without their connector; or, where there is no shared tier, say `--policy-only`"
    )


def tiers_untouched(problem: str) -> str:
    return f"error: the policy was switched, shared tiers were not: {problem}"


def not_rolled_back(problem: str) -> str:
    return f"error: nothing was changed: {problem}"
