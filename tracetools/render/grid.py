"""A plain text table that stays readable at any width.

In: rows of cells. Out: styled lines. Numbers are never cut: the first column gives way, then columns marked optional go, last first.
Knows nothing of traces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.text import Text

GAP = 2
LEAST_FIRST = 24  # columns narrower than this make names useless: optional columns go first


@dataclass(frozen=True, slots=True)
class Column:
    title: str
    optional: bool = False
    left: bool = False


@dataclass(slots=True)
class Grid:
    """First column left, the others right unless marked `left`."""

    columns: Sequence[Column]
    rows: list[tuple[Text, ...]] = field(default_factory=list)

    def add(self, *cells: str | Text, style: str = "") -> None:
        self.rows.append(tuple(c if isinstance(c, Text) else Text(c, style=style) for c in cells))

    def lines(self, width: int) -> list[Text]:
        """Header and rows, none longer than `width` as far as the numbers allow it."""
        header = tuple(Text(c.title, style="dim") for c in self.columns)
        table = [header, *self.rows]
        shown = list(range(len(self.columns)))
        widths = [max(row[i].cell_len for row in table) for i in shown]
        for i in reversed(range(1, len(self.columns))):
            if self._first_width(widths, shown, width) >= min(LEAST_FIRST, widths[0]):
                break
            if self.columns[i].optional:
                shown.remove(i)
        widths[0] = min(widths[0], max(8, self._first_width(widths, shown, width)))
        return [self._line(row, shown, widths) for row in table]

    def _first_width(self, widths: Sequence[int], shown: Sequence[int], width: int) -> int:
        return width - sum(widths[i] + GAP for i in shown[1:])

    def _line(self, row: tuple[Text, ...], shown: Sequence[int], widths: Sequence[int]) -> Text:
        line = Text(no_wrap=True)
        for i in shown:
            cell = row[i].copy()
            cell.truncate(widths[i], overflow="ellipsis")
            space = widths[i] - cell.cell_len
            if i:
                line.append(" " * GAP)
            if i == 0 or self.columns[i].left:
                line.append_text(cell)
                line.append(" " * (space if i != shown[-1] else 0))
            else:
                line.append(" " * space)
                line.append_text(cell)
        return line
