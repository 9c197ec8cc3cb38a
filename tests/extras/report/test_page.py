"""Content of the page: the numbers of the run, nothing from outside, and no markup from the log."""

from __future__ import annotations

import json
import re
import sys
import xml.dom.minidom
from html.parser import HTMLParser
from pathlib import Path

import pytest

from dist_sparse.cli.main import main
from dist_sparse.extras.report import RunLog
from dist_sparse.extras.report.charts import charts
from dist_sparse.extras.report.drawing import svg_of
from dist_sparse.extras.report.folder import LINES, RUN
from dist_sparse.extras.report.page import page
from dist_sparse.extras.report.run import Run, read_run
from dist_sparse.extras.report.words import amount
from dist_sparse.extras.report.writing import write_report
from dist_sparse.text import duration, number_of, percent, size
from tests.extras.report.folders import DRIVING, HOSTILE, edit, full_disk, write_many
from tests.extras.report.test_run_log import train

VOID = {"meta", "img", "br", "link", "hr"}


class Page(HTMLParser):
    """Parsed page; fails if elements are not nested."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.words.append(data)

    def heading(self, key: str) -> str | None:
        return next(
            attrs["data-value"] for _, attrs in self.tags if attrs.get("id") == f"head-{key}"
        )


def page_of(run: Run) -> str:
    return page(run, charts(run))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    train(tmp_path / "run", config={"lr": 0.1})
    with RunLog(tmp_path / "run" / "dense") as log:
        for step in range(9):
            log.step(step, loss=9.0 - step)
    return tmp_path / "run"


def test_the_page_says_what_the_run_did(folder: Path) -> None:
    run = read_run(folder)
    shown = Page(page_of(run))
    assert shown.heading("sparsity") == "0.5" and shown.heading("bytes") == "160"
    assert shown.heading("loss") == repr(run.last("loss"))
    titles = {attrs.get("id") for tag, attrs in shown.tags if tag == "figure"}
    assert titles == {
        "sparsity",
        "value_loss",
        "value_loss_less",
        "value_auc",
        "bytes",
    }
    text = " ".join(shown.words)
    for said in ("50.0%", "160 B", "dense", "The run ended at step 8.", '"lr": 0.1', "20 x 4"):
        assert said in text


def test_the_page_needs_nothing_else(folder: Path) -> None:
    text = page_of(read_run(folder))
    # Names of formats, which nothing is loaded from.
    alone = re.sub(r' xmlns(:xlink)?="http://www.w3.org/[^"]*"', "", text)
    assert not re.search(r"https?:|@import|url\((?!#)", alone)
    for tag, attrs in Page(text).tags:
        assert not {"src", "href", "srcset", "onclick", "onerror", "onload"} & set(attrs), (
            tag,
            attrs,
        )
        assert tag not in ("img", "link", "iframe", "object", "embed", "base")


def test_what_charts_hold(folder: Path) -> None:
    found = {chart.key: chart for chart in charts(read_run(folder))}
    sparsity, loss = found["sparsity"], found["value_loss"]
    assert [line.role for line in sparsity.lines] == ["main", "target"]
    assert sparsity.lines[0].points[-1] == sparsity.lines[1].points[-1] == (8, 0.5)
    assert {line.name for line in loss.lines} == {"run", "dense"}


def test_names_from_the_log_are_text(folder: Path) -> None:
    def rename(line: dict[str, object]) -> dict[str, object]:
        text = json.dumps(line)
        name = read_run(folder).tables[0].name
        return dict(
            json.loads(
                text.replace(json.dumps(name), json.dumps(HOSTILE)).replace(
                    '"auc"', json.dumps(HOSTILE)
                )
            )
        )

    lines = [rename(json.loads(line)) for line in (folder / LINES).read_text().splitlines()]
    (folder / LINES).write_text("".join(json.dumps(line) + "\n" for line in lines))
    about = json.loads((folder / RUN).read_text())
    about |= {"started": HOSTILE, "versions": {HOSTILE: HOSTILE}, "config": {HOSTILE: [HOSTILE]}}
    (folder / RUN).write_text(json.dumps(about))
    (folder / "dense").rename(folder / "<b>dense")
    text = page_of(read_run(folder))
    shown = Page(text)
    assert text.count("<script>") == 1 and "<img" not in text and "<b>dense" not in text
    assert HOSTILE in "".join(shown.words) and not any(
        "onerror" in attrs for _, attrs in shown.tags
    )
    assert all(
        re.fullmatch(r"[\w.-]+", attrs["id"] or "") for _, attrs in shown.tags if "id" in attrs
    )
    assert write_report(folder, svg=folder / "svg").exists()
    for file in (folder / "svg").iterdir():
        assert re.fullmatch(r"[\w-]+\.svg", file.name)
        drawn = xml.dom.minidom.parse(str(file))
        assert not drawn.getElementsByTagName("script") and not drawn.getElementsByTagName("img")


def test_names_drive_and_turn_nothing(folder: Path) -> None:
    def rename(line: dict[str, object]) -> dict[str, object]:
        name = json.dumps(read_run(folder).tables[0].name)
        return dict(
            json.loads(
                json.dumps(line)
                .replace(name, json.dumps(DRIVING))
                .replace('"auc"', json.dumps(DRIVING))
            )
        )

    lines = [rename(json.loads(line)) for line in (folder / LINES).read_text().splitlines()]
    (folder / LINES).write_text("".join(json.dumps(line) + "\n" for line in lines))
    about = json.loads((folder / RUN).read_text()) | {"config": {DRIVING: [DRIVING]}}
    (folder / RUN).write_text(json.dumps(about))
    text = write_report(folder, svg=folder / "svg").read_text()
    for written in (text, *(file.read_text() for file in (folder / "svg").iterdir())):
        assert not {c for c in written if not c.isprintable()} - {"\n"}
    assert "fake row\\x9b31m\\u202etxt" in text and "\nfake row" not in text


def test_a_run_that_has_not_ended_is_shown_as_far_as_it_went(folder: Path) -> None:
    lines = (folder / LINES).read_text().splitlines(keepends=True)
    for kept in range(len(lines)):
        (folder / LINES).write_text("".join(lines[:kept]))
        text = page_of(read_run(folder))
        assert 'class="warn"' in text and Page(text)
    assert 'id="bytes"' not in text and "failed or still runs" in text


def test_values_that_are_not_finite_are_gaps(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        for step in range(5):
            log.step(
                step, loss=float("nan") if step == 2 else 1.0 * step, flat=3, lost=float("inf")
            )
    text = page_of(read_run(tmp_path))
    assert (
        "Not finite at 1 of these steps, first at step 2." in text and 'id="value_1_flat"' in text
    )
    figures = {chart.key: chart for chart in charts(read_run(tmp_path))}
    assert [y for _, y in figures["value_loss"].lines[0].points] == [0, 1, None, 3, 4]
    assert "value_lost" not in figures, "nothing could be drawn"


def test_many_tables_and_many_steps(tmp_path: Path) -> None:
    write_many(tmp_path / "run", tables=1000, due=3, steps=20_000)
    text = page_of(read_run(tmp_path / "run"))
    shown = Page(text)
    assert len(text) < 1_500_000
    found = charts(read_run(tmp_path / "run"))
    for chart in found:
        assert len(chart.lines) <= 33, chart.key
    bars = next(chart for chart in found if chart.key == "bytes")
    assert len(bars.bars) == 30 and bars.bars[0].name == "table_999"
    assert "The first 30 of 1,000" in bars.note
    sparsity = next(chart for chart in found if chart.key == "sparsity")
    assert {line.role for line in sparsity.lines} == {"main", "target"}
    assert 'data-filter="Filter 1,000 tables by name"' in text
    assert sum(tag == "tr" for tag, _ in shown.tags) == 2 + 1 + 1000


def test_a_long_line_is_drawn_with_few_points_and_its_peak(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        for step in range(5000):
            log.step(step, loss=100.0 if step == 3333 else 1.0 + step % 2)
    loss = next(chart for chart in charts(read_run(tmp_path)) if chart.key == "value_loss")
    drawn = svg_of(loss)
    raw = max(re.findall(r' d="([^"]*)"', drawn), key=len)
    heights = [float(point.split()[-1]) for point in raw.strip().splitlines()]
    assert len(heights) < 2500 and ">100</text>" in drawn
    # From the top: the peak is far above the rest.
    assert min(heights) < 0.2 * max(heights)


def test_files(folder: Path, tmp_path: Path) -> None:
    out = write_report(folder, tmp_path / "elsewhere" / "r.html")
    assert out.read_text() == page_of(read_run(folder))
    assert not list(tmp_path.rglob("*.svg"))
    assert write_report(folder, svg=tmp_path / "svg") == folder / "report.html"
    assert {file.name for file in (tmp_path / "svg").iterdir()} == {
        f"{c.key}.svg" for c in charts(read_run(folder))
    }


def test_a_chart_as_a_file_can_be_read_alone(folder: Path) -> None:
    """Well-formed, the same each time, and with its title and numbers as text."""
    for chart in charts(read_run(folder)):
        assert svg_of(chart) == svg_of(chart)
        drawn = xml.dom.minidom.parseString(svg_of(chart)).documentElement
        assert drawn.tagName == "svg"
        for node in drawn.getElementsByTagName("*"):
            assert node.getAttribute("xlink:href")[:1] in ("", "#")
        words = [node.firstChild.data for node in drawn.getElementsByTagName("text")]
        assert {chart.title, *(f"{bar.name}: {bar.text}" for bar in chart.bars)} <= {*words}
        named = [line for line in chart.lines if line.role != "raw"]
        if len(named) > 1:
            for line in named:
                assert any(word.startswith(f"{line.name}: ") for word in words)


@pytest.mark.parametrize("name", ["jinja2", "matplotlib"])
def test_without_a_package_the_command_says_how_to_install_it(
    name: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for module in ("drawing", "page"):
        monkeypatch.delitem(sys.modules, f"dist_sparse.extras.report.{module}", raising=False)
    monkeypatch.setitem(sys.modules, name, None)
    assert main(["report", str(folder)]) == 1
    why = f"needs {name}, which is not installed: pip install jinja2 matplotlib"
    assert " ".join(capsys.readouterr().err.split()) == f"dist-sparse report: {why}"
    assert main(["inspect", str(folder)]) == 0 and not list(folder.glob("report*"))


def test_the_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(folder)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("run keeps 50.0% of table bytes (160 B of 320 B) at 0.5000 AUC; ")
    # The address is whole, on the line or below it: that depends on the folder's name.
    assert said.split()[-2:] == ["report:", (folder / "report.html").as_uri()]
    assert main(["report", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bytes_kept"] == 160
    edit(folder, lambda line: line | {"kind": "other"})
    before = (folder / "report.html").read_text()
    assert main(["report", str(folder)]) == 1
    assert (folder / "report.html").read_text() == before


def test_a_table_and_a_step_by_themselves(folder: Path, tmp_path: Path) -> None:
    """No "1 tables", and no half steps under a chart with two points."""
    assert "in 1 registered table; masks take 3 B<" in page_of(read_run(folder))
    with RunLog(tmp_path / "two") as log:
        for step in range(2):
            log.step(step, loss=step)
    drawn = page_of(read_run(tmp_path / "two"))
    figure = drawn[drawn.index("<svg") : drawn.index("</svg>")]
    assert re.findall(r">([^<]*)</text>", figure)[:3] == ["0", "1", "step"]


def test_names_that_make_one_file_name(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        for step in range(2):
            log.step(step, **{"a/b": step, "a b": step, "A_B": step, "a b_2": step})
    keys = [chart.key for chart in charts(read_run(tmp_path))]
    assert len({key.lower() for key in keys}) == 4, keys


def test_values_at_the_ends_of_float64_are_gaps(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        for step in range(40):
            log.step(step, loss=1.7e308 * (1 if step % 2 else -1), lr=1e299)
    run = read_run(tmp_path)
    assert run.last("loss") is None and run.last("lr") == 1e299
    assert not re.search("inf|nan", "".join(re.findall(r' d="([^"]*)"', page_of(run))))


def test_a_page_that_the_disk_has_no_room_for(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The old report stays whole."""
    write_report(folder)
    before = {
        file.name: (file.stat().st_mtime_ns, file.read_bytes())
        for file in folder.iterdir()
        if file.is_file()
    }
    largest = max(
        len(content) for name, (_, content) in before.items() if name.startswith("report")
    )
    with full_disk(largest - 1):
        status = main(["report", str(folder)])
    assert status == 1 and re.search(r"File too large:\s+'.*report.*'", capsys.readouterr().err)
    assert before == {
        file.name: (file.stat().st_mtime_ns, file.read_bytes())
        for file in folder.iterdir()
        if file.is_file()
    }


def test_words() -> None:
    assert [number_of(v, "table") for v in (0, 1, 1200)] == ["0 tables", "1 table", "1,200 tables"]
    assert [amount(v) for v in (0.699, 1385728.0, -1.2346e-7, 0.0, 47.6953)] == [
        *("0.6990", "1,385,728", "-1.235e-07", "0", "47.70")
    ]
    assert [percent(v) for v in (0.8, 0, 1, 0.99999, 0.0001, None)] == [
        *("80.0%", "0.0%", "100.0%", "99.9990%", "0.01%", "-")
    ]
    assert [size(v) for v in (160, 1_367_552, 6.4e12, 2**30, 1000 * 2**10)] == [
        *("160 B", "1.30 MiB", "5.82 TiB", "1.00 GiB", "0.977 MiB")
    ]
    assert [duration(v) for v in (0.85, 12.34, 245, 12_000)] == [
        "850 ms",
        "12.3 s",
        "4 min 05 s",
        "3 h 20 min",
    ]
