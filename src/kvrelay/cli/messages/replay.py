"""What `kvrelay replay`, `gates`, `report`, `manifest` and `arms` say."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvrelay.core.gates.gate_file import GateError, GateFile
    from kvrelay.core.gates.judge import GateOutcome, Verdict
    from kvrelay.core.gates.lock import GateLock
    from kvrelay.lab.arms.contender import Difference
    from kvrelay.lab.arms.manifest_check import Gap
    from kvrelay.lab.arms.preflight import Finding

MOCK = "MOCK RUN: modelled times on mock workers, not the performance of any engine"


def heading(label: str, hardware: str) -> str:
    """What the results may be called."""
    if label == "mock":
        return MOCK
    if label == "single_worker_baseline":
        return f"SINGLE WORKER BASELINE on {hardware}: nothing was routed"
    return f"ROUTING RESULT on {hardware} workers" + ("" if hardware == "gpu" else ": says nothing about GPUs")


def replay_story(head: str, table: str, ruling: str, folder: object) -> str:
    return (
        f"{head}\n\n{table}\n\n{ruling}\n\n"
        f"{folder}/report.html has the charts; beside it are report.md, summary.json, manifest.json, raw records\n"
    )


def not_an_open_loop(policy: str, why: str) -> str:
    """A cap let the load wait for the fleet."""
    return f"note: {policy} was not an open loop: {why}; `held_ms` in samples.jsonl says how long each one waited"


def ranking(won: str, why: str) -> str:
    return f"{won}\n{why}\nno gates were given, so this is no verdict: `kvrelay replay --gates FILE`"


def verdict(found: Verdict) -> str:
    """The verdict first, then every gate with its reason."""
    lines = [f"verdict: {found.verdict.value.upper()} ({found.candidate} against {found.baseline})"]
    lines += [f"  {reason}" for reason in found.reasons]
    lines.append(f"  {found.promotion.replace('_', ' ')}: {found.promotion_reason}")
    lines.append("gates:")
    for gate in found.gates:
        lines += _gate(gate, "  ")
    return "\n".join(lines)


def _gate(gate: GateOutcome, indent: str) -> list[str]:
    mark = {"pass": "pass   ", "fail": "FAIL   ", "unknown": "unknown"}[gate.outcome.value]
    if not gate.parts:
        return [f"{indent}{mark} {gate.name}: {gate.reason}"]
    return [f"{indent}{mark} {gate.name}:", *(line for part in gate.parts for line in _gate(part, f"{indent}  "))]


def gate_problem(path: object, problem: GateError) -> str:
    lines = [f"error: {problem.where}: {problem.found} (from `{path}`)", f"  legal: {problem.legal}"]
    return "\n".join([*lines, f"hint: did you mean `{problem.nearest}`?"] if problem.nearest else lines)


def unreadable(what: str, path: object, reason: str) -> str:
    return f"error: cannot use {what} `{path}`: {reason}"


def not_legal(what: str, path: object, found: str, legal: str) -> str:
    return f"error: {what} `{path}`: {found}\n  legal: {legal}"


def gates_checked(path: object, file: GateFile, lock: GateLock | None) -> str:
    count = len(file.gates)
    lines = [
        f"{path}: {count} {'gate' if count == 1 else 'gates'}, {file.candidate} against {file.baseline}, "
        f"baseline run {file.baseline_run}",
        *(f"  {gate.name}" for gate in file.gates),
        "  and, whatever the file says: no more failures and no fewer successful tasks than the baseline",
    ]
    if lock is None:
        lines.append(f"not locked: a run with them is not pre-registered\nhint: kvrelay gates lock {path}")
    elif lock.sha256 != file.digest:
        lines.append(f"changed since it was locked at {lock.locked_at}: a run with them is not pre-registered")
    else:
        lines.append(f"locked at {lock.locked_at}, sha256 {lock.sha256}")
    return "\n".join(lines) + "\n"


def gates_locked(path: object, lock: GateLock) -> str:
    return f"{path}: locked at {lock.locked_at}, sha256 {lock.sha256}\n"


def not_this_baseline(cited: str, digest: str, folder: object) -> str:
    return (
        f"error: the gates cite baseline run `{cited}`, `{folder}` is run `{digest}`\n"
        "hint: take the thresholds from that run, and cite its digest"
    )


def will_not_be_registered(path: object, *, changed: bool) -> str:
    state = "changed since they were locked" if changed else "not locked"
    return f"warning: the gates are {state}: this run cannot pass\nhint: kvrelay gates lock {path}"


def plan_refused(reason: str) -> str:
    return f"error: these contenders cannot be compared: {reason}\n  legal: neighbours differ in exactly one factor"


def order_refused(reason: str) -> str:
    return f"error: {reason}\nhint: `--reset reset_prefix_cache` or `--reset cache_salt`"


def reset_not_possible(reset: str, possible: Sequence[str], where: str) -> str:
    return (
        f"error: `--reset` is `{reset}` (from the command line)\n"
        f"  legal for {where}: {', '.join(f'`{one}`' for one in possible)}"
    )


def reset_was_refused(detail: str) -> str:
    return (
        f"error: a worker kept its cache: {detail}\n"
        "hint: vLLM has the path only with VLLM_SERVER_DEV_MODE=1; `--reset cache_salt` needs no such permission"
    )


def router_not_used(path: object) -> str:
    return f"note: `[router]` in `{path}` is not used: every arm has a router of its own, with an empty index"


def no_run(detail: str) -> str:
    return f"error: no run can be read there: {detail}\nhint: name the folder that `--out` of a replay or demo named"


def preflight(findings: Iterable[Finding]) -> str:
    marks = {"ok": "ok     ", "fail": "FAIL   ", "unknown": "unknown"}
    return "".join(f"{marks[one.outcome]} {one.what}: {one.reason}\n" for one in findings)


def manifest_whole(where: object) -> str:
    return f"{where}: whole\n"


def manifest_gaps(where: object, found: Iterable[Gap]) -> str:
    return "\n".join([f"error: {where} is not whole", *(f"  {gap.where}: {gap.problem}" for gap in found)])


def merge_refused(reasons: Iterable[str]) -> str:
    return "\n".join(["error: these runs are not one set of results", *(f"  {reason}" for reason in reasons)])


def difference(one: Difference) -> str:
    return f"{one.factor}: {one.key}: {_set(one.left)} -> {_set(one.right)}"


def more_than_policy(keys: Iterable[str]) -> str:
    return f"error: the configurations differ in more than the router's policy: {', '.join(keys)}"


def no_difference() -> str:
    return "the configurations do not differ\n"


def _set(value: object) -> str:
    return "not set" if value is None else f"`{value}`"
