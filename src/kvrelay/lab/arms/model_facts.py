"""Which weights, tokenizer and template the workers serve, as digests. Names alone would let them change unseen."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from msgspec import Struct

from kvrelay import __version__

MAX_HASHED_BYTES = 4 << 30
_COMMIT = re.compile(r"^[0-9a-f]{40}$")
_SNAPSHOT = re.compile(r"/snapshots/([0-9a-f]{40})(?:/|$)")
_WEIGHTS = ("*.safetensors", "*.gguf", "*.bin")
_TEMPLATES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")


class StatedModel(Struct, frozen=True, forbid_unknown_fields=True):
    """What a fleet file says. `path` is the local snapshot that the workers serve."""

    path: str | None = None
    revision: str | None = None


class ModelFacts(Struct, frozen=True):
    """None: not known. `revision` is a commit of 40 digits, or `content:` and a digest over the weights' bytes."""

    name: str
    revision: str | None
    tokenizer_sha256: str | None
    chat_template_sha256: str | None


def mock_model(name: str) -> ModelFacts:
    """A mock has no weights: its answers follow from its name and the version of the code."""
    code = hashlib.sha256(f"kvrelay {__version__} mock {name}".encode()).hexdigest()
    return ModelFacts(name, f"content:{code}", code, code)


def local_model(name: str, stated: StatedModel) -> ModelFacts:
    """Of a snapshot on this machine; without one, only what the fleet file states."""
    revision = stated.revision if stated.revision and _COMMIT.match(stated.revision) else None
    path = None if stated.path is None else Path(stated.path).absolute()
    if path is None or not path.is_dir():
        return ModelFacts(name, revision, None, None)
    snapshot = _SNAPSHOT.search(str(path))
    return ModelFacts(
        name=name,
        revision=revision or (snapshot[1] if snapshot else _weights_digest(path)),
        tokenizer_sha256=_file_digest(path / "tokenizer.json"),
        chat_template_sha256=next(filter(None, (_file_digest(path / file) for file in _TEMPLATES)), None),
    )


def _weights_digest(path: Path) -> str | None:
    files = sorted(file for pattern in _WEIGHTS for file in path.glob(pattern))
    if not files or sum(file.stat().st_size for file in files) > MAX_HASHED_BYTES:
        return None
    summed = hashlib.sha256()
    for file in (path / "config.json", *files):
        summed.update(f"{file.name}\0{_file_digest(file)}\0".encode())
    return f"content:{summed.hexdigest()}"


def _file_digest(path: Path) -> str | None:
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
