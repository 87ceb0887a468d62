"""Loops of windows: convolutions and pools, each result finished while it is in cache.

Problem.  ATen stores a convolution's result, its normalised result, its activation; oneDNN pads and reorders
in memory of its own.

Method.  A band of padded input rows is copied (or computed: concatenation, activation, any layout) into
scratch, channels innermost; then, for the rows of results above it,

    Direct    one micro-kernel call per row of the window: pixels of a row overlap, so ``kw * c`` contiguous
              floats *are* the window's row, and the band is a matrix with step ``stride * c``
    Winograd  F(2x2, 3x3): 16 products over a quarter of the pixels each, 2.25 times fewer multiplications
(channel by channel: `channelwise`)

and the stage's stores run over the results (bias, normalisation, activation, residual), as for products.
Weights are rearranged once, by the kernel's prepare function.

Invariants.  The order of additions does not depend on threads.  Winograd's results differ from direct ones by
a few units in the last place of the largest; a band with infinities or NaN is done again directly.
Not done here: windows that recompute no row between bands, chains of convolutions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from lowtide.fusion.codegen.ctext import index_text
from lowtide.fusion.codegen.expr import Expr
from lowtide.fusion.codegen.gemm import PANEL, Gemm
from lowtide.fusion.codegen.index import Index, Var
from lowtide.fusion.codegen.loops import Writer, declare
from lowtide.fusion.codegen.stage import Stage
from lowtide.fusion.codegen.tensor import Window

__all__ = ["LANE", "Direct", "Sliding", "Winograd", "rounded_up", "uses_winograd"]

TILES = 64  # tiles of one Winograd product
PIXELS = 192  # results of a direct band, about
BAND_BYTES = 1 << 18  # padded input rows of a band, about
LANE = 16


def uses_winograd(window: Window) -> bool:
    """Whether a window is computed by F(2x2, 3x3)."""
    plain = (window.taps, window.stride, window.dilation) == ((3, 3), (1, 1), (1, 1))
    wide, deep = window.sizes[2], window.source.shape[1]
    return window.way == "dense" and plain and wide % LANE == deep % LANE == 0 and min(window.grid) >= 4


def rounded_up(count: int, step: int) -> int:
    """The next multiple of `step`."""
    return (count + step - 1) // step * step


def _even(extent: int, most: int) -> int:
    """The size of equal parts of at most `most`."""
    count = (extent + most - 1) // most
    return (extent + count - 1) // count


class Sliding(Gemm):
    """What all windows share: the band of padded rows, and weights arranged once."""

    def __init__(self, stage: Stage, writer: Writer, spilled: Mapping[str, str]) -> None:
        super().__init__(stage, writer, spilled)
        assert isinstance(stage.product, Window)
        self.window = stage.product
        writer.uses_windows = True
        self.depth = self.window.source.shape[1]

    def extent(self, results: int, axis: int) -> int:
        """Input rows (columns) below `results` rows (columns) of results."""
        window = self.window
        return (results - 1) * window.stride[axis] + (window.taps[axis] - 1) * window.dilation[axis] + 1

    def band(self, row_bytes: int, most: int) -> int:
        """Rows of results whose input rows fit `BAND_BYTES`, at most `most`."""
        rows = min(most, self.window.grid[0])
        while rows > 1 and self.extent(rows, 0) * row_bytes > BAND_BYTES:
            rows -= 1
        return _even(self.window.grid[0], rows)

    def array(self, name: str, count: int) -> None:
        self.writer.line(f"float* const {name} = (float*)(own + {self.writer.own(count * 4)});")

    def start(self) -> None:
        """Scopes, and what does not depend on any loop."""
        self.enter(())
        self.hoist([placed.value for placed in self.stage.placed])

    def arrange(self, name: str, count: int, target: str, order: Sequence[int]) -> None:
        """Write the weight's elements as `target` says, over its axes ``y0 ... y3`` in `order` of loops."""
        assert self.window.weight is not None
        setup = self.writer.prepare(name, count * 4)
        loops = type(self)(self.stage, setup, {})
        axes = [Var(f"y{k}", size) for k, size in enumerate(self.window.weight.shape)]
        element = self.window.weight.at(tuple(Index.of(axis) for axis in axes))
        setup.line(f"std::memset({name}, 0, {count * 4});")
        for k in order:
            setup.open(f"for (int64_t y{k} = 0; y{k} < {axes[k].size}; ++y{k})")
            setup.line(f"(void)y{k};")
        loops.enter(axes)
        loops.hoist([element], force=True)
        setup.line(target.format(loops.name_of(element)))
        for _ in order:
            setup.close()

    def fill(self, rows: int, columns: int, lanes: int) -> None:
        """``lines[rows][columns][lanes]`` from row ``y0``, column ``x0`` (perhaps outside) of ``xn``."""
        writer, (_, _, height, width) = self.writer, self.window.source.shape
        value = "-__builtin_inff()" if self.window.way == "largest" else "0.0f"
        axes = self.window.axes
        elements = [element for _, _, element in self.window.parts]
        self.enter((axes[0], axes[1]) if self.window.planar else (axes[0],))
        self.hoist(elements)
        writer.line(
            f"const int64_t lo = x0 < 0 ? -x0 : 0, to = {width} - x0 < {columns} ? {width} - x0 : {columns};"
        )
        writer.line("const int64_t hi = to > lo ? to : lo;")
        writer.open(f"for (int64_t y = 0; y < {rows}; ++y)")
        writer.line(f"const int64_t xh = y0 + y; float* const line = lines + y * {columns * lanes};")
        writer.line(
            f"if (xh < 0 || xh >= {height}) {{ lt_fill(line, {columns * lanes}, {value}); continue; }}"
        )
        writer.line(f"lt_fill(line, lo * {lanes}, {value});")
        writer.line(f"lt_fill(line + hi * {lanes}, ({columns} - hi) * {lanes}, {value});")
        self.enter((axes[2],))
        self.hoist(elements)
        for first, stop, element in self.window.parts:
            self._copy(first, stop, element, lanes)
        if not self.window.planar and lanes > self.depth:
            gap = lanes - self.depth
            writer.line(
                f"for (int64_t q = lo; q < hi; ++q) lt_fill(line + q * {lanes} + {self.depth}, {gap}, 0.0f);"
            )
        writer.close()
        del self.scopes[-2:]

    def _copy(self, first: int, stop: int, element: Expr, lanes: int) -> None:
        """The inner columns of one row, one part of the channels."""
        axes, count = self.window.axes, stop - first
        leaf = element.leaf
        if leaf is not None and leaf.kind == "load" and not element.args and leaf.index.linear:
            across, along = leaf.index.coefficient(axes[1]), leaf.index.coefficient(axes[3])
            start = leaf.index.substitute(
                lambda v: Index.of(Var("xs", v.size)) if v == axes[3] else Index.of(v)
            )
            if self.window.planar and (along == 1 or axes[3].size == 1):
                self._run(leaf.source, start, "line + lo", "(hi - lo)")
                return
            if not self.window.planar:
                start = start.substitute(lambda v: Index() if v == axes[1] else Index.of(v))
                whole = along == lanes == count or axes[3].size == 1
                if (across == 1 or axes[1].size == 1) and whole:
                    self._run(leaf.source, start, f"line + lo * {lanes} + {first}", f"(hi - lo) * {count}")
                    return
                if along == 1 and count >= 8 and across:
                    place = f"{leaf.source} + {index_text(start)}"
                    self.writer.line("{ const int64_t xs = x0 + lo; (void)xs;")
                    target = f"line + lo * {lanes} + {first}, {lanes}, hi - lo, {count}"
                    self.writer.line(f"lt_transpose({place}, {across}, {target}); }}")
                    return
        self._compute_row(first, count, element, lanes)

    def _run(self, source: str, start: Index, target: str, count: str) -> None:
        self.writer.line("{ const int64_t xs = x0 + lo; (void)xs;")
        self.writer.line(f"std::memcpy({target}, {source} + {index_text(start)}, {count} * 4); }}")

    def _compute_row(self, first: int, count: int, element: Expr, lanes: int) -> None:
        writer, axes = self.writer, self.window.axes
        if self.window.planar:
            writer.line("#pragma omp simd")
        writer.open("for (int64_t q = lo; q < hi; ++q)")
        writer.line("const int64_t xw = x0 + q; (void)xw;")
        self.enter((axes[3],))
        if self.window.planar:
            self.hoist([element], force=True)
            writer.line(f"line[q] = {self.name_of(element)};")
        else:
            self.hoist([element])
            writer.line("#pragma omp simd")
            writer.open(f"for (int64_t xc = 0; xc < {count}; ++xc)")
            self.enter((axes[1],))
            self.hoist([element], force=True)
            writer.line(f"line[q * {lanes} + {first} + xc] = {self.name_of(element)};")
            self.scopes.pop()
            writer.close()
        self.scopes.pop()
        writer.close()

    def units(self, bands: int, more: Sequence[Var] = ()) -> None:
        """Open the loop over images and bands of rows."""
        writer = self.writer
        images = self.window.axes[0]
        count = images.size * bands * prod(var.size for var in more)
        writer.line(f"const lt_span span = lt_share({count}, 1, thread, threads);")
        writer.open("for (int64_t u = span.lo; u < span.hi; ++u)")
        declare(writer, (images, *more, Var("part", bands)), "u")

    def columns(self, wide: int, cols: int) -> None:
        """Open the loop over blocks of result channels."""
        self.cols = cols
        self.writer.open(f"for (int64_t n0 = 0; n0 < {wide}; n0 += {cols})")
        rest = f"{wide} - n0 < {cols} ? {wide} - n0 : {cols}" if wide % cols else str(cols)
        self.writer.line(f"const int64_t nr = {rest};")


class Direct(Sliding):
    """Dense windows of any size, stride and dilation."""

    def emit(self) -> None:
        window, writer = self.window, self.writer
        (high, broad), wide = window.grid, window.sizes[2]
        width = self.extent(broad, 1)
        rows = self.band(width * self.depth * 4, max(PIXELS // broad, 1))
        cols = wide if wide <= 2 * PANEL else 2 * PANEL
        panels, run = (wide + PANEL - 1) // PANEL, window.taps[1] * self.depth
        name, plane = f"{window.name}_packed", panels * PANEL * run
        panel = f"(y2 * {panels} + y0 / {PANEL}) * {window.taps[1]} + y3"
        place = f"(({panel}) * {self.depth} + y1) * {PANEL} + y0 % {PANEL}"
        self.arrange(name, plane * window.taps[0], f"{name}[{place}] = {{}};", (2, 3, 1, 0))
        self.array("lines", self.extent(rows, 0) * width * self.depth)
        self.array("acc", rows * broad * cols)
        self.start()
        bands = (high + rows - 1) // rows
        self.units(bands)
        writer.line(f"const int64_t oh0 = part * {rows}, rr = {high} - oh0 < {rows} ? {high} - oh0 : {rows};")
        writer.line(f"const int64_t y0 = oh0 * {window.stride[0]} - {window.pad[0]}, x0 = -{window.pad[1]};")
        self.fill(self.extent(rows, 0), width, self.depth)
        self.columns(wide, cols)
        self._multiply_band(name, plane, width)
        writer.line(f"const int64_t bt = 0, m0 = (xn * {high} + oh0) * {broad}, mr = rr * {broad};")
        self.epilogue(window.sizes[1])
        writer.close()
        writer.close()
        writer.line("at::native::cpublas::brgemm_release(false);")

    def _multiply_band(self, name: str, plane: int, width: int) -> None:
        window, writer, depth = self.window, self.writer, self.depth
        broad, (across, spread) = window.grid[1], (window.stride[1], window.dilation[1])
        run = window.taps[1] * depth
        writer.open("for (int64_t i = 0; i < rr; ++i)")
        writer.open(f"for (int64_t q = 0; q < {broad}; q += {PANEL})")
        writer.line(f"const int64_t qr = {broad} - q < {PANEL} ? {broad} - q : {PANEL};")
        writer.open(f"for (int64_t jt = 0; jt < nr; jt += {PANEL})")
        writer.line(f"const int64_t jr = nr - jt < {PANEL} ? nr - jt : {PANEL};")
        writer.open(f"for (int64_t h = 0; h < {window.taps[0]}; ++h)")
        line = f"(i * {window.stride[0]} + h * {window.dilation[0]}) * {width * depth}"
        writer.line(f"const float* const from = lines + {line} + q * {across * depth};")
        writer.line(f"const float* const by = {name} + h * {plane} + (n0 + jt) * {run};")
        target = f"acc + (i * {broad} + q) * {self.cols} + jt"
        step = f"{across * depth}, {PANEL}, {self.cols}"
        if spread == 1:
            writer.line(f"lt_window(qr, jr, {window.taps[1]}, {depth}, {step}, h > 0, from, by, {target});")
        else:
            writer.open(f"for (int64_t w = 0; w < {window.taps[1]}; ++w)")
            writer.line(
                f"lt_brgemm(qr, jr, {depth}, {step}, h + w > 0, from + w * {spread * depth}, "
                f"by + w * {depth * PANEL}, {target});"
            )
            writer.close()
        for _ in range(4):
            writer.close()


class Winograd(Sliding):
    """3 x 3 windows next to each other, channels in whole vectors."""

    def emit(self) -> None:
        window, writer, depth = self.window, self.writer, self.depth
        (high, broad), wide = window.grid, window.sizes[2]
        tall, long = (high + 1) // 2, (broad + 1) // 2
        across = _even(long, TILES)
        down = _even(tall, max(TILES // across, 1))
        tiles, cols = down * across, min(wide, PANEL)
        panels = (wide + PANEL - 1) // PANEL
        plane, name = panels * PANEL * depth, f"{window.name}_packed"
        self._transform_weight(name, plane)
        self.array("lines", (2 * down + 2) * (2 * across + 2) * depth)
        self.array("tile", 16 * tiles * depth)
        self.array("made", 16 * tiles * cols)
        self.array("whole", 4 * tiles * cols)
        self.start()
        strips = Var("strip", (long + across - 1) // across)
        self.units((tall + down - 1) // down, (strips,))
        writer.line(f"const int64_t oh0 = part * {2 * down}, ow0 = strip * {2 * across};")
        writer.line(f"const int64_t y0 = oh0 - {window.pad[0]}, x0 = ow0 - {window.pad[1]};")
        self.fill(2 * down + 2, 2 * across + 2, depth)
        writer.line(f"lt_winograd_in(lines, {(2 * across + 2) * depth}, {depth}, {down}, {across}, tile);")
        self.columns(wide, cols)
        writer.line(f"const float* const by = {name} + n0 * {depth};")
        size = f"{tiles}, nr, {depth}, {depth}, {PANEL}, {cols}, false"
        place = f"tile + k * {tiles * depth}, by + k * {plane}, made + k * {tiles * cols}"
        writer.line(f"for (int64_t k = 0; k < 16; ++k) lt_brgemm({size}, {place});")
        writer.open(f"if (lt_winograd_out(made, {cols}, nr, {down}, {across}, whole))")
        self._directly(down, across, cols)
        writer.close()
        writer.open(f"for (int64_t oh = oh0; oh < oh0 + {2 * down} && oh < {high}; ++oh)")
        writer.line(f"const float* const acc = whole + (oh - oh0) * {2 * across * cols};")
        left = f"{broad} - ow0 < {2 * across} ? {broad} - ow0 : {2 * across}"
        writer.line(f"const int64_t bt = 0, m0 = (xn * {high} + oh) * {broad} + ow0, mr = {left};")
        self.epilogue(window.sizes[1])
        for _ in range(3):
            writer.close()
        writer.line("at::native::cpublas::brgemm_release(false);")

    def _directly(self, down: int, across: int, cols: int) -> None:
        """Plain sums where a band has infinities or NaN, which a transform would spread to its neighbours."""
        assert self.window.weight is not None
        writer, depth = self.writer, self.depth
        axes = [Var(f"y{k}", size) for k, size in enumerate(self.window.weight.shape)]
        element = self.window.weight.at(tuple(Index.of(axis) for axis in axes))
        sizes = (("oy", 2 * down), ("ox", 2 * across), ("oc", "nr"))
        for name, size in sizes:
            writer.open(f"for (int64_t {name} = 0; {name} < {size}; ++{name})")
        writer.line("const int64_t y0 = n0 + oc; float sum = 0; (void)y0;")
        for k in (2, 3, 1):
            writer.open(f"for (int64_t y{k} = 0; y{k} < {axes[k].size}; ++y{k})")
        self.enter(axes)
        self.hoist([element], force=True)
        place = f"((oy + y2) * {2 * across + 2} + ox + y3) * {depth} + y1"
        writer.line(f"sum = lt_fma(lines[{place}], {self.name_of(element)}, sum);")
        self.scopes.pop()
        for _ in (2, 3, 1):
            writer.close()
        writer.line(f"whole[(oy * {2 * across} + ox) * {cols} + oc] = sum;")
        for _ in sizes:
            writer.close()

    def _transform_weight(self, name: str, plane: int) -> None:
        place = f"((y0 / {PANEL}) * {self.depth} + y1) * {PANEL} + y0 % {PANEL}"
        store = f"g[y2 * 3 + y3] = {{}}; if (y2 + y3 == 4) lt_winograd_weight(g, {name} + {place}, {plane});"
        assert self.writer.setup is not None
        self.writer.setup.line("float g[9];")
        self.arrange(name, plane * 16, store, (1, 0, 2, 3))
