"""What a group and its processes say to each other over a Unix socket: a kind, a length, a payload."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum

import msgspec
from msgspec import Struct

from kvrelay.core.model.siblings import Placement, SiblingLoad

_HEAD = struct.Struct(">BI")
MAX_PAYLOAD_BYTES = 256 * 2**20


class Kind(IntEnum):
    # from a process to the group
    HELLO = 1  # its number
    READY = 2
    FAILED = 3  # why it could not start
    RECEIPTS = 4  # whole lines
    ENDED = 5  # how many requests it cut
    # from one process to all others, through the group
    TOLD = 6
    # from the group to a process
    TELL_ALL = 7  # say everything once more, there is somebody new
    GONE = 8  # the number of a process that is no more
    DRAIN = 9
    CUT = 10


class Told(Struct, frozen=True, array_like=True):
    """What a process says of itself; `loads` is None where nothing is said about load."""

    process: int
    placements: tuple[Placement, ...] = ()
    loads: tuple[SiblingLoad, ...] | None = None


class Failed(Struct, frozen=True):
    """An exception on its way to the process that can tell people. `errno` is None for what is no OSError."""

    text: str
    errno: int | None = None
    filename: str | None = None

    @classmethod
    def of(cls, problem: Exception) -> Failed:
        if isinstance(problem, OSError) and problem.errno is not None:
            filename = None if problem.filename is None else str(problem.filename)
            return cls(problem.strerror or str(problem), problem.errno, filename)
        return cls(str(problem))

    def raised(self) -> Exception:
        if self.errno is None:
            return ValueError(self.text)
        return OSError(self.errno, self.text, *(() if self.filename is None else (self.filename,)))


encode = msgspec.msgpack.Encoder().encode
decode_told = msgspec.msgpack.Decoder(Told).decode
decode_failed = msgspec.msgpack.Decoder(Failed).decode
decode_number = msgspec.msgpack.Decoder(int).decode


def frame(kind: Kind, payload: bytes = b"") -> bytes:
    return _HEAD.pack(kind, len(payload)) + payload


class FrameReader:
    """Whole frames out of a stream of bytes. Both ends are ours: a stream that makes no sense is a mistake of ours."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[Kind, bytes]]:
        self._buffer += data
        at = 0
        while len(self._buffer) - at >= _HEAD.size:
            kind, length = _HEAD.unpack_from(self._buffer, at)
            assert length <= MAX_PAYLOAD_BYTES, f"{length} bytes of {kind}"
            end = at + _HEAD.size + length
            if len(self._buffer) < end:
                break
            yield Kind(kind), bytes(self._buffer[at + _HEAD.size : end])
            at = end
        del self._buffer[:at]
