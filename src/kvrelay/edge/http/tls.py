"""TLS towards workers: whose certificates we accept, and why we did not."""

from __future__ import annotations

import ssl
from pathlib import Path


def client_context(ca_file: Path | None, *, verify: bool) -> ssl.SSLContext:
    """Certificates must be signed by an authority in `ca_file` (the system's ones without it) for the worker's host.

    Raises OSError when the file cannot be read, ValueError when it is no certificate. Takes some milliseconds, reads
    files: make one per worker, not per connection.
    """
    if ca_file is not None:
        ca_file.open("rb").close()  # ssl would not name the file
    try:
        context = ssl.create_default_context(cafile=ca_file)
    except ssl.SSLError as problem:
        raise ValueError(f"{ca_file} holds no certificate (PEM): {problem.reason or problem}") from problem
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def tls_complaint(error: ssl.SSLError) -> str:
    """Why there is no TLS with a worker, without the library's own source lines."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not accepted: {error.verify_message}"
    if error.reason == "WRONG_VERSION_NUMBER":
        return "it does not speak TLS on this port"
    return f"TLS failed: {(error.reason or type(error).__name__).replace('_', ' ').lower()}"
