"""Counts what was planned against what was recorded: nobody can make a failure disappear by deleting its line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvrelay.lab.arms.manifest import Manifest
from kvrelay.lab.arms.planned import PlannedRow, rows_digest
from kvrelay.lab.arms.results import ArmData, unrecorded


def recount(manifest: Manifest, rows: Sequence[PlannedRow], arms: Sequence[ArmData]) -> tuple[str, ...]:
    """What does not add up, in words; empty when every planned request has exactly one sample and one receipt."""
    found = []
    if rows_digest(rows) != manifest.stated.plan.turns_sha256:
        found.append("the planned turns in the folder are not those of the manifest")
    if len(rows) != manifest.stated.plan.requests:
        found.append(f"{len(rows)} planned turns in the folder, {manifest.stated.plan.requests} in the manifest")
    missing = [name for name in manifest.stated.order if name not in {data.arm.name for data in arms}]
    found += [f"arm {name} left no record" for name in missing]
    for data in arms:
        found += _of_arm(data, rows)
    noted = {facts.arm: facts for facts in manifest.observed}
    for data in arms:
        facts = noted.get(data.arm.name)
        if facts is not None and facts.samples != len(data.samples):
            found.append(f"{data.arm.name}: {len(data.samples)} samples now, {facts.samples} when it ended")
        if facts is not None and facts.receipts != len(data.receipts):
            found.append(f"{data.arm.name}: {len(data.receipts)} receipts now, {facts.receipts} when it ended")
    return tuple(found)


def _of_arm(data: ArmData, rows: Sequence[PlannedRow]) -> list[str]:
    found = []
    gone = unrecorded(data, rows)
    if gone:
        session_id, turn = gone[0]
        found.append(f"{data.arm.name}: {len(gone)} planned requests left no sample, such as {session_id}, turn {turn}")
    times = Counter((sample.session_id, sample.turn) for sample in data.samples)
    twice = [key for key, count in times.items() if count > 1]
    if twice:
        found.append(f"{data.arm.name}: {len(twice)} requests have more than one sample")
    unreceipted = [sample for sample in data.samples if sample.ok and sample.request_id not in data.receipts]
    if unreceipted:
        found.append(f"{data.arm.name}: {len(unreceipted)} answered requests have no receipt")
    return found
