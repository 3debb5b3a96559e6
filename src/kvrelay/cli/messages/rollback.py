"""What `kvrelay rollback` says."""

from __future__ import annotations


def rolled_back(before: str, now: str, url: str) -> str:
    return (
        f"{url} routes by {now} from now on (before: {before})\n"
        "workers that load KV from a shared tier still do so for what they compute;\n"
        "to stop that as well, start them without their connector\n"
        f'hint: back again: curl -X PUT {url}/admin/policy -d \'{{"policy": "{before}"}}\''
    )


def not_rolled_back(problem: str) -> str:
    return f"error: nothing was changed: {problem}"
