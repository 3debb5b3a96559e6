"""Epochs outlive the gateway: one that forgot them would let requests meet KV that a rotation has ruled out."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from kvrelay.core.routing.epochs import EpochState


def read_epochs(path: Path) -> EpochState:
    """The first epoch if there is no such file. Raises OSError, or ValueError for a file that is not ours."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=EpochState)
    except FileNotFoundError:
        return EpochState()
    except msgspec.DecodeError as problem:
        raise ValueError(f"{path} holds no epochs: {problem}") from problem


def write_epochs(path: Path, state: EpochState) -> None:
    """All of it or nothing, and on the disk when this returns. Raises OSError."""
    draft = path.with_name(path.name + ".draft")
    with draft.open("wb") as file:
        file.write(msgspec.json.encode(state))
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
