"""Makes the pictures of docs/reading_a_report.md: the timelines of its two reports, from the code of the page, and that
of a model of 1,000 layers.

    python benchmarks/report_pictures.py

Needs playwright and a Chromium (CHROMIUM=/path/to/it names one). Nothing in the pictures is measured: they show what
the cost model predicts.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
import types
from pathlib import Path

import torch
from playwright.sync_api import sync_playwright
from torch import nn

from graph_fsdp.planning import plan

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "reading_a_report.md"
_PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PICTURES = {"report_before.png": "report", "report_after.png": "mended"}  # file → the page's name for the report
_WIDTH, _HEIGHT = 1100, 900


def reports(folder: Path) -> dict[str, Path]:
    """Reports as HTML: picture → file."""
    module = types.ModuleType("reading_a_report")  # Dynamo imports a model's module by name
    sys.modules[module.__name__] = module
    os.chdir(folder)  # where the page's code writes
    for code in _PYTHON.findall(PAGE.read_text()):
        exec(compile(code, str(PAGE), "exec"), vars(module))
    files = {}
    for picture, name in _PICTURES.items():
        files[picture] = folder / f"{name}.html"
        getattr(module, name).save(files[picture])
    files["report_1000_layers.png"] = folder / "layers.html"
    plan(
        lambda: nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(1000))),
        (torch.ones(1024, 1024, device="meta"),),
        mesh_shape=(8,),
        hardware="h100",
        loss=torch.sum,
        auto_wrap_policy={nn.Linear},
    ).save(files["report_1000_layers.png"])
    return files


def main() -> None:
    names = ("chromium", "chromium-browser", "google-chrome")
    browser = next(filter(None, [os.environ.get("CHROMIUM"), *map(shutil.which, names)]), None)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        for picture, file in reports(Path(folder)).items():
            page = opened.new_page(viewport={"width": _WIDTH, "height": _HEIGHT}, color_scheme="light")
            page.goto(file.as_uri())
            page.wait_for_selector("#stages button")
            page.wait_for_timeout(300)  # for the frame that is painted after layout
            page.locator("#timeline-section").screenshot(path=DOCS / "images" / picture)
        opened.close()


if __name__ == "__main__":
    main()
