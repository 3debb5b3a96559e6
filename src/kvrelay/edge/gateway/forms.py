"""What routing must know of a `multipart/form-data` body: the model it is for."""

from __future__ import annotations

import re

LOOKED_AT_BYTES = 64 * 1024  # clients send the fields before the file

_MODEL = re.compile(
    rb"content-disposition:[ \t]*form-data;[ \t]*name=\"?model\"?[ \t]*\r\n(?:[^\r\n]+\r\n)*\r\n([^\r\n]{1,256})\r\n",
    re.IGNORECASE,
)


def is_form(content_type: bytes | None) -> bool:
    return content_type is not None and content_type.lstrip()[:19].lower() == b"multipart/form-data"


def model_of_form(start: bytes) -> str | None:
    """The value of the field `model`, if it is near the start of the body."""
    found = _MODEL.search(start, 0, LOOKED_AT_BYTES)
    if found is None:
        return None
    try:
        return found[1].decode("utf-8")
    except UnicodeDecodeError:
        return None
