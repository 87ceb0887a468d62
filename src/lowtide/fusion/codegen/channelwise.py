"""Loops of windows that combine each channel by itself: depthwise convolutions, pools with padding.

Problem.  They do a few operations per element, so that every pass over memory shows: padding, results that
wait for their normalisation.

Method.

    Lanes     channels in the lanes, several pixels of a row at a time in registers; whole channels-last
              rows are read where they lie, and copied only for the pixels at the border
    Planes    pixels of a row in the lanes, four rows at a time, for images with their width innermost

Invariants.  As in `sliding`.  Not done here: windows that keep rows from one band for the next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod

from lowtide.fusion.codegen.ctext import index_text
from lowtide.fusion.codegen.index import Index
from lowtide.fusion.codegen.loops import Writer
from lowtide.fusion.codegen.sliding import LANE, Direct, Sliding, Winograd, rounded_up, uses_winograd
from lowtide.fusion.codegen.stage import Stage
from lowtide.fusion.codegen.tensor import Window

__all__ = ["emitter_of"]

WIDE = 48  # results of a row from which channels-last rows are read where they lie: few of them at the border
_OPERATION = {"multiply": "lt_multiply", "largest": "lt_largest", "total": "lt_total"}


def emitter_of(window: Window) -> Callable[[Stage, Writer, Mapping[str, str]], Sliding]:
    """The loops that suit a window."""
    if window.way == "dense":
        return Winograd if uses_winograd(window) else Direct
    return Planes if window.planar else Lanes


class Lanes(Sliding):
    """Channel by channel, channels in the lanes; whole channels-last rows are read where they lie."""

    def emit(self) -> None:
        window, writer, (high, broad) = self.window, self.writer, self.window.grid
        self.lanes = rounded_up(self.depth, LANE)
        width, source = self.extent(broad, 1), self._in_place()
        rows = self.band(width * self.lanes * 4, high)
        taps = self._weights()
        pixels = next((p for p in (7, 8, 6, 5, 4) if broad % p == 0), 4)
        self.array("lines", width * self.lanes if source else self.extent(rows, 0) * width * self.lanes)
        self.array("edge", self.extent(pixels, 1) * window.taps[0] * self.lanes)
        self.array("acc", pixels * self.lanes)
        self.start()
        if source:
            writer.line(f"lt_fill(lines, {width * self.lanes}, {self.operation}::first);")
        self.units((high + rows - 1) // rows)
        self.place_band(rows)
        if not source:
            self.fill(self.extent(rows, 0), width, self.lanes)
        writer.open("for (int64_t row = 0; row < rr; ++row)")
        self._rows(source, width)
        self.cols = self.lanes
        self._blocks(bool(source), pixels, taps)
        writer.close()
        writer.close()

    @property
    def operation(self) -> str:
        """How taps combine."""
        return _OPERATION[self.window.way]

    def place_band(self, rows: int) -> None:
        """Where a band's results and input rows start."""
        high, (stride, pad) = self.window.grid[0], (self.window.stride[0], self.window.pad[0])
        self.writer.line(
            f"const int64_t oh0 = part * {rows}, rr = {high} - oh0 < {rows} ? {high} - oh0 : {rows};"
        )
        self.writer.line(f"const int64_t y0 = oh0 * {stride} - {pad}, x0 = -{self.window.pad[1]};")

    def _in_place(self) -> str:
        """The address of row ``xh`` of image ``xn`` if rows can be read where they lie, else nothing."""
        (_, _, element), *more = self.window.parts
        leaf, axes = element.leaf, self.window.axes
        if (
            self.window.grid[1] < WIDE
            or more
            or leaf is None
            or leaf.kind != "load"
            or element.args
            or not leaf.index.linear
        ):
            return ""
        index = leaf.index
        side = (index.coefficient(axes[1]), index.coefficient(axes[3]))
        if self.depth % LANE or side[0] != 1 or (side[1] != self.depth and axes[3].size > 1):
            return ""
        start = index.substitute(lambda v: Index() if v in axes[1::2] else Index.of(v))
        return f"{leaf.source} + {index_text(start)}"

    def _rows(self, source: str, width: int) -> None:
        """``rows[kh]``: the input rows below a row of results, from the first column that is read."""
        window, writer = self.window, self.writer
        count, line = window.taps[0], width * self.lanes
        writer.line(f"const float* rows[{count}];")
        writer.open(f"for (int64_t h = 0; h < {count}; ++h)")
        if source:
            height = window.source.shape[2]
            writer.line(f"const int64_t xh = y0 + row * {window.stride[0]} + h * {window.dilation[0]};")
            writer.line(f"rows[h] = xh < 0 || xh >= {height} ? lines : {source};")
        else:
            writer.line(f"rows[h] = lines + (row * {window.stride[0]} + h * {window.dilation[0]}) * {line};")
        writer.close()

    def _blocks(self, in_place: bool, pixels: int, taps: str) -> None:
        """Results of a row, some pixels at a time, each finished while in L1."""
        window, writer, (high, broad) = self.window, self.writer, self.window.grid
        whole = broad // pixels * pixels
        for count, first, stop in ((pixels, 0, whole), (1, whole, broad)):
            if first == stop:
                continue
            writer.open(f"for (int64_t q = {first}; q < {stop}; q += {count})")
            reach, start = self.extent(count, 1), f"q * {window.stride[1]}"
            writer.line(f"const float* from[{window.taps[0]}];")
            if in_place:
                writer.line(f"const int64_t x = {start} + x0;")
                writer.line(f"if (x < 0 || x + {reach} > {window.source.shape[3]})")
                rows = (
                    f"rows, {window.taps[0]}, x, {reach}, {window.source.shape[3]}, {self.lanes}, edge, from"
                )
                writer.line(f"  lt_lane_edge<{self.operation}>({rows});")
                start = "x"
                writer.line("else")
            shift = f"from[h] = rows[h] + {start} * {self.lanes};"
            writer.line(f"for (int64_t h = 0; h < {window.taps[0]}; ++h) {shift}")
            form = (count, *window.taps, window.stride[1], window.dilation[1])
            text = ", ".join([self.operation, *map(str, form)])
            writer.line(f"lt_lane_block<{text}>(from, {taps}, acc, {self.lanes});")
            writer.line(f"const int64_t bt = 0, m0 = (xn * {high} + oh0 + row) * {broad} + q, mr = {count};")
            writer.line(f"const int64_t n0 = 0, nr = {self.depth};")
            self.epilogue(window.sizes[1])
            writer.close()

    def _weights(self) -> str:
        if self.window.weight is None:
            return "lines"
        name, taps = f"{self.window.name}_packed", prod(self.window.taps)
        place = f"(y2 * {self.window.taps[1]} + y3) * {self.lanes} + y0"
        self.arrange(name, taps * self.lanes, f"{name}[{place}] = {{}};", (2, 3, 0))
        return name


class Planes(Lanes):
    """Channel by channel, pixels of a row in the lanes."""

    def emit(self) -> None:
        window, writer, (high, broad) = self.window, self.writer, self.window.grid
        padded = rounded_up(broad, LANE)
        width, taps = self.extent(padded, 1), prod(window.taps)
        rows = self.band(width * 16, high)
        weights = "lines"
        if window.weight is not None:
            weights = f"{window.name}_packed"
            place = f"(y0 * {window.taps[0]} + y2) * {window.taps[1]} + y3"
            self.arrange(weights, self.depth * taps, f"{weights}[{place}] = {{}};", (0, 2, 3))
            weights += f" + xc * {taps}"
        self.array("lines", self.extent(rows, 0) * width)
        self.array("acc", rows * padded)
        self.start()
        self.units((high + rows - 1) // rows, (window.axes[1],))
        self.place_band(rows)
        self.fill(self.extent(rows, 0), width, 1)
        self._slide(weights, width, padded)
        self.cols = padded
        writer.line(f"const int64_t bt = xn * {self.depth} + xc, m0 = oh0, mr = rr, n0 = 0, nr = {broad};")
        self.epilogue(high)
        writer.close()

    def _slide(self, weights: str, width: int, padded: int) -> None:
        """All rows of a band, four at a time if the pixels of a row are neighbours."""
        window, writer = self.window, self.writer
        source, target = (
            f"lines + row * {window.stride[0] * width}, {width}",
            f"acc + row * {padded}, {padded}",
        )
        writer.line("int64_t row = 0;")
        if window.stride[1] == 1:
            shape = (*window.taps, window.stride[0], *window.dilation)
            for count in (4, 1):
                text = ", ".join([self.operation, str(count), *map(str, shape)])
                call = f"lt_plane_rows<{text}>({source}, {weights}, {target});"
                writer.line(f"for (; row + {count} <= rr; row += {count}) {call}")
            return
        shape = (*window.taps, window.stride[1], *window.dilation)
        text = ", ".join([self.operation, *map(str, shape)])
        writer.line(f"for (; row < rr; ++row) lt_plane_row<{text}>({source}, {weights}, {target});")
