"""A chunk that is larger than one object: its pieces, and the manifest that says that all of them landed.

The manifest is written under the chunk's own name when every piece has been verified. Each piece names the chunk and
its place in it, so a manifest needs to hold nothing but their sizes.
"""

from __future__ import annotations

from msgspec import Struct

PIECE_MARK = b"/"


class Manifest(Struct, frozen=True, array_like=True):
    """Sizes of the pieces before packing, in order."""

    piece_bytes: tuple[int, ...]

    @property
    def plain_bytes(self) -> int:
        return sum(self.piece_bytes)


def split(plain_bytes: int, largest_bytes: int) -> tuple[int, ...]:
    """Sizes of pieces of at most `largest_bytes`, all but the last equal; one size if it fits in one object."""
    if plain_bytes <= largest_bytes:
        return (plain_bytes,)
    whole, rest = divmod(plain_bytes, largest_bytes)
    return (largest_bytes,) * whole + ((rest,) if rest else ())


def piece_name(name: bytes, piece: int) -> bytes:
    """The store's name for a piece of the chunk `name`."""
    return name + PIECE_MARK + piece.to_bytes(2, "big")
