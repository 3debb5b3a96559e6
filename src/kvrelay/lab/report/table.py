"""A table of ready-made texts, for the terminal and for the page alike, and how figures are spelt in it."""

from __future__ import annotations

from html import escape

from msgspec import Struct

UNKNOWN = "unknown"


class Table(Struct, frozen=True):
    """The first column names the row; the others are figures. `emphasis` marks rows."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    emphasis: tuple[bool, ...] = ()

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
        head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in self.header)
        body = "".join(self._row_html(number, row) for number, row in enumerate(self.rows))
        return (
            f'<div class="table" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
        )

    def _row_html(self, number: int, row: tuple[str, ...]) -> str:
        marked = number < len(self.emphasis) and self.emphasis[number]
        cells = f'<th scope="row">{escape(row[0])}</th>' + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
        return f'<tr class="winner">{cells}</tr>' if marked else f"<tr>{cells}</tr>"


def milliseconds(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def tokens(value: int | None, *, signed: bool = False) -> str:
    if value is None:
        return UNKNOWN
    return f"{value:+,}" if signed and value else f"{value:,}"


def times(ratio: float | None) -> str:
    return UNKNOWN if ratio is None else f"{ratio:.2f}x"


def percent(ratio: float | None) -> str:
    return UNKNOWN if ratio is None else f"{100 * ratio:.1f} %"
