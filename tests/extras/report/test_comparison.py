"""Several runs beside each other: the baseline, one denominator, the sentence on top, artifacts,
and the command."""

from __future__ import annotations

import html
import re
import shlex
import webbrowser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dist_sparse import ROW, Advanced, DataNormSparsifier, remove_untouched, sparsify
from dist_sparse.cli.main import main
from dist_sparse.extras.report import RunLog, add_artifact, read_run, write_report
from dist_sparse.extras.report.charts import charts
from dist_sparse.extras.report.drawing import svg_of
from dist_sparse.extras.report.page import page
from dist_sparse.extras.report.summary import (
    baseline,
    columns_of,
    compare,
    headline,
    method_rows,
    numbers,
    recommended,
    summary,
    verdict,
)


def log(
    folder: Path, dim: int = 8, level: float | None = None, auc: float = 0.75, **config: Any
) -> Path:
    """A run of two tables of 1000 and 100 rows, of which only the larger is sparsified."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"item": nn.EmbeddingBag(1000, dim), "day": nn.EmbeddingBag(100, dim)})
    sparsifier = None
    if level is not None:
        sparsifier = DataNormSparsifier(sparsity_level=level, sparse_block_shape=(1, ROW))
        sparsifier.add_model(model, include="item")
    with RunLog(
        folder, sparsifier, model=model, name=config.pop("name", None), config=config
    ) as held:
        for step in range(3):
            if sparsifier is not None:
                sparsifier.step()
            held.step(step, loss=1.0 / (1 + step))
        held.step(3, test_auc=auc, ms_per_step=2.5)
    return folder


def test_every_share_is_of_the_same_bytes(tmp_path: Path) -> None:
    """Tables that are not sparsified count, and of a narrow run the baseline's bytes are the
    whole."""
    log(tmp_path / "run", level=0.9, auc=0.749, name="pruned", lr=0.1, more={"level": 0.9})
    log(tmp_path / "run" / "dense", auc=0.75, lr=0.1)
    log(tmp_path / "run" / "a_narrow", dim=4, auc=0.74, lr=0.2)
    run = read_run(tmp_path / "run")
    base = baseline(run)
    assert base is not None and base.name == "dense"
    assert (run.bytes_dense, run.bytes_kept) == (1100 * 32, 200 * 32)
    pruned, narrow, dense = compare(run)
    assert (pruned["name"], pruned["share"], pruned["ms_per_step"]) == ("pruned", 200 / 1100, 2.5)
    assert (
        pruned["delta"] == pytest.approx(-0.001)
        and narrow["delta"] == pytest.approx(-0.01)
        and dense["delta"] is None
    )
    assert narrow["share"] == 0.5 and dense["share"] == 1.0
    assert (pruned["changed"], narrow["changed"], dense["changed"]) == (
        {"more.level": 0.9},
        {"lr": 0.2},
        {},
    )
    assert headline(run).startswith(
        "pruned keeps 18.2% of table bytes (6.25 KiB of 34.4 KiB) at -0.0010 test AUC"
    )
    assert headline(run.compared["dense"]) == (
        "dense keeps 100.0% of table bytes (34.4 KiB of 34.4 KiB) at 0.7500 test AUC."
    )
    assert summary(run, Path("/r.html")).endswith(
        "\npruned, changed: more.level=0.9\na_narrow, changed: lr=0.2\nreport: file:///r.html"
    )
    found = numbers(run)
    assert found["other_tables"] == {"day": 3200} and found["baseline"] == "dense"
    assert [row["name"] for row in found["runs"]] == ["pruned", "a_narrow", "dense"]
    bars = next(chart for chart in charts(run) if chart.key == "bytes")
    assert {bar.name: (bar.share, bar.whole) for bar in bars.bars} == {
        "item": (0.1, 1.0),
        "day": (0.1, 0.1),
    }


def test_auc_over_bytes(tmp_path: Path) -> None:
    """Artifacts of a run that has some, else the weights; bytes are those of the files."""
    log(tmp_path / "run", level=0.9, auc=0.749)
    log(tmp_path / "run" / "dense", auc=0.75)
    served = tmp_path / "served"
    (served / "deep").mkdir(parents=True)
    (served / "deep" / "a").write_bytes(bytes(900))
    (served / "b").write_bytes(bytes(100))
    add_artifact(tmp_path / "run", served, auc=0.5, name="int8")
    assert add_artifact(tmp_path / "run", served, auc=0.748, name="int8").bytes == 1000
    run = read_run(tmp_path / "run")
    [dots] = [chart for chart in charts(run) if chart.dots]
    assert [(one.name, one.role, one.labels, one.points) for one in dots.lines] == [
        ("run", "main", ("int8",), ((1000, 0.748),)),
        ("dense", "other", ("weights",), ((35200, 0.75),)),
    ]
    for wrong, says in ((tmp_path / "none", "no such file"), (tmp_path, r"auc=2")):
        with pytest.raises(ValueError, match=says):
            add_artifact(tmp_path / "run", wrong, auc=2 if wrong == tmp_path else 0.5)
    with pytest.raises(ValueError, match="holds no run"):
        add_artifact(tmp_path, served, auc=0.5)
    (tmp_path / "run" / "artifacts.json").write_text('[{"name": "x", "size": 1, "auc": 0.5}]')
    with pytest.raises(
        ValueError, match=r"artifacts\.json is not one that add_artifact\(\) writes: .*'size'"
    ):
        read_run(tmp_path / "run")


def test_the_command_compares_runs_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    a = log(tmp_path / "a", level=0.5, auc=0.7, name="half", lr=0.1)
    b, c = (
        log(tmp_path / "b", level=0.9, auc=0.6, name="half"),
        log(tmp_path / "c", auc=0.75, lr=0.1),
    )
    log(tmp_path / "a" / "inside")
    assert main(["report", str(a), str(b), str(c)]) == 0
    said = capsys.readouterr().out
    rows = [
        re.split(" {2,}", line.strip())
        for line in said.splitlines()
        if line.startswith(("half", "c ")) and not re.search("changed|keeps", line)
    ]
    assert [row[:6] for row in rows] == [
        ["half", "54.5%", "0.7000", "-0.0500", "18.8 KiB", "50.0%"],
        [f"half ({b})", "18.2%", "0.6000", "-0.1500", "6.25 KiB", "90.0%"],
        ["c", "100.0%", "0.7500", "34.4 KiB", "-", "2.5"],
    ]
    assert "lr=None" in said and "inside" not in said
    page = (a / "comparison.html").read_text()
    assert (a / "comparison.html").as_uri() in said and not (a / "report.html").exists()
    assert page.count("<h2>Runs</h2>") == 1 and f"half ({b})" in page
    sparsity = next(chart for chart in charts(read_run(*[a, b, c])) if chart.key == "sparsity")
    assert [line.name for line in sparsity.lines if line.role == "other"] == [f"half ({b})"]


def test_the_latest_run_and_the_browser(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(
        webbrowser, "open", lambda address: opened.append(address) or len(opened) < 2
    )
    runs = tmp_path / "runs"
    older, newer = log(runs / "older"), log(runs / "newer")
    assert (runs / "latest").readlink() == Path("newer")
    command = ["report", str(runs / "latest"), "--open"]
    assert main(command) == 0 and opened == [(newer / "report.html").as_uri()]
    assert (
        main(command) == 1 and "no browser was found to open\n  file://" in capsys.readouterr().err
    )
    with pytest.raises(ValueError, match=r"The newest of the runs inside is .*runs/latest\."):
        read_run(runs)
    # Runs/*: latest and newer are one run.
    assert list(read_run(*sorted(runs.iterdir())).compared) == ["older"]
    RunLog(older, resume=True).close()
    RunLog(runs / "latest", resume=True).close()
    assert (runs / "latest").readlink() == Path("older")
    assert sorted(file.name for file in runs.iterdir()) == ["latest", "newer", "older"]
    older.rename(tmp_path / "moved")
    with pytest.raises(
        ValueError, match=r"latest holds no run: there is no run\.json, which RunLog writes\."
    ):
        read_run(runs / "latest")


def test_latest_stays_what_the_user_made_it(tmp_path: Path) -> None:
    for made in (Path.mkdir, Path.touch):
        runs = tmp_path / made.__name__ / "runs"
        runs.mkdir(parents=True)
        made(runs / "latest")
        log(runs / "a")
        assert not (runs / "latest").is_symlink() and sorted(
            each.name for each in runs.iterdir()
        ) == ["a", "latest"]
    log(tmp_path / "elsewhere" / "a")
    assert not (tmp_path / "elsewhere" / "latest").exists()


def test_a_run_has_one_color_on_the_page(tmp_path: Path) -> None:
    """Runs by their bytes are in another order than on the command line, and one of them has no
    masks to draw."""
    folders = [log(tmp_path / "first", level=0.9)]
    folders += [
        log(tmp_path / "narrow", dim=4),
        log(tmp_path / "pruned", level=0.5),
        log(tmp_path / "dense", dim=9),
    ]
    run = read_run(*folders)
    expected = {"first": "#1d5fc4", "narrow": "#b3500a", "pruned": "#18794e", "dense": "#8a3fb5"}
    for chart in charts(run):
        if chart.bars:
            continue
        drawn = svg_of(chart)
        for line in chart.lines:
            if line.role in ("main", "other"):
                assert f"stroke: {expected[line.name]}" in drawn, chart.key


def test_the_head_says_how_the_run_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["train.py", "--data", "a b"])
    log(tmp_path / "run")
    text = write_report(tmp_path / "run").read_text()
    assert "train.py --data &#39;a b&#39;</p>" in text and "dist_sparse 0" in text


def test_what_shows_nothing_is_left_out(tmp_path: Path) -> None:
    """A run that prunes nothing has no sparsity."""
    log(tmp_path / "run", level=0.0)
    found = {chart.key for chart in charts(read_run(tmp_path / "run"))}
    assert found == {"value_loss", "bytes"}


def test_the_verdict_names_the_smallest_that_is_as_good(tmp_path: Path) -> None:
    log(tmp_path / "run", level=0.9, auc=0.7485, name="pruned")
    log(tmp_path / "run" / "dense", auc=0.75)
    log(tmp_path / "run" / "narrow", dim=2, auc=0.74)
    run = read_run(tmp_path / "run")
    (tmp_path / "int8").write_bytes(bytes(2000))
    add_artifact(tmp_path / "run", tmp_path / "int8", auc=0.7481)
    said = (
        "Serve pruned, int8 (1.95 KiB, 5.7% of dense, AUC 0.7481), the smallest within 0.002 of"
        " dense's AUC (0.7500). One seed each: the difference may be chance."
    )
    assert verdict(read_run(tmp_path / "run")) == said
    assert said in html.unescape(page(read_run(tmp_path / "run"), []))
    assert numbers(read_run(tmp_path / "run"))["verdict"] == said
    assert verdict(run.compared["dense"]) == "", "alone, it is compared with nothing"


def test_the_comparison_comes_before_the_run(tmp_path: Path) -> None:
    """The first run need not be the one to serve."""
    log(tmp_path / "run", level=0.9, auc=0.7, name="pruned")
    log(tmp_path / "run" / "dense", auc=0.75)
    run = read_run(tmp_path / "run")
    text = page(run, [])
    order = ["<h1>2 runs compared</h1>", 'id="verdict"', 'id="head-served_bytes"']
    order += ["<h2>Runs</h2>", "<h2>dense</h2>", "<h2>pruned</h2>"]
    places = [text.index(part) for part in (*order, "pruned keeps", 'id="head-sparsity"')]
    assert places == sorted(places)
    assert "<h1>dense</h1>" in page(run.compared["dense"], [])
    assert ">test_auc</th>" in text and ">loss, training</th>" in text


def test_what_needs_no_second_training_comes_first(tmp_path: Path) -> None:
    """A run of one step has trained nothing: its weights are the baseline's."""
    log(tmp_path / "run", level=0.9, auc=0.7493, name="pruned")
    log(tmp_path / "run" / "dense", auc=0.75)
    with RunLog(tmp_path / "run" / "untouched") as held:
        held.step(0, test_auc=0.75)
    for name, run, taken in (("int8", "dense", 9000), ("int4", "untouched", 2000)):
        (tmp_path / name).write_bytes(bytes(taken))
        add_artifact(tmp_path / "run" / run, tmp_path / name, auc=0.7499)
    (tmp_path / "codes").write_bytes(bytes(1000))
    add_artifact(tmp_path / "run", tmp_path / "codes", auc=0.7491)
    assert verdict(read_run(tmp_path / "run")).startswith(
        "Serve untouched, int4 (1.95 KiB, 5.7% of dense, AUC 0.7499), the smallest within 0.002 of"
        " dense's AUC (0.7500) without a second training. Smaller, with a second training: pruned,"
        " codes (0.977 KiB, 2.8% of dense, AUC 0.7491). One seed each"
    )
    run = read_run(tmp_path / "run")
    best = recommended(run)
    assert best is not None and (best.run.name, best.name, best.at_once) == (
        *("untouched", "int4"),
        True,
    )
    assert recommended(run.compared["dense"]) is None


def test_the_page_begins_with_the_artifact_to_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its cards, the commands with its path, and its tables; the first run follows in detail."""
    log(tmp_path / "run", level=0.9, auc=0.74, name="pruned")
    log(tmp_path / "run" / "dense", auc=0.75)
    model = nn.EmbeddingBag(100, 4)
    counts = {"weight": (torch.arange(100) < 25).long()}
    removed = remove_untouched(model, record=counts, trust_record=True)
    with RunLog(tmp_path / "run" / "touched", removed, model=model, config={"a": 1}) as held:
        held.step(0, test_auc=0.75, test_reads_zeros=0.5)
    artifact = tmp_path / "run" / "touched" / "it's int4"
    artifact.write_bytes(bytes(1760))
    add_artifact(tmp_path / "run" / "touched", artifact, auc=0.7511, name="int4")
    # The path of an artifact inside a run's folder is still right in another place.
    (tmp_path / "run").rename(tmp_path / "moved")
    run = read_run(tmp_path / "moved")
    figures = charts(run)
    text = page(run, figures)
    cards = dict(re.findall(r'id="head-served(\w*)" data-value="([^"]*)"', text))
    assert (cards.pop(""), cards.pop("_zeros")) == ("int4", "0.5")
    assert {key: float(value) for key, value in cards.items()} == {"_bytes": 1760, "_auc": 0.7511}
    assert "5.0% of 34.4 KiB, dense<" in text and "+0.0011 against dense (0.7500)<" in text
    place = str(tmp_path / "moved" / "touched" / "it's int4")
    said = html.unescape(text)
    assert f"dist-sparse serve-check {shlex.quote(place)}<" in said
    assert f"dist_sparse.load_served({place!r})<" in said
    # A link such as runs/latest leads elsewhere after the next run.
    (tmp_path / "latest").symlink_to("moved")
    linked = recommended(read_run(tmp_path / "latest"))
    assert linked is not None and str(linked.path) == place
    monkeypatch.chdir(tmp_path)
    linked = recommended(read_run(Path("latest")))
    assert linked is not None and str(linked.path) == "moved/touched/it's int4"
    assert text.index("<h2>touched</h2>") < text.index("<h2>pruned</h2>")
    shown = {chart.key: chart.of for chart in figures if chart.bars}
    assert shown == {"served_bytes": "touched", "bytes": "pruned"}
    # An artifact elsewhere has a path of its own; the weights of a run have none.
    (tmp_path / "int4").write_bytes(bytes(10))
    outside = add_artifact(tmp_path / "moved" / "touched", tmp_path / "int4", auc=0.75)
    assert outside.path == str(tmp_path / "int4")
    (tmp_path / "moved" / "touched" / "artifacts.json").unlink()
    text = page(alone := read_run(tmp_path / "moved"), charts(alone))
    assert 'id="head-served_bytes"' in text and "serve-check" not in text


def test_the_chart_of_auc_shades_what_may_be_chance(tmp_path: Path) -> None:
    """The spread of seeds around the baseline; without seeds, the tolerance of the advice."""
    for seed, auc in enumerate([0.75, 0.756]):
        log(tmp_path / f"dense {seed}", auc=auc, seed=seed)
    log(tmp_path / "narrow", dim=2, auc=0.74, seed=0)

    def shaded(*names: str) -> Any:
        run = read_run(*[tmp_path / name for name in names])
        [chart] = [each for each in charts(run) if each.dots]
        if chart.band is None:
            return chart.note, None
        *heights, text = chart.band
        assert f">{text}</text>" in svg_of(chart)
        return chart.note, (*map(pytest.approx, heights), text)

    note, band = shaded("narrow", "dense 0", "dense 1")
    assert band == (0.747, 0.759, "dense 0 ±0.0060") and "two seeds" in note
    note, band = shaded("narrow", "dense 0")
    assert band == (0.748, 0.752, "dense 0 ±0.0020") and "With one seed each" in note


def test_dots_have_shapes_instead_of_labels(tmp_path: Path) -> None:
    """Labels of near dots would overlap: each name is in the legend, once."""
    for name in ("run", "run/dense"):
        log(tmp_path / name)
        for artifact in ("fp32", "int8"):
            (tmp_path / artifact).write_bytes(bytes(100 * len(name)))
            add_artifact(tmp_path / name, tmp_path / artifact, auc=0.75)
    [chart] = [each for each in charts(read_run(tmp_path / "run")) if each.dots]
    drawn = svg_of(chart)
    for name in ("run", "dense", "fp32", "int8"):
        assert drawn.count(f">{name}</text>") == 1


def test_seeds_of_a_method_share_a_color_and_measure_the_noise(tmp_path: Path) -> None:
    """Runs whose configs differ in a seed alone are one method, nested or not."""
    log(tmp_path / "pruned", level=0.9, auc=0.751, lr=0.1, level_of="rows")
    for seed, auc in enumerate([0.75, 0.7514, 0.7509]):
        log(tmp_path / f"dense {seed}", auc=auc, lr=0.1, train={"seed": seed})
    log(tmp_path / "narrow", dim=2, auc=0.74, lr=0.2)
    run = read_run(*[tmp_path / name for name in ("pruned", "dense 0", "dense 1", "dense 2")])
    noise = "Seeds alone move AUC by up to 0.0014 (3 runs): smaller deltas are within noise."
    assert verdict(run).endswith(noise)
    assert {one.number for one in run.compared.values()} == {0}
    run = read_run(*[tmp_path / name for name in ("pruned", "dense 0", "narrow")])
    assert [one.number for one in run.compared.values()] == [0, 1] and "Seeds" not in verdict(run)


def test_the_same_seed_twice_is_one_seed(tmp_path: Path) -> None:
    """Such as a copy of a folder, or a run that was started again."""
    for name, auc in (("a", 0.75), ("b", 0.752), ("c", 0.7505)):
        # The same seeds in another order.
        seeds = {"data_seed": 1, "seed": 2} if name == "a" else {"seed": 2, "data_seed": 1}
        log(tmp_path / name, auc=auc, lr=0.1, **seeds)
    run = read_run(*[tmp_path / name for name in "abc"])
    said = verdict(run)
    assert "Seeds alone" not in said and "One seed each" in said and "AUC 0.7500)" in said
    assert said.endswith(
        "b has the config and the seed of a: counts once."
        " c has the config and the seed of a: counts once."
    )
    assert [cells[0] for _, cells in method_rows(run)] == ["a", "b", "c"]
    log(tmp_path / "other", auc=0.7514, lr=0.1, data_seed=1, seed=3)
    run = read_run(*[tmp_path / name for name in ("a", "b", "other")])
    assert [cells[:3] for _, cells in method_rows(run)] == [
        ["a, 2 seeds", "100.0%", "0.7507 ±0.0007"],
        ["b", "100.0%", "0.7520"],
    ]
    assert "Seeds alone move AUC by up to 0.0014 (2 runs)" in verdict(run)


def test_a_seed_that_crashed_before_its_test_is_left_out(tmp_path: Path) -> None:
    """The AUC of training is of other examples: it is far off, and no noise."""
    for seed, auc in enumerate([0.75, 0.751]):
        log(tmp_path / f"dense {seed}", auc=auc, seed=seed)
    tables = {"item": nn.EmbeddingBag(1000, 8), "day": nn.EmbeddingBag(100, 8)}
    for name, seed in (("dense 2", 2), ("again 0", 0)):
        with RunLog(tmp_path / name, model=nn.ModuleDict(tables), config={"seed": seed}) as held:
            held.step(3, auc=0.9)
    # The crashed run of seed 0 comes first; the measured one stands for the seed.
    names = ["again 0", "dense 0", "dense 1", "dense 2"]
    for first in names:
        run = read_run(tmp_path / first, *[tmp_path / name for name in names])
        said = verdict(run)
        assert "0.9000" not in said and "mean of 2 seeds from 0.7500 to 0.7510" in said
        assert "Seeds alone move AUC by up to 0.0010 (2 runs)" in said
        assert "again 0 has the config and the seed of dense 0: counts once." in said
        assert said.split("left out: ")[1].count("again 0") == 1 and "dense 2" in said
        auc = {row["name"]: row["auc"] for row in compare(run)}
        assert auc == {"again 0": None, "dense 0": 0.75, "dense 1": 0.751, "dense 2": None}
        dots = {line.name for chart in charts(run) if "bytes" in chart.key for line in chart.lines}
        assert not dots & {"again 0", "dense 2"}
        page(run, charts(run))
    # Without any test, the AUC of training compares.
    run = read_run(tmp_path / "again 0", tmp_path / "dense 2")
    assert verdict(run).startswith("Serve ") and "left out" not in verdict(run)


def test_the_verdict_compares_means_over_seeds(tmp_path: Path) -> None:
    """In any order of the runs; one lucky seed is no reason to serve a method."""
    for seed, (dense, small) in enumerate([(0.8, 0.795), (0.806, 0.801)]):
        log(tmp_path / f"dense {seed}", auc=dense, rows=8, seed=seed)
        log(tmp_path / f"small {seed}", dim=2, auc=small, rows=2, seed=seed)
    names = ["dense 0", "dense 1", "small 0", "small 1"]
    for first in names:
        run = read_run(tmp_path / first, *[tmp_path / name for name in names])
        said = verdict(run)
        assert said.startswith("Serve dense ") and "small " not in said
        assert "same seeds (AUC 0.8030, mean of 2 seeds from 0.8000 to 0.8060)" in said
        [chart] = [each for each in charts(run) if each.key == "auc_bytes"]
        main = {line.name for line in chart.lines if line.role == "main"}
        assert {name.split()[0] for name in main} == {first.split()[0]} and len(main) == 2


def test_the_verdict_compares_the_same_seeds(tmp_path: Path) -> None:
    """One seed of a baseline may be far from their mean."""
    for seed, auc in enumerate([0.699, 0.6999, 0.706]):
        log(tmp_path / f"dense {seed}", auc=auc, seed=seed)
    with RunLog(tmp_path / "touched", config={"seed": 0}) as held:
        held.step(0, test_auc=0.699)
    (tmp_path / "int4").write_bytes(bytes(2000))
    add_artifact(tmp_path / "touched", tmp_path / "int4", auc=0.6991)
    names = [f"dense {seed}" for seed in range(3)]
    said = verdict(read_run(*[tmp_path / name for name in (*names, "touched")]))
    goal = "0.002 of the baseline with the same seeds (AUC 0.7016, mean of 3 seeds from 0.6990"
    assert said.startswith(
        f"Serve touched, int4 (1.95 KiB, 5.7% of dense, AUC 0.6991), the smallest within {goal}"
    )
    # A seed without a baseline is compared with their mean, in any order of the runs.
    with RunLog(tmp_path / "other", config={"seed": 7}) as held:
        held.step(0, test_auc=0.699)
    add_artifact(tmp_path / "other", tmp_path / "int4", auc=0.701)
    for order in (names, names[::-1]):
        said = verdict(read_run(*[tmp_path / name for name in (*order, "other")]))
        assert said.startswith("Serve other, int4")


def test_a_delta_is_against_the_same_seed(tmp_path: Path) -> None:
    for seed, (dense, small) in enumerate([(0.8, 0.795), (0.806, 0.803)]):
        log(tmp_path / f"dense {seed}", auc=dense, rows=8, seed=seed)
        log(tmp_path / f"small {seed}", dim=2, auc=small, rows=2, seed=seed)
    log(tmp_path / "other", dim=2, auc=0.801)
    names = ["dense 0", "small 1", "small 0", "dense 1", "other"]
    run = read_run(*[tmp_path / name for name in names])
    deltas = [row["delta"] for row in compare(run)]
    assert deltas == [None, *map(pytest.approx, (-0.003, -0.005)), None, pytest.approx(0.001)]
    run = read_run(tmp_path / "small 1", tmp_path / "dense 0", tmp_path / "dense 1")
    assert "-0.0030 against dense 1 (0.8060)" in page(run, charts(run))
    assert " at -0.0030 test AUC" in headline(run)


def test_seeds_are_one_row_with_their_spread(tmp_path: Path) -> None:
    """A delta within the spread of any method is marked."""
    for seed, (dense, small, close) in enumerate([(0.8, 0.79, 0.799), (0.806, 0.795, 0.8)]):
        log(tmp_path / f"dense {seed}", auc=dense, rows=8, seed=seed)
        log(tmp_path / f"small {seed}", dim=2, auc=small, rows=2, seed=seed)
        log(tmp_path / f"close {seed}", dim=2, auc=close, rows=4, seed=seed)
    names = [f"{name} {seed}" for name in ("dense", "small", "close") for seed in range(2)]
    run = read_run(*[tmp_path / name for name in names])
    shown = [dict(zip(columns_of(run), cells, strict=True)) for _, cells in method_rows(run)]
    assert [cells["run"] for cells in shown] == [
        f"{name} 0, 2 seeds" for name in ("dense", "small", "close")
    ]
    assert [cells["AUC"] for cells in shown] == [
        "0.8030 ±0.0030",
        "0.7925 ±0.0025",
        "0.7995 ±0.0005",
    ]
    assert [cells["delta"] for cells in shown] == ["", "-0.0105", "-0.0035, noise"]
    assert shown[1]["changed"] == "rows=2"
    text = page(run, charts(run))
    assert text.count("2 seeds</td>") == 3 and "0.7925 ±0.0025</td>" in text
    assert "small 0, 2 seeds" in summary(run, tmp_path)
    alone = read_run(tmp_path / "dense 0", tmp_path / "small 0")
    assert [cells[2:4] for _, cells in method_rows(alone)] == [
        ["0.8000", ""],
        ["0.7900", "-0.0100"],
    ]


def test_runs_with_other_bytes_are_no_seeds(tmp_path: Path) -> None:
    """A config may not name the columns. Runs without an AUC have no spread of it."""
    log(tmp_path / "wide", auc=0.8, seed=0)
    log(tmp_path / "narrow", dim=4, auc=0.79, seed=0)
    for seed in range(2):
        with RunLog(tmp_path / f"loss {seed}", config={"seed": seed}) as held:
            held.step(0, loss=0.5)
    names = ("wide", "narrow", "loss 0", "loss 1")
    shown = method_rows(read_run(*[tmp_path / name for name in names]))
    cells = [cells[:1] + cells[2:3] for _, cells in shown]
    assert cells == [["wide", "0.8000"], ["narrow", "0.7900"], ["loss 0, 2 seeds", "-"]]


def test_a_run_of_untouched_rows(tmp_path: Path) -> None:
    """It has the config of a dense run, another color, and no column that is the same in all its
    tables."""
    for name in ("dense", "untouched"):
        model = nn.ModuleDict({"item": nn.EmbeddingBag(100, 4), "day": nn.EmbeddingBag(20, 4)})
        optimizer = torch.optim.Adagrad(model.parameters())
        with sparsify(
            model,
            optimizer,
            level="untouched",
            end=1,
            include="item",
            advanced=Advanced(trust_record=True),
        ) as sparse:
            given = None if name == "dense" else sparse
            with RunLog(tmp_path / name, given, model=model, config={"seed": 1}) as held:
                for step in range(2):
                    model["item"](torch.arange(50).view(5, 10)).sum().backward()
                    optimizer.step()
                    sparse.step()
                    held.step(step, auc=0.5 + step / 10)
    run = read_run(tmp_path / "untouched", tmp_path / "dense")
    [chart] = [each for each in charts(run) if each.key == "value_auc"]
    assert [line.role for line in chart.lines] == ["main", "other"]
    head = r"<th [^>]*>(target|removed|threshold|dead rows)</th>"
    text = page(run, charts(run))
    assert re.findall(head, text) == ["removed"]
    # One row: the other table is kept whole, and a row of it would be blank.
    rows = re.findall("<tr>.*?</tr>", text[text.index('"Tables of untouched"') :])
    assert [row.count("<th ") + row.count("<td ") for row in rows] == [10, 10]
    assert "Kept whole: 1 table, 320 B." in text
    log(tmp_path / "level", level=0.5)
    run = read_run(tmp_path / "level")
    assert re.findall(head, page(run, charts(run))) == ["target", "removed"]


def test_rows_removed_after_training_and_what_reads_them(tmp_path: Path) -> None:
    """Beside the AUC, the share of the same examples that read removed rows; no empty column."""
    model = nn.EmbeddingBag(100, 4)
    counts = {"weight": (torch.arange(100) < 25).long()}
    removed = remove_untouched(model, record=counts, trust_record=True)
    share = removed.share([{"weight": torch.tensor([[3, 4], [5, 99]])}])
    assert share.fraction == 0.5
    with RunLog(tmp_path / "removed", removed, model=model, config={"a": 1}) as held:
        held.step(0, test_auc=0.7, test_reads_zeros=share.fraction)
    (tmp_path / "int4").write_bytes(b"x" * 100)
    add_artifact(tmp_path / "removed", tmp_path / "int4", auc=0.7)
    text = page(alone := read_run(tmp_path / "removed"), charts(alone))
    assert re.findall(r"<th [^>]*>(target|removed|threshold|dead rows)</th>", text) == ["removed"]
    assert re.search(r"Examples that read zeros, test</dt><dd><div [^>]*>50.0%</div>", text)
    assert headline(alone).endswith(" at 0.7000 test AUC, 50.0% of its examples read zeros.")
    log(tmp_path / "dense", auc=0.7)
    run = read_run(tmp_path / "removed", tmp_path / "dense")
    shown = [dict(zip(columns_of(run), cells, strict=True)) for _, cells in method_rows(run)]
    assert [cells["reads zeros"] for cells in shown] == ["50.0%", "-"]
    assert "AUC 0.7000, 50.0% of its examples read zeros)" in verdict(run)
    assert "reads zeros" in page(run, charts(run)) and "reads zeros" in summary(run, tmp_path)
    assert numbers(run)["runs"][0]["reads_zeros"] == 0.5
    dense = read_run(tmp_path / "dense")
    assert "zeros" not in page(dense, charts(dense)) + headline(dense) + verdict(dense)


def test_a_series_is_drawn_against_the_baseline(tmp_path: Path) -> None:
    """Curves that differ little lie on each other; steps that one of the two lacks are left out."""
    for name, by, dim in (("run", 0.25, 2), ("run/dense", 0.0, 4)):
        with RunLog(tmp_path / name, model=nn.EmbeddingBag(8, dim)) as held:
            for step in range(0, 10, 1 + (by > 0)):
                held.step(step, auc=0.5 + by, test_auc=0.5)
    found = {chart.key: chart for chart in charts(read_run(tmp_path / "run"))}
    less = found["value_auc_less"]
    assert found["value_auc"].title == "AUC, training"
    (line,) = less.lines
    assert line.points == tuple((step, 0.25) for step in range(0, 10, 2)) and line.role == "main"


def test_a_longer_run_is_drawn_to_its_own_end(tmp_path: Path) -> None:
    """Not back to the end of the first one."""

    def logged(folder: Path, steps: int) -> Path:
        model = torch.nn.EmbeddingBag(40, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sparse = sparsify(model, optimizer, level=0.5, end=steps - 1, every=1)
        with RunLog(folder, sparse) as log:
            for step in range(steps):
                sparse.step()
                log.step(step, loss=1.0)
        return folder

    run = read_run(logged(tmp_path / "short", 3), logged(tmp_path / "long", 9))
    [chart] = [each for each in charts(run) if each.key == "sparsity"]
    for line in chart.lines:
        steps = [step for step, _ in line.points]
        assert steps == sorted(steps)
    assert max(max(step for step, _ in line.points) for line in chart.lines) == 8
