"""Widths of the built site in Chromium: ``python tests/measure_pages.py SITE [--pictures FOLDER]``.

Every page at 1280 and at 390 pixels: prints what is wider than the window and, at 1280, code that is wider
than its box; the exit code is then 1. With a folder, pictures of every page in the light and in the dark
scheme. Needs Qt's WebEngine (``pip install PySide6-Addons==6.8.1``), too large for the tests' environment.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

WINDOWS = (1280, 900), (390, 1400)
MEASURE = """(function () {
  const width = document.documentElement.clientWidth, found = [];
  const text = e => e.tagName.toLowerCase() + ': ' + e.textContent.trim().slice(0, 60);
  function scrolls(e) {
    for (; e && e !== document.body; e = e.parentElement)
      if (getComputedStyle(e).overflowX !== 'visible') return true;
    return false;
  }
  for (const e of document.querySelectorAll('body *')) {
    const box = e.getBoundingClientRect();
    if (box.width && box.right > width + 1 && !scrolls(e)) found.push('wider than the window, ' + text(e));
  }
  for (const e of width > 1000 ? document.querySelectorAll('pre > code') : []) {
    const excess = e.scrollWidth - e.clientWidth;
    if (excess > 1) found.push('wider than its box by ' + excess + ', ' + text(e));
  }
  return JSON.stringify(found);
})()"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("site", type=Path, help="folder of the built site")
    parser.add_argument("--pictures", type=Path, help="existing folder for pictures")
    arguments = parser.parse_args()
    os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
    os.environ.setdefault("QTWEBENGINE_CHROMIUM_FLAGS", "--no-sandbox --disable-gpu")
    from PySide6.QtCore import QUrl
    from PySide6.QtWebEngineWidgets import QWebEngineView
    from PySide6.QtWidgets import QApplication

    application = QApplication(sys.argv[:1])
    view, count = QWebEngineView(), 0
    view.show()

    def load(page: Path, done: Callable[[Any], None]) -> None:
        view.loadFinished.connect(done)
        view.load(QUrl.fromLocalFile(str(page.resolve())))

    def pictures(page: Path, name: str) -> None:
        for scheme in ("default", "slate"):
            view.page().runJavaScript(f"document.body.setAttribute('data-md-color-scheme', '{scheme}')")
            result_of(lambda done: None, 500)  # until it is drawn
            view.grab().save(str(arguments.pictures / f"{name.replace('/', '-')}-{scheme}.png"))

    for width, height in WINDOWS:
        view.resize(width, height)
        for page in sorted(arguments.site.rglob("*.html")):
            result_of(lambda done, page=page: load(page, done))
            view.loadFinished.disconnect()
            result_of(lambda done: None, 200)  # until it is laid out
            found = json.loads(result_of(lambda done: view.page().runJavaScript(MEASURE, done)))
            name = f"{page.relative_to(arguments.site)}"
            for what in found:
                print(f"{name} at {width}: {what!r}", flush=True)
            count += len(found)
            if arguments.pictures:
                pictures(page, f"{name}-{width}")
    del application
    return 1 if count else 0


def result_of(begin: Callable[[Callable[[Any], None]], None], milliseconds: int = 20_000) -> Any:
    """What ``begin`` gives to the function that it is called with, within the time; else None."""
    from PySide6.QtCore import QEventLoop, QTimer

    loop, results = QEventLoop(), []

    def done(result: Any) -> None:
        results.append(result)
        loop.quit()

    begin(done)
    QTimer.singleShot(milliseconds, loop.quit)
    loop.exec()
    return results[0] if results else None


if __name__ == "__main__":
    sys.exit(main())
