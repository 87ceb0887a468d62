"""The page in a real browser: it runs without an error and draws what it should.

Needs Debian's chromium; `test_page.py` checks the same file without one.
"""

from __future__ import annotations

import re
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.report.fixture import make

from lowtide.report.page import render

CHROMIUM = Path("/usr/bin/chromium")
QUIET = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--virtual-time-budget=4000",
    "--enable-logging=stderr",
    "--v=0",
    "--host-resolver-rules=MAP * ~NOTFOUND",
]

pytestmark = pytest.mark.skipif(not CHROMIUM.exists(), reason="no /usr/bin/chromium on this machine")


@dataclass
class Seen:
    dom: str
    console: list[str]


def browse(page: Path, profile: Path, *options: str) -> Seen:
    command = [str(CHROMIUM), *QUIET, f"--user-data-dir={profile}", *options, page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return Seen(done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line])


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    folder = tmp_path_factory.mktemp("page")
    page = folder / "report.html"
    page.write_text(render(make()), encoding="utf-8")
    return browse(page, folder / "profile", "--dump-dom")


def test_the_script_runs_to_its_end_without_a_word_on_the_console(seen: Seen) -> None:
    assert seen.console == []
    assert 'data-ready="true"' in seen.dom


def test_the_pictures_are_in_the_document(seen: Seen) -> None:
    for name in ("eager-line", "plan-line", "limit-line", "staircase"):
        assert re.search(rf'<path[^>]*id="{name}"[^>]*d="M[^"]{{8,}}"', seen.dom), name
    for kind in ("saved", "recomputed", "backward"):
        assert re.search(rf'<path class="block {kind}[^"]*" d="M', seen.dom), kind


def test_the_script_reads_the_plans_peak_at_first(seen: Seen) -> None:
    card = re.search(r'id="read-plan">(.*?)</div>', seen.dom)
    assert card is not None
    data = make()
    assert f"step {data.plan_curve.peak_step + 1} of {len(data.plan_curve.steps)}" in card.group(1)
    assert "118.0 MiB" in card.group(1)
    assert re.search(r'id="read-block"><b>', seen.dom)


def test_what_needs_the_script_is_shown_once_it_runs(seen: Seen) -> None:
    assert not re.search(r'class="[^"]*needs-script[^"]*"[^>]*hidden', seen.dom)


HANDS = """<script>
const plot = document.getElementById("timeline-handle");
const press = (key, where = plot) => where.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
const keep = (name, text) => document.body.append(Object.assign(document.createElement("i"), { id: name, textContent: text }));
const box = () => document.querySelector("#timeline-frame svg").getAttribute("viewBox");
press("Home"); keep("at-home", document.getElementById("read-plan").textContent);
press("ArrowRight"); press("ArrowRight"); keep("two-on", document.getElementById("read-plan").textContent);
press("+"); press("+"); keep("closer-box", box()); press("0"); keep("whole-box", box());
press("End"); keep("at-end", plot.getAttribute("aria-valuetext"));
const frame = document.getElementById("timeline-frame"), r = frame.getBoundingClientRect();
frame.setPointerCapture = () => {};
const mouse = (type, share) => frame.dispatchEvent(new PointerEvent(type,
  { clientX: r.left + share * r.width, clientY: r.top + 9, button: 0, pointerType: "mouse", bubbles: true }));
mouse("pointerdown", 0.25); mouse("pointermove", 0.75); mouse("pointerup", 0.75); keep("dragged-box", box());
press("Escape");
const arena = document.getElementById("arena-handle");
press("Home", arena); press("ArrowDown", arena); keep("low-block", document.getElementById("read-block").textContent);
document.querySelector(".dot").dispatchEvent(new Event("focus")); keep("point", document.getElementById("read-point").textContent);
</script></body>"""  # noqa: E501


def test_keys_and_pointers_read_and_zoom(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text(render(make()).replace("</body>", HANDS), encoding="utf-8")
    seen = browse(page, tmp_path / "profile", "--dump-dom", "--window-size=1200,2000")
    assert seen.console == []

    def kept(name: str) -> str:
        found = re.search(rf'<i id="{name}">(.*?)</i>', seen.dom)
        assert found is not None, name
        return found.group(1)

    assert "step 1 of 123" in kept("at-home") and "step 3 of 123" in kept("two-on")
    start, _, width, _ = (float(number) for number in kept("closer-box").split())
    assert width == 25_000
    assert kept("whole-box") == "0 0 100000 10000"
    assert "Plan, step 123 of 123" in kept("at-end") and "Eager: the step is over" in kept("at-end")
    start, _, width, _ = (float(number) for number in kept("dragged-box").split())
    assert abs(start - 25_000) < 200 and abs(width - 50_000) < 200
    assert "offset 0 B" in kept("low-block")
    assert "predicted" in kept("point")


def test_an_error_in_the_script_would_be_seen(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text(render(make()).replace('find("read-plan")', 'find("gone")'), encoding="utf-8")
    seen = browse(page, tmp_path / "profile", "--dump-dom")
    assert seen.console and "data-ready" not in seen.dom.split("<body>")[0]


@pytest.mark.parametrize("width", [390, 1200])
def test_a_screenshot_is_not_blank(tmp_path: Path, width: int) -> None:
    page, picture = tmp_path / "report.html", tmp_path / "report.png"
    page.write_text(render(make(levels=6, layers=20)), encoding="utf-8")
    seen = browse(page, tmp_path / "profile", f"--screenshot={picture}", f"--window-size={width},1600")
    assert seen.console == []
    header = picture.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", header[16:24])[1] == 1600
    assert picture.stat().st_size > 60_000  # a blank page of this size is a few kilobytes
