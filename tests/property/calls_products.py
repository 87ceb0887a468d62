"""Real calls of matrix products, convolutions, attention, pools and interpolation."""

from __future__ import annotations

from tests.property.drawing import Build, Draw, real_call

from lowtide.ir.ops import Arg, Ref


def _mm(draw: Draw) -> tuple[Arg, ...]:
    m, k, n = draw.size(), draw.size(), draw.size()
    return (draw.tensor(m, k), draw.tensor(k, n))


def _bmm(draw: Draw) -> tuple[Arg, ...]:
    b, m, k, n = (draw.size() for _ in range(4))
    return (draw.tensor(b, m, k), draw.tensor(b, k, n))


def _addmm(draw: Draw) -> tuple[Arg, ...]:
    m, k, n = draw.size(), draw.size(), draw.size()
    bias = draw.one_of((n,), (m, n), (1, n), (m, 1))
    return (draw.tensor(*bias), draw.tensor(m, k), draw.tensor(k, n))


def _baddbmm(draw: Draw) -> tuple[Arg, ...]:
    b, m, k, n = (draw.size() for _ in range(4))
    bias = draw.one_of((b, m, n), (1, m, n), (m, 1))
    return (draw.tensor(*bias), draw.tensor(b, m, k), draw.tensor(b, k, n))


def _mv(draw: Draw) -> tuple[Arg, ...]:
    m, k = draw.size(), draw.size()
    return (draw.tensor(m, k), draw.tensor(k))


def _addmv(draw: Draw) -> tuple[Arg, ...]:
    m, k = draw.size(), draw.size()
    return (draw.tensor(m), draw.tensor(m, k), draw.tensor(k))


def _dot(draw: Draw) -> tuple[Arg, ...]:
    k = draw.size()
    return (draw.tensor(k), draw.tensor(k))


def _linear(draw: Draw) -> tuple[Arg, ...]:
    shape, n = draw.shape(), draw.size()
    return (draw.tensor(*shape), draw.tensor(n, shape[-1]), draw.tensor(n) if draw.flag() else None)


def _convolution(draw: Draw) -> tuple[Arg, ...]:
    groups, transposed, space = draw.one_of(1, 1, 2, 3), draw.flag(), draw.one_of(1, 2)
    into, out, kernel = groups * draw.size(1, 3), groups * draw.size(1, 3), draw.size(1, 3)
    pair = (into, out // groups) if transposed else (out, into // groups)
    x = draw.tensor(draw.size(), into, *(draw.size(3, 5) for _ in range(space)))
    w = draw.tensor(*pair, *(kernel,) * space)
    b = draw.tensor(out) if draw.flag() else None
    stride, pad = draw.size(1, 2), draw.size(0, kernel - 1)
    sizes = [(each,) * space for each in (stride, pad, 1)]
    return (x, w, b, *sizes, transposed, (0,) * space, groups)


def _convolution_backward(draw: Draw) -> tuple[Arg, ...]:
    _x, _w, b, *rest = _convolution(draw)
    tensors = draw.tensors
    out = real_call("aten.convolution.default", tensors[0], tensors[1], None, *rest)[0]
    draw.tensors[:] = [draw.random(*out.shape), *tensors[:2]]
    mask = (draw.flag(), draw.flag(), draw.flag() and b is not None)
    mask = mask if any(mask) else (True, True, False)
    groups, transposed = int(rest[5]), bool(rest[3])  # type: ignore[call-overload]
    width = draw.tensors[2].shape[1] * groups if transposed else draw.tensors[2].shape[0]
    return (Ref(0), Ref(1), Ref(2), (width,) if b is not None else None, *rest, mask)


def _attention(draw: Draw) -> tuple[Arg, ...]:
    b, h, d = draw.size(), draw.size(1, 3), draw.size(2, 4)
    q, k = draw.size(1, 5), draw.size(1, 5)
    return (draw.tensor(b, h, q, d), draw.tensor(b, h, k, d), draw.tensor(b, h, k, d), 0.0, draw.flag())


def _attention_backward(draw: Draw) -> tuple[Arg, ...]:
    *_, causal = _attention(draw)
    q, k, v = draw.tensors
    forward = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    out, logsumexp = real_call(forward, q, k, v, 0.0, causal)
    draw.tensors[:] = [draw.random(*out.shape), q, k, v, out, logsumexp]
    return (*(Ref(position) for position in range(6)), 0.0, causal)


def _image(draw: Draw) -> tuple[int, ...]:
    return (draw.size(), draw.size(1, 3), draw.size(3, 5), draw.size(3, 5))


def _max_pool(draw: Draw) -> tuple[Arg, ...]:
    return (draw.tensor(*_image(draw)), (2, 3), (draw.size(1, 2),) * 2, (1, 1), (1, 1), draw.flag())


def _max_pool_backward(draw: Draw) -> tuple[Arg, ...]:
    _x, *rest = _max_pool(draw)
    out, indices = real_call("aten.max_pool2d_with_indices.default", draw.tensors[0], *rest)
    draw.tensors.insert(0, draw.random(*out.shape))
    return (Ref(0), Ref(1), *rest, draw.use(indices))


def _avg_pool(draw: Draw) -> tuple[Arg, ...]:
    return (
        draw.tensor(*_image(draw)),
        (2, 2),
        (draw.size(1, 2),) * 2,
        (1, 1),
        draw.flag(),
        draw.flag(),
        None,
    )


def _avg_pool_backward(draw: Draw) -> tuple[Arg, ...]:
    _x, *rest = _avg_pool(draw)
    out = real_call("aten.avg_pool2d.default", draw.tensors[0], *rest)[0]
    draw.tensors.insert(0, draw.random(*out.shape))
    return (Ref(0), Ref(1), *rest)


def _adaptive_pool(draw: Draw) -> tuple[Arg, ...]:
    return (draw.tensor(*_image(draw)), (2, 1))


def _adaptive_pool_backward(draw: Draw) -> tuple[Arg, ...]:
    n, c, h, w = _image(draw)
    return (draw.tensor(n, c, 2, 1), draw.tensor(n, c, h, w))


def _upsample(*rest: Arg) -> Build:
    return lambda draw: (draw.tensor(*_image(draw)), (7, 6), *rest)


def _upsample_backward(*rest: Arg) -> Build:
    def build(draw: Draw) -> tuple[Arg, ...]:
        n, c, h, w = _image(draw)
        return (draw.tensor(n, c, 7, 6), (7, 6), (n, c, h, w), *rest)

    return build


PRODUCT_CALLS: dict[str, Build] = {
    "aten.mm.default": _mm,
    "aten.bmm.default": _bmm,
    "aten.addmm.default": _addmm,
    "aten.baddbmm.default": _baddbmm,
    "aten.mv.default": _mv,
    "aten.addmv.default": _addmv,
    "aten.dot.default": _dot,
    "aten.linear.default": _linear,
    "aten.convolution.default": _convolution,
    "aten.convolution_backward.default": _convolution_backward,
    "aten._scaled_dot_product_flash_attention_for_cpu.default": _attention,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": _attention_backward,
    "aten.max_pool2d_with_indices.default": _max_pool,
    "aten.max_pool2d_with_indices_backward.default": _max_pool_backward,
    "aten.avg_pool2d.default": _avg_pool,
    "aten.avg_pool2d_backward.default": _avg_pool_backward,
    "aten._adaptive_avg_pool2d.default": _adaptive_pool,
    "aten._adaptive_avg_pool2d_backward.default": _adaptive_pool_backward,
    "aten.upsample_nearest2d.default": _upsample(),
    "aten.upsample_nearest2d_backward.default": _upsample_backward(),
    "aten.upsample_bilinear2d.default": _upsample(False),
    "aten.upsample_bilinear2d_backward.default": _upsample_backward(False),
    "aten.upsample_bicubic2d.default": _upsample(False),
    "aten.upsample_bicubic2d_backward.default": _upsample_backward(False),
}
