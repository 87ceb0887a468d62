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
