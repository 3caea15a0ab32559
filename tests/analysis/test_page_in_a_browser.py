"""The page in a real browser, wide and narrow: nothing is cut, nothing scrolls sideways, every picture is there."""

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from forgetting_transformer.analysis.page import write_report
from tests.analysis.test_page import results, runs  # noqa: F401 (a fixture)

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="no chromium, chromium-browser or google-chrome on this machine"
)

#: Puts the page into a frame of a given width, opens all that is folded away, and writes down what came of it.
MEASURE = """<!DOCTYPE html><meta charset="utf-8"><iframe style="border: 0; height: 900px"></iframe><pre></pre><script>
const frame = document.querySelector("iframe");
frame.style.width = WIDTH + "px";
frame.onload = () => {
  const page = frame.contentDocument;
  page.querySelectorAll("details").forEach(one => one.open = true);
  const pictures = [...page.images], shown = box => box.width > 0;
  const inside = one => { const box = one.getBoundingClientRect(); return box.left >= 0 && box.right <= WIDTH + 0.5; };
  const start = one => one.outerHTML.slice(0, 80);
  const cut = one => one.scrollWidth > one.clientWidth + 1 && shown(one.getBoundingClientRect());
  document.querySelector("pre").textContent = JSON.stringify({
    width: page.documentElement.scrollWidth,
    outside: [...page.querySelectorAll("table, td, th, img, p, h1, h2")].filter(one => !inside(one)).map(start),
    cut: [...page.querySelectorAll("table, td, th")].filter(cut).map(start),
    pictures: pictures.length,
    broken: pictures.filter(one => !one.naturalWidth).map(one => one.alt),
    font: parseFloat(page.defaultView.getComputedStyle(page.querySelector("td")).fontSize),
  });
};
frame.srcdoc = PAGE;
</script>"""


def measure(page: Path, width: int, folder: Path) -> dict:
    """What a browser makes of a page in a window of this width, in pixels."""
    host = folder / f"host{width}.html"
    script = MEASURE.replace("WIDTH", str(width)).replace("PAGE", json.dumps(page.read_text()).replace("</", "<\\/"))
    host.write_text(script)
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--dump-dom"]
    command += [f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=60000", host.as_uri()]
    environment = {**os.environ, "HOME": str(folder)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    found = re.search(r"<pre>(.+?)</pre>", done.stdout, re.DOTALL)
    assert found, f"the browser measured nothing: {done.stdout[-300:]} {done.stderr[-2000:]}"
    return json.loads(html.unescape(found[1]))


@pytest.fixture
def page(runs, tmp_path):  # noqa: F811
    """With everything that a page can have, and names that do not break by themselves."""
    found = results(tmp_path / "results")
    (found / "gates/gates.png").unlink()  # no picture, only bytes that the page takes as it finds them
    named = tmp_path / ("a_name_without_a_single_space_" * 4)
    runs[1].rename(named)
    write_report([runs[0], named], [found], tmp_path / "page.html")
    return tmp_path / "page.html"


def test_nothing_is_cut_or_scrolls_sideways_and_every_picture_is_shown(page, tmp_path):
    for width in (1300, 600, 390):
        seen = measure(page, width, tmp_path)
        assert seen["width"] <= width, f"the page of {width} pixels scrolls sideways"
        assert seen["outside"] == [] and seen["cut"] == [], f"at {width} pixels"
        assert seen["pictures"] >= 8 and seen["broken"] == []
        assert seen["font"] >= 12


def test_what_is_too_wide_is_seen_by_the_measurement(tmp_path):
    wide = "<table style='width: 900px'><tr><td>wide</td></tr></table><img alt='gone' src='data:image/png;base64,AA=='>"
    (tmp_path / "wide.html").write_text(f"<!DOCTYPE html><body>{wide}</body>")
    seen = measure(tmp_path / "wide.html", 600, tmp_path)
    assert seen["width"] > 600 and seen["outside"] and seen["broken"] == ["gone"]
