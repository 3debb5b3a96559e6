from __future__ import annotations

import datetime

from hypothesis import given
from hypothesis import strategies as st

from kvrelay.core.traces.formats.times import format_time, parse_time_ms

MOMENTS = st.datetimes(datetime.datetime(1971, 1, 1), datetime.datetime(2099, 12, 31))


@given(MOMENTS, st.integers(-720, 720))
def test_times_are_those_of_the_standard_library(moment: datetime.datetime, offset_min: int) -> None:
    zone = datetime.timezone(datetime.timedelta(minutes=offset_min))
    aware = moment.replace(tzinfo=zone)

    assert abs((parse_time_ms(aware.isoformat()) or 0) - aware.timestamp() * 1000) < 0.01
    assert parse_time_ms(moment.isoformat(" ")) == parse_time_ms(moment.isoformat() + "Z")


@given(st.integers(0, 364 * 86_400_000 * 10))
def test_a_written_time_is_read_back(tenths_ms: int) -> None:
    assert abs((parse_time_ms(format_time(tenths_ms / 10)) or 0) - tenths_ms / 10) < 0.001


def test_other_texts_are_no_times() -> None:
    for text in ("", "5", "2023-11-16", "2023-11-16 25:00:00", "2023-00-16 01:00:00"):
        assert parse_time_ms(text) is None
