"""Points in time as text, to and from milliseconds since 1970 (UTC)."""

from __future__ import annotations

import re

MS_PER_DAY = 86_400_000
_DAYS_BEFORE_MONTH = (0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334)
_TEXT = re.compile(r"(\d{4})-(\d\d)-(\d\d)[T ](\d\d):(\d\d):(\d\d)(\.\d+)?(?:Z|([+-])(\d\d):?(\d\d))?", re.ASCII)


def parse_time_ms(text: str) -> float | None:
    """`2023-11-16 18:15:46.6805900` or ISO 8601 with Z or an offset; without one it is taken as UTC. None: neither."""
    match = _TEXT.fullmatch(text.strip())
    if match is None:
        return None
    year, month, day, hour, minute, second = (int(part) for part in match.groups()[:6])
    if not (1 <= month <= 12 and 1 <= day <= 31 and hour < 24 and minute < 60 and second < 61):
        return None
    fraction_ms = float(match[7] or 0) * 1000
    offset_min = (int(match[9]) * 60 + int(match[10])) * (1 if match[8] == "+" else -1) if match[8] else 0
    whole_s = (_days_since_1970(year, month, day) * 24 + hour) * 3600 + (minute - offset_min) * 60 + second
    return whole_s * 1000 + fraction_ms


def format_time(ms: float) -> str:
    """As the Azure traces write it, for times within 1970: an export has no date of its own."""
    ticks = round(ms * 10_000)
    rest, fraction = divmod(ticks, 10_000_000)
    rest, second = divmod(rest, 60)
    rest, minute = divmod(rest, 60)
    days, hour = divmod(rest, 24)
    month = max(m for m in range(12) if _DAYS_BEFORE_MONTH[m] <= days % 365)
    day = days % 365 - _DAYS_BEFORE_MONTH[month] + 1
    return f"1970-{month + 1:02}-{day:02} {hour:02}:{minute:02}:{second:02}.{fraction:07}"


def _days_since_1970(year: int, month: int, day: int) -> int:
    leap_days = _leap_days_before(year + (month > 2)) - _leap_days_before(1970)
    return (year - 1970) * 365 + leap_days + _DAYS_BEFORE_MONTH[month - 1] + day - 1


def _leap_days_before(year: int) -> int:
    """29ths of February in all years below `year` (Gregorian rule)."""
    before = year - 1
    return before // 4 - before // 100 + before // 400
