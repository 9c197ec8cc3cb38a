"""The report in a real browser: narrow and wide, with and without scripts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from dist_sparse.extras.report.folder import LINES
from dist_sparse.extras.report.run import read_run
from dist_sparse.extras.report.summary import numbers
from dist_sparse.extras.report.writing import write_report
from tests.browser import Browser, chromium, opened
from tests.extras.report.folders import HOSTILE, write_many

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(
        chromium() is None,
        reason="NO CHROMIUM: the report was not looked at in a browser (apt-get install chromium)",
    ),
]

OUTSIDE = """
[...document.querySelectorAll("body *")].filter((node) => {
  const box = node.getBoundingClientRect();
  return box.width && !node.closest(".scroll > *") && (box.right > innerWidth + 1 || box.left < -1);
}).map((node) => node.outerHTML.slice(0, 90))
"""


ALL = '[aria-label="Tables of run"]'

# Pixels of the smallest text of a chart, and tables whose cut edges have no shade.
SMALLEST = """
Math.min(...[...document.querySelectorAll("figure svg")].map((svg) =>
  Math.min(...[...svg.querySelectorAll("text")].map((text) =>
    parseFloat(getComputedStyle(text).fontSize) * svg.getScreenCTM().a))))
"""
CUT = """
[...document.querySelectorAll(".scroll")].filter((box) => box.scrollWidth > box.clientWidth)
  .map((box) => getComputedStyle(box).backgroundImage.split("linear-gradient").length - 1)
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with opened(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of 40 tables, one with a hostile name, one with a long one."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    write_many(folder, tables=40, due=5, steps=300)
    write_many(folder / "dense", tables=1, due=0, steps=300, ends=False)
    text = (folder / LINES).read_text().replace('"table_39"', json.dumps(HOSTILE))
    (folder / LINES).write_text(text.replace('"table_38"', json.dumps("a_long_name_" * 20)))
    return write_report(folder)


@pytest.mark.parametrize("width", [360, 1280, 1600])
def test_it_can_be_read(browser: Browser, report: Path, width: int) -> None:
    browser.open(report, width)
    found = numbers(read_run(report.parent))
    assert browser.value("document.getElementById('head-sparsity').innerText") == "50.0%"
    assert (
        float(browser.value("document.getElementById('head-bytes').dataset.value"))
        == found["bytes_kept"]
    )
    box = browser.value(
        "(({x, width, height}) => [x, width,"
        " height])(document.querySelector('figure svg').getBoundingClientRect())"
    )
    assert box[0] >= 0 and box[0] + box[1] <= width and box[1] > 250 and box[2] > 150
    assert browser.value(
        "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
    ), "page scrolls"
    assert browser.value(OUTSIDE) == []
    assert browser.low_contrasts() == []
    assert browser.requested == [report.resolve().as_uri()], "the page asks for something"
    assert browser.value("window.hacked") is None


def test_charts_and_cut_tables_on_a_phone(browser: Browser, report: Path) -> None:
    browser.open(report, 390)
    assert browser.value(SMALLEST) >= 11
    shades = browser.value(CUT)
    assert shades and {*shades} == {4}


def test_nothing_is_cut_off_on_paper(browser: Browser, report: Path) -> None:
    browser.open(report, 720, paper=True)
    assert browser.value(
        "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
    )
    assert browser.value("document.querySelectorAll('.filter')[0].checkVisibility()") is False


def test_without_scripts_all_is_there(browser: Browser, report: Path) -> None:
    browser.open(report, 1280, script=False)
    assert browser.value("document.getElementById('head-sparsity').innerText") == "50.0%"
    assert browser.value("document.querySelectorAll('th button').length") == 0
    assert browser.value(f"document.querySelectorAll('{ALL} tbody tr').length") == 40


def test_tables_sort(browser: Browser, report: Path) -> None:
    browser.open(report, 1280)
    head = (
        f"[...document.querySelectorAll('{ALL} button')].find((button) => button.innerText.trim()"
        " === 'blocks')"
    )
    rows = (
        f"[...document.querySelectorAll('{ALL} tbody tr')].map((row) =>"
        " +row.cells[6].dataset.value)"
    )
    assert browser.value(rows) == [1000 + i for i in reversed(range(40))]
    for sort, expected in (("descending", range(39, -1, -1)), ("ascending", range(40))):
        browser.value(f"{head}.scrollIntoView({{block: 'center'}})")
        box = browser.value(f"(({{x, y}}) => [x, y])({head}.getBoundingClientRect())")
        browser.point(box[0] + 3, box[1] + 3, click=True)
        assert browser.value(f"{head}.parentNode.ariaSort") == sort
        assert browser.value(rows) == [1000 + i for i in expected]


def test_a_filter_leaves_the_tables_of_that_name(browser: Browser, report: Path) -> None:
    browser.open(report, 390)
    assert browser.value("document.querySelectorAll('.filter').length") == 1
    shown = (
        f"[...document.querySelectorAll('{ALL} tbody tr')].filter((row) =>"
        " row.checkVisibility()).length"
    )
    assert browser.value(shown) == 40
    browser.value(
        "(box => {box.value = 'TABLE_1'; box.dispatchEvent(new"
        " Event('input'))})(document.querySelector('.filter'))"
    )
    assert browser.value(shown) == 11, "table_1 and table_10 to table_19"
