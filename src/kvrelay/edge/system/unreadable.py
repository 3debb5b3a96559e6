"""What reading somebody else's JSON or msgpack may raise."""

from __future__ import annotations

import msgspec

# The depth of nesting is the sender's choice, and too much of it is neither a DecodeError nor a ValueError.
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
