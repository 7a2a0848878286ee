"""Whether the local page fits its window: the most pixels by which it is too wide, with 1, 8 and 20 pods on four pGPUs.

    python bench/page_widths.py                    # half a minute; writes page_width_overflow_px
    python bench/page_widths.py --pictures FOLDER  # also keeps a PNG of each width and theme

It needs Chromium and its driver (apt install chromium chromium-driver).
"""

from __future__ import annotations

import argparse
import base64
import sys
import tempfile
from pathlib import Path
from typing import Any

import host_figures

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.browser import chromium  # noqa: E402
from tests.web.crowd import SCREENS, crowd, overflow_px, page, show  # noqa: E402

FILE = ROOT / "docs" / "results" / "operator.json"
_PODS = (1, 8, 20)


def main() -> None:
    """Measure and print; keep the figure unless told not to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=Path, help="folder for a PNG of each page")
    parser.add_argument("--dry", action="store_true", help="do not write docs/results/operator.json")
    options = parser.parse_args()
    worst = 0
    with tempfile.TemporaryDirectory(prefix="qgpu-page-") as directory, chromium(Path(directory)) as browser:
        for pods in _PODS:
            with crowd(Path(directory, str(pods)), pods) as daemon, page(daemon) as url:
                for width in SCREENS:
                    for theme in ("light", "dark"):
                        show(browser, url, width, pods, theme)
                        worst = max(worst, found := overflow_px(browser))
                        print(f"{pods} pods, {width} px, {theme}: {found} px too wide")
                        if options.pictures:
                            _keep(browser, options.pictures / f"page-{pods}-{width}-{theme}.png")
    if not options.dry:
        figures = {"page_width_overflow_px": worst}
        host_figures.keep("python bench/page_widths.py", "Chromium, simulated pGPUs", figures, FILE)


def _keep(browser: Any, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    shot = browser.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True})
    file.write_bytes(base64.b64decode(shot["data"]))


if __name__ == "__main__":
    main()
