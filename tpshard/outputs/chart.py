"""Inline SVG: errors of blocks against their gates on a log axis, and bytes by rank. No script, no reference out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from ..report import size
from .blocks import Block, number
from .files import legal

_PLOT, _LEAST_LEFT, _RIGHT, _TOP = 220.0, 62.0, 18.0, 14.0
_LETTER, _TURN = 6.0, math.radians(32)  # width of a letter of a label in pixels, and how far labels are turned
_LONGEST = 60  # letters of a label; the whole name is in the tooltip and the table
_LEAST, _NARROWEST = 1024.0, 9.0  # of the chart, and of a block in it: beyond, the chart scrolls


def text(value: str) -> str:
    """Any text, fit to stand in HTML."""
    return escape(legal(value), quote=True)


def errors_chart(blocks: Sequence[Block], title: str) -> str:
    """Every block's worst error, teacher forced (dot) and free running (ring), under its gate (line)."""
    names = [_short(block.name) for block in blocks]
    longest = max(map(len, names), default=0) * _LETTER
    margin = max(_LEAST_LEFT, longest * math.cos(_TURN) + 4)  # the first label runs to the left of its block
    width = max(_LEAST, margin + _RIGHT + _NARROWEST * len(blocks))
    step = (width - margin - _RIGHT) / max(1, len(blocks))
    low, high = _decades(blocks)
    bottom = _TOP + _PLOT
    height = bottom + 30 + longest * math.sin(_TURN)

    def y(value: float) -> float:
        if math.isnan(value) or value == math.inf:
            return _TOP
        at = math.log10(value) if value > 0 else low
        return bottom - (min(max(at, low), high) - low) / (high - low) * (bottom - _TOP)

    out = [
        f'<svg class="chart" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}" '
        f'role="img" aria-label="{text(title)}"><title>{text(title)}</title>'
    ]
    every = math.ceil((high - low) / 10)
    for decade in range(math.ceil(low), math.floor(high) + 1):
        if (decade - math.floor(high)) % every == 0:
            at = y(10.0**decade)
            out.append(f'<line class="grid" x1="{margin:.0f}" x2="{width - _RIGHT:.0f}" y1="{at:.1f}" y2="{at:.1f}"/>')
            out.append(
                f'<text class="tick" x="{margin - 10:.0f}" y="{at + 4:.1f}" text-anchor="end">10'
                f'<tspan dy="-5" class="power">{str(decade).replace("-", "−")}</tspan></text>'
            )
    if any(value == 0 for block in blocks for value in (block.worst.error, block.free)):
        out.append(f'<text class="tick" x="{margin - 10:.0f}" y="{bottom + 4:.1f}" text-anchor="end">0</text>')
    labels = max(1, math.ceil(26 / step))
    for number_, block in enumerate(blocks):
        left, middle = margin + step * number_, margin + step * (number_ + 0.5)
        top = block.worst
        gate = y(top.gate)
        out.append(f'<line class="gate" x1="{left:.1f}" x2="{left + step:.1f}" y1="{gate:.1f}" y2="{gate:.1f}"/>')
        out.append(f'<g class="{block.status}"><title>{text(_tooltip(block))}</title>')
        out.append(f'<rect class="hit" x="{left:.1f}" y="{_TOP:.0f}" width="{step:.1f}" height="{bottom - _TOP:.1f}"/>')
        ends = f'x1="{middle:.1f}" x2="{middle:.1f}"'
        out.append(f'<line class="stem" {ends} y1="{y(top.error):.1f}" y2="{bottom:.1f}"/>')
        if block.free is not None:
            out.append(f'<circle class="free" cx="{middle:.1f}" cy="{y(block.free):.1f}" r="4.2"/>')
        out.append(_mark(block.status, middle, y(top.error)))
        out.append("</g>")
        if number_ % labels == 0:
            out.append(
                f'<text class="name" text-anchor="end" transform="translate({middle + 4:.1f} {bottom + 13:.0f}) '
                f'rotate(-32)">{text(names[number_])}</text>'
            )
    ends = f'x1="{margin:.0f}" x2="{width - _RIGHT:.0f}"'
    out.append(f'<line class="axis" {ends} y1="{bottom:.1f}" y2="{bottom:.1f}"/></svg>')
    return "\n".join(out)


def _decades(blocks: Sequence[Block]) -> tuple[float, float]:
    values = [value for b in blocks for value in (b.worst.error, b.worst.gate, b.free) if value is not None]
    exponents = [math.log10(value) for value in values if value > 0 and math.isfinite(value)] or [-16.0, 0.0]
    low = min(max(-20.0, math.floor(min(exponents)) - 0.5), 16.0)
    return low, max(min(math.ceil(max(exponents)) + 0.5, 20.0), low + 3)


def _mark(status: str, x: float, y: float) -> str:
    """A dot for what passed; a cross and a triangle for what failed and drifted, so that colour is not all."""
    if status == "fail":
        return f'<path class="forced" d="M{x - 5:.1f} {y - 5:.1f}l10 10m0 -10l-10 10"/>'
    if status == "drift":
        return f'<path class="forced" d="M{x:.1f} {y - 6:.1f}l6 10h-12z"/>'
    return f'<circle class="forced" cx="{x:.1f}" cy="{y:.1f}" r="3.6"/>'


def _tooltip(block: Block) -> str:
    top = block.worst
    rank = "" if top.rank is None else f" on rank {top.rank}"
    free = "" if block.free is None else f", free running {number(block.free)}"
    return f"{block.name}: {block.status}. {top.point}{rank} {number(top.error)}{free}, gate {number(top.gate)}"


def _short(name: str) -> str:
    """A module path without the beginning that all layers share: ``3.self_attn``, ``layer 3``."""
    name = name.removeprefix("model.").removeprefix("layers.")
    if name.isdigit():
        return f"layer {name}"
    half = _LONGEST // 2
    return name if len(name) <= _LONGEST else f"{name[:half]}…{name[-half:]}"


def ranks_chart(sizes: Sequence[int], title: str) -> str:
    """A column a rank from zero up, so that unequal ranks look as unequal as they are."""
    count, high = len(sizes), max(sizes) or 1
    step = min(96.0, max(12.0, 1000.0 / count))
    width, height, bottom = 16 + step * count, 190.0, 160.0
    out = [
        f'<svg class="chart" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}" '
        f'role="img" aria-label="{text(title)}"><title>{text(title)}</title>'
    ]
    every = max(1, math.ceil(20 / step))
    for rank, nbytes in enumerate(sizes):
        x, tall = 8 + step * rank, (bottom - 26) * nbytes / high
        out.append(f"<g><title>rank {rank}: {nbytes:,} bytes</title>")
        out.append(
            f'<rect class="bar" x="{x + step * 0.12:.1f}" y="{bottom - tall:.1f}" width="{step * 0.76:.1f}" '
            f'height="{tall:.1f}" rx="{min(4.0, tall / 2):.1f}"/>'
        )
        if step >= 80:
            at = f'x="{x + step / 2:.1f}" y="{bottom - tall - 7:.1f}"'
            out.append(f'<text class="value" {at} text-anchor="middle">{size(nbytes)}</text>')
        if rank % every == 0:
            at = f'x="{x + step / 2:.1f}" y="{bottom + 18:.0f}"'
            out.append(f'<text class="tick" {at} text-anchor="middle">{rank}</text>')
        out.append("</g>")
    out.append(f'<line class="axis" x1="8" x2="{width - 8:.0f}" y1="{bottom:.0f}" y2="{bottom:.0f}"/></svg>')
    return "\n".join(out)
