"""The page in headless Chromium, where one is installed: it is clicked through, and nothing runs over."""

import html
import json
import re
import shutil
import subprocess

import pytest

from pl_privknn.callbacks.loggers import MOST_TESTED
from pl_privknn.report import write_report
from tests.report.report_setup import QUERIES, small_run

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (apt-get install chromium)")

# A frame of its own has the width that is asked for, whatever the smallest window is.
FRAME = """<!doctype html><meta charset="utf-8"><body><pre id="found"></pre><script>
const widths = [390, 1280], found = [];
const page = %s;
function visit(width) {
  return new Promise(done => {
    const frame = document.createElement("iframe");
    frame.style.cssText = `width:${width}px;height:900px;border:0`;
    frame.srcdoc = page;
    frame.onload = () => {
      const inside = frame.contentDocument;
      const counts = [...inside.querySelectorAll("[data-filter]")].map(button => {
        button.click();
        const items = [...inside.querySelectorAll("#answers .gallery li")];
        const shown = items.filter(item => item.offsetParent !== null).length;
        return [button.dataset.filter, shown];
      });
      inside.querySelector("[data-filter=all]").click();
      for (const one of inside.querySelectorAll("summary")) one.click();
      const over = [...inside.querySelectorAll("body *")].filter(item =>
        !item.closest(".scroll, nav, pre, svg") && item.getBoundingClientRect().right > width + 0.5
      ).map(item => item.outerHTML.slice(0, 80));
      const root = inside.documentElement;
      const links = [...inside.querySelectorAll("nav a")].filter(a => !inside.querySelector(a.getAttribute("href")));
      found.push({
        width, counts, over, scroll: root.scrollWidth, client: root.clientWidth, dead: links.length,
        open: [...inside.querySelectorAll("details")].filter(one => one.open).length,
        ground: getComputedStyle(inside.body).backgroundColor,
        pictures: [...inside.images].filter(image => image.naturalWidth > 0).length,
        letters: Math.min(
          ...[...inside.querySelectorAll("svg text")].map(text => text.getBoundingClientRect().height)
        ),
      });
      done();
    };
    document.body.append(frame);
  });
}
(async () => {
  for (const width of widths) await visit(width);
  document.getElementById("found").textContent = JSON.stringify(found);
})();
</script>"""


@pytest.mark.parametrize(("scheme", "ground"), [(1, "rgb(255, 255, 255)"), (0, "rgb(20, 24, 29)")])
def test_the_page_can_be_clicked_through_on_a_phone_and_a_wide_screen(tmp_path_factory, scheme, ground):
    folder = tmp_path_factory.getbasetemp() / "browser-run"
    if not folder.exists():
        small_run(folder)
    page = write_report(folder, exact=False).read_text(encoding="utf-8")
    frame = folder.parent / "frame.html"
    frame.write_text(FRAME % json.dumps(page).replace("</", "<\\/"), encoding="utf-8")
    shown = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1400,1000",
         f"--blink-settings=preferredColorScheme={scheme}", f"--user-data-dir={folder.parent / 'profile'}",
         "--virtual-time-budget=20000", "--dump-dom", frame.as_uri()],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    found = json.loads(
        html.unescape(re.search(r'<pre id="found">(.+?)</pre>', shown.stdout, re.DOTALL).group(1))
    )
    assert [one["width"] for one in found] == [390, 1280]
    for one in found:
        assert one["over"] == []
        assert one["scroll"] <= one["client"]
        assert one["ground"] == ground
        assert one["dead"] == 0
        assert one["open"] >= 2
        assert 2 * QUERIES < one["pictures"] <= 2 * QUERIES + MOST_TESTED
        assert one["letters"] >= 9  # pixels, also where a chart is as narrow as a phone
        counts = dict(one["counts"])
        assert counts["all"] == 2 * QUERIES > counts["wrong"] > 0
