"""Reads a run's folder back, so that its report can be made again, and its claims be checked, from the raw records."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import msgspec

from kvrelay.core.gates.gate_file import GateError
from kvrelay.core.receipts.receipt import Receipt
from kvrelay.lab.arms.gate_store import KEPT, GateStore, read_gates
from kvrelay.lab.arms.manifest import Manifest
from kvrelay.lab.arms.measure import MANIFEST, SAMPLES, Measured
from kvrelay.lab.arms.planned import read_rows
from kvrelay.lab.arms.results import ArmData, policy_results
from kvrelay.lab.replay.replay import Arm
from kvrelay.lab.replay.sample import Sample
from kvrelay.lab.replay.sample_log import read_samples


class NoRun(Exception):
    """The folder holds no run that can be read: which file, and why not."""


def read_manifest(folder: Path) -> Manifest:
    """Raises NoRun."""
    path = folder / MANIFEST
    try:
        return msgspec.json.decode(path.read_bytes(), type=Manifest)
    except OSError as problem:
        raise NoRun(f"{path}: {problem.strerror}") from problem
    except msgspec.DecodeError as problem:
        raise NoRun(f"{path}: {problem}") from problem


def read_run(folder: Path) -> Measured:
    """Raises NoRun. A run that broke off has the arms that ended."""
    manifest = read_manifest(folder)
    try:
        rows, samples = read_rows(folder), read_samples(folder / SAMPLES)
        arms = tuple(_arm(folder, manifest, number, samples) for number in range(len(manifest.observed)))
    except OSError as problem:
        raise NoRun(f"{problem.filename}: {problem.strerror}") from problem
    except msgspec.DecodeError as problem:
        raise NoRun(f"{folder}: {problem}") from problem
    kept = read_kept_gates(folder)
    return Measured(
        manifest=manifest,
        rows=rows,
        arms=arms,
        results=policy_results(arms, rows),
        gates=None if kept is None or manifest.stated.gates is None else kept.file,
    )


def read_kept_gates(folder: Path) -> GateStore | None:
    """The gates that lie in the folder now; None when there are none that can be read."""
    try:
        return read_gates(folder / KEPT)
    except (OSError, GateError):
        return None


def _arm(folder: Path, manifest: Manifest, number: int, samples: tuple[Sample, ...]) -> ArmData:
    facts = manifest.observed[number]
    own = folder / "arms" / facts.arm
    receipts = _receipts(own / "receipts.jsonl")
    seen: dict[str, int] = defaultdict(int, msgspec.json.decode((own / "seen.json").read_bytes(), type=dict[str, int]))
    return ArmData(
        arm=Arm(facts.policy, facts.repeat),
        workers=tuple(process.name for process in facts.processes if process.role == "worker"),
        samples=tuple(sample for sample in samples if sample.arm == facts.arm),
        receipts=receipts,
        seen_tokens=seen,
        replay_s=facts.replay_s,
    )


def _receipts(path: Path) -> dict[str, Receipt]:
    decoder = msgspec.json.Decoder(Receipt)
    found = (decoder.decode(line) for line in path.read_bytes().splitlines())
    return {receipt.request_id: receipt for receipt in found}
