"""The flags of `kvrelay serve` as a configuration; `kvrelay config show` takes the same ones."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from kvrelay.cli import messages
from kvrelay.edge.system.config import Config, ConfigError, load_config


def effective_config(
    file: Path | None,
    *,
    workers: Sequence[str] | None,
    policy: str | None,
    host: str | None,
    port: int | None,
    admin_port: int | None,
) -> Config:
    """Flags over environment over file; ends the process with a message when something is wrong with them."""
    read = config_reader(file, workers=workers, policy=policy, host=host, port=port, admin_port=admin_port)
    try:
        return read()
    except ConfigError as error:
        messages.fail(messages.config_problems(error.problems))


def config_reader(
    file: Path | None,
    *,
    workers: Sequence[str] | None,
    policy: str | None,
    host: str | None,
    port: int | None,
    admin_port: int | None,
) -> Callable[[], Config]:
    """Reads the same file under the same flags each time it is called. Raises ConfigError."""
    flags = {
        "workers": [{"url": url} for url in workers or ()] or None,
        "gateway.policy": policy,
        "gateway.host": host,
        "gateway.port": port,
        "gateway.admin_port": admin_port,
    }
    return partial(load_config, file, os.environ, flags)
