"""ZMQ endpoints to listen on, as they are given on a command line: loopback unless it was said otherwise."""

from __future__ import annotations

from kvrelay.cli import messages
from kvrelay.edge.system.urls import is_loopback


def check_endpoint(option: str, endpoint: str, *, insecure: bool) -> None:
    """Ends the process with a message if this cannot be listened on, or not without `--insecure`."""
    if endpoint == "auto" or endpoint.startswith("ipc://"):
        return
    host = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    if not endpoint.startswith("tcp://") or not host:
        legal = "`auto`, tcp://HOST:PORT or ipc://PATH"
        messages.fail(messages.bad_value(option, endpoint, legal, source="the command line"))
    if not insecure and not is_loopback(host):
        legal = "a loopback address such as tcp://127.0.0.1:5600; anything else needs `--insecure`"
        messages.fail(messages.bad_value(option, endpoint, legal, source="the command line"))
