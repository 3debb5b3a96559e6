"""Packages that only stores need are imported on use; a missing one names the extra that brings it."""

from __future__ import annotations

import importlib
from types import ModuleType


class MissingExtra(ValueError):
    """Something was configured that needs a package which is not installed."""


def need(module: str, *, extra: str, purpose: str) -> ModuleType:
    """The module, or MissingExtra with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtra(f"{purpose} needs the package `{module}`: pip install 'kvrelay[{extra}]'") from error
