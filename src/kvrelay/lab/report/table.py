"""A table of ready-made texts, for the terminal and for the page alike, and how figures are spelt in it."""

from __future__ import annotations

from enum import StrEnum
from html import escape

from msgspec import Struct

from kvrelay.core.stats.paired import PairedEffect

UNKNOWN = "unknown"
_OUTCOMES = ("pass", "fail", "unknown")


class Origin(StrEnum):
    """Where a number comes from; each is marked with it, so that nobody takes a claim for a fact."""

    MEASURED = "measured"  # read from an engine, a clock or a wire in this run
    MODELLED = "modelled"  # read in the same way from mock workers, whose times follow from stated rates
    DERIVED = "derived"  # computed from numbers of this run
    STATED = "stated"  # said by an operator or a vendor, and believed by nobody here


class Table(Struct, frozen=True):
    """The first column names the row; the others are figures. `emphasis` marks rows, `origins` the columns after it."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    emphasis: tuple[bool, ...] = ()
    origins: tuple[Origin, ...] = ()

    def transposed(self) -> Table:
        """Rows become columns: few policies side by side read better in a terminal than many columns."""
        columns = list(zip(self.header, *self.rows, strict=True))
        return Table(columns[0], tuple(columns[1:]))

    def text(self) -> str:
        """Aligned columns without any drawing: fit for logs and pipes."""
        lines = (self.header, *self.rows)
        widths = [max(len(line[column]) for line in lines) for column in range(len(self.header))]
        return "\n".join(
            "  ".join([line[0].ljust(widths[0]), *(cell.rjust(widths[at]) for at, cell in enumerate(line[1:], 1))])
            for line in lines
        )

    def html(self) -> str:
        head = "".join(
            f'<th scope="col">{escape(cell)}{self._mark(number)}</th>' for number, cell in enumerate(self.header)
        )
        body = "".join(self._row_html(number, row) for number, row in enumerate(self.rows))
        return (
            f'<div class="table" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
        )

    def markdown(self) -> str:
        """A pipe table, figures to the right; winners are bold."""
        ruler = [":---", *["---:"] * (len(self.header) - 1)]
        lines = [self.header, ruler]
        for number, row in enumerate(self.rows):
            marked = number < len(self.emphasis) and self.emphasis[number]
            lines.append([f"**{cell}**" for cell in row] if marked else list(row))
        return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)

    def _mark(self, column: int) -> str:
        if not 0 < column <= len(self.origins):
            return ""
        origin = self.origins[column - 1]
        return f'<abbr class="origin" title="{origin.value}">{origin.value[:3]}</abbr>'

    def _row_html(self, number: int, row: tuple[str, ...]) -> str:
        marked = number < len(self.emphasis) and self.emphasis[number]
        cells = f'<th scope="row">{escape(row[0])}</th>' + "".join(map(_cell_html, row[1:]))
        return f'<tr class="winner">{cells}</tr>' if marked else f"<tr>{cells}</tr>"


def _cell_html(cell: str) -> str:
    """The words of a verdict have its colour."""
    return f'<td class="{cell}">{cell}</td>' if cell in _OUTCOMES else f"<td>{escape(cell)}</td>"


def milliseconds(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def number(value: float) -> str:
    """Four digits that count, never an exponent."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def tokens(value: int | None, *, signed: bool = False) -> str:
    if value is None:
        return UNKNOWN
    return f"{value:+,}" if signed and value else f"{value:,}"


def times(ratio: float | None) -> str:
    return UNKNOWN if ratio is None else f"{ratio:.2f}x"


def percent(ratio: float | None) -> str:
    return UNKNOWN if ratio is None else f"{100 * ratio:.1f} %"


def interval(effect: PairedEffect) -> str:
    """Ratio and interval, or why there is none."""
    if effect.ratio is None:
        return "no pair"
    if effect.interval is None:
        return f"{effect.ratio:.3f} (too few for an interval)"
    return f"{effect.ratio:.3f} ({effect.interval.low:.3f} to {effect.interval.high:.3f})"
