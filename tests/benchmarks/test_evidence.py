"""The papers' claims on a GPU: smoke tests on the CPU, claims and tables, and the published tables."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.core.errors import ConfigError
from atoll.data.prepare import Preparation, prepare

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    prepare(Preparation(corpus="stdlib", tokenizer="bytes", limit_bytes=150_000), folder / "prepared")
    return folder / "prepared"


@pytest.fixture(scope="module")
def scripts(b):
    return {name: getattr(b, f"evidence_{name}") for name in ("acco", "async", "diloco")}


def cells(record):
    return [json.loads(line) for line in (record / "cells.jsonl").read_text().splitlines()]


def test_rows_of_the_headline_have_all_seeds_and_others_the_first(scripts, text, tmp_path, capsys):
    common = ["--text", str(text), "--quick", "--quiet", "--seeds", "0", "1", "--record", str(tmp_path / "record")]
    scripts["diloco"].main([*common, "--only", "headline", "--only", "drop"])
    found = cells(tmp_path / "record")
    seeds = sorted((cell["recipe"], tuple(cell["settings"][7:]), cell["seed"]) for cell in found)
    alone, lost, longest = ("cluster.islands=1",), ("cluster.drop_probability=0.5",), ("algorithm.inner_steps=8",)
    longer = (*alone, "train.steps=32")
    assert seeds == [
        *(("demo-ddp", (), seed) for seed in (0, 1)),
        *(("demo-ddp", alone, seed) for seed in (0, 1)),
        ("demo-ddp", longer, 0),
        *(("demo-diloco", (), seed) for seed in (0, 1)),
        *(("demo-diloco", longest, seed) for seed in (0, 1)),
        ("demo-diloco", lost, 0),
    ]
    printed = capsys.readouterr().out
    assert "[DiLoCo] - [one worker] = " in printed
    assert "(one seed): Losing half of the deltas" in printed
    assert "rows have not been run yet" in printed
    assert (tmp_path / "record" / "plot.png").exists()
    assert sum(line.endswith(" s") for line in (tmp_path / "record" / "log.txt").read_text().splitlines()) == len(found)
    scripts["diloco"].main([*common, "--only", "headline"])
    assert len(cells(tmp_path / "record")) == len(found), "no cell runs again"
    readme = (tmp_path / "record" / "README.md").read_text()
    assert "## Lost deltas" in readme, "the tables have all cells of the record"


def test_without_a_gpu_only_rows_that_need_one_are_refused(scripts, text, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    common = ["--text", str(text), "--quiet", "--minutes", "0", "--record", str(tmp_path / "record")]
    for name, only in (("diloco", "H"), ("acco", "methods")):
        with pytest.raises(ConfigError, match="need CUDA, torch sees none here"):
            scripts[name].main([*common, "--only", only])
    scripts["acco"].main([*common, "--only", "link"])
    assert "the default's cell is missing, and needs CUDA" in capsys.readouterr().out


@pytest.mark.parametrize(("option", "value"), [("--processes", "0"), ("--minutes", "-1")])
def test_options_out_of_range_are_refused(scripts, text, tmp_path, option, value):
    with pytest.raises(ConfigError, match=f"{option} {value}"):
        scripts["acco"].main(["--text", str(text), "--quick", "--quiet", "--record", str(tmp_path / "record"), option, value])


@pytest.mark.parametrize("quick", [False, True])
def test_claims_name_existing_rows_and_none_is_repeated(scripts, quick):
    for script in scripts.values():
        plan = replace(script.plan(quick), text="text", domains="domains")
        labels = {label for group in script.groups(plan) for label in group.rows}
        made = script.EVIDENCE.claims(plan)
        unknown = {label for claim in made for _, label in claim.terms} - labels
        assert unknown <= {"AdamW+Momentum, async"}, "only the ablations have it"
        assert len({(claim.terms, claim.above, claim.below) for claim in made}) == len(made)
        assert not any(re.match("1 islands", claim.text) for claim in made)


def test_no_cell_starts_after_the_time_limit_and_the_next_call_continues(scripts, text, tmp_path, capsys):
    common = ["--text", str(text), "--quick", "--quiet", "--seeds", "0", "--record", str(tmp_path / "record"), "--only", "methods"]
    scripts["acco"].main([*common, "--minutes", "0"])
    assert not (tmp_path / "record" / "cells.jsonl").exists()
    assert "repeat the command" in capsys.readouterr().out
    scripts["acco"].main(common)
    assert len(cells(tmp_path / "record")) == 9


def test_rows_run_compiled_on_the_gpu_except_those_of_virtual_time(scripts, text):
    for script in scripts.values():
        plan = script.plan(False)
        for group in script.groups(plan):
            for row in group.rows.values():
                run = row.run(0)
                on_gpu = group.name != "link"  # virtual time needs no GPU
                assert (run.train.device, run.train.compile) == (("cuda", True) if on_gpu else ("cpu", False))
                large = on_gpu and run.train.batch_size > plan.batch_size  # a large batch fills a device
                assert run.train.together == ("apart" if large else "stacked" if on_gpu else "auto")


def test_a_record_continues_only_with_its_own_text(scripts, text, tmp_path):
    common = ["--quick", "--quiet", "--minutes", "0", "--record", str(tmp_path / "record")]
    nothing = tmp_path / "nothing"
    with pytest.raises(ConfigError, match=r"--text .*nothing: this is no prepared text"):
        scripts["acco"].main(["--text", str(nothing), *common])
    scripts["acco"].main(["--text", str(text), *common])
    known = json.loads((tmp_path / "record" / "text.json").read_text())
    assert known["text"]["train"]["tokens"] > 0
    assert "corpus" not in known["text"], "the path of the text is not recorded"
    scripts["acco"].main(["--text", str(nothing), *common])  # the tables do not need the text
    prepare(Preparation(corpus="stdlib", tokenizer="bytes", limit_bytes=90_000), tmp_path / "other")
    with pytest.raises(ConfigError, match="holds another text than the record"):
        scripts["acco"].main(["--text", str(tmp_path / "other"), *common])


def outcome(b, loss, time_s=1.0, seeds=3):
    """A row whose seeds end at almost the same loss."""
    figures = {"tokens": 100, "warm_start_tokens": 0, "sent_bytes_per_island": 5, "virtual_time_s": time_s}
    summaries = tuple({"val_loss": loss + seed / 100, **figures} for seed in range(seeds))
    return b.cells.Outcome(b.cells.Row(recipe="demo-ddp", settings=("train.steps=4",)), summaries)


def test_a_table_has_settings_and_ranges(b):
    outcomes = {name: outcome(b, loss) for name, loss in {"one": 2.0, "two": 3.0, b.ablations.DEFAULT: 2.0}.items()}
    outcomes["three"] = outcome(b, 4.0, seeds=1)
    group = b.ablations.Group(name="x", title="X", note="Why.", rows={name: outcomes[name].row for name in ("one", "two", "three")})
    whole = b.ablations.table(group, outcomes)
    assert "| two | `train.steps=4` | 3.0100 ± 0.0100 | 3.0000 to 3.0200 | default | +1.0000" in whole
    assert "| three | `train.steps=4` | 4.0000 | - | default | +2.0000 | one seed |" in whole, "a single seed has no range"


def test_seconds_per_update_by_link_and_the_links_where_overlap_pays(b):
    acco = b.evidence_acco
    plan = acco.plan(True)  # links of 1 and 100 Mbit/s, 3 updates
    times = {"1 Mbit/s": (30.0, 60.0), "100 Mbit/s": (6.0, 3.0)}
    outcomes = {}
    for link, (ddp_s, acco_s) in times.items():
        outcomes |= {f"DDP, {link}": outcome(b, 1.0, ddp_s, seeds=1), f"ACCO, {link}": outcome(b, 1.0, acco_s, seeds=1)}
    table = next(group for group in acco.groups(plan) if group.name == "link").table(outcomes)
    assert "| 1 Mbit/s | 10.000 | - | 20.000 | - | - | 2.000 |" in table
    assert "| 100 Mbit/s | 2.000 | - | 1.000 | - | - | 0.500 |" in table
    (verdict,) = acco.timed(plan, outcomes)
    assert verdict.startswith("**holds here**: ACCO takes less virtual time than DDP over 100 Mbit/s. The least is 0.500 ")
    assert "Over 1 Mbit/s it takes more" in verdict
    slower = {label: one for label, one in outcomes.items() if label.endswith(" 1 Mbit/s")}
    assert acco.timed(plan, slower) == ["**does not hold here**: ACCO takes less virtual time than DDP."]
    assert acco.timed(plan, {}) == []


def test_rows_without_bytes_are_not_drawn_and_labels_are_within_the_axes(b, tmp_path, monkeypatch):
    report, plan = b.evidence_diloco_report, b.evidence_diloco.plan(False)
    losses = {"one worker": 5.0, "H=50": 4.2, "H=500": 4.7, plan.batch: 4.0}
    outcomes = {label: outcome(b, loss) for label, loss in losses.items()}
    sent = {"H=50": 5e9, "H=500": 5e8, plan.batch: 3e11}
    for label, found in outcomes.items():
        for summary in found.summaries:
            summary["sent_bytes_per_island"] = sent.get(label, 0.0)
    outcomes["H=100"] = outcomes["one worker"]
    drawn = []
    monkeypatch.setattr(report, "save_figure", lambda draw, what, path: drawn.append(draw(what)))
    assert report.plot(plan, outcomes, tmp_path / "plot.png") == "loss against bytes sent"
    (figure,) = drawn
    (axes,) = figure.axes
    figure.savefig(tmp_path / "plot.png")  # computes the layout
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["the paper's outer rule"]
    assert {text.get_text() for text in axes.texts} == {"H=50", "H=500", plan.batch, "one worker"}
    for text in axes.texts:
        assert axes.get_window_extent().x1 >= text.get_window_extent().x1, text.get_text()


def marked(page, name):
    return re.search(rf"<!-- {name}:begin -->\n(.*?)<!-- {name}:end -->", page.read_text("utf-8"), re.DOTALL).group(1).strip()


@pytest.fixture(scope="module")
def published(b, tmp_path_factory):
    """Copies of the newest records, without their tables."""
    folder = tmp_path_factory.mktemp("records")
    for name in ("diloco", "async", "acco"):
        newest = sorted((ROOT / "benchmarks" / "records").glob(f"*_evidence_{name}"))[-1]
        (folder / newest.name).mkdir()
        for file in ("cells.jsonl", "text.json"):
            shutil.copy(newest / file, folder / newest.name)
    return folder


def test_the_published_headline_equals_the_records(b, published, tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("<!-- evidence_headline:begin -->\n<!-- evidence_headline:end -->\n")
    b.evidence_headline.main(["--docs", str(page), "--records", str(published)])
    made = marked(page, "evidence_headline")
    assert capsys.readouterr().out.strip() == made
    assert "±" in made
    assert made == marked(ROOT / "docs" / "evidence.md", "evidence_headline")
    assert not list(published.glob("*/source.txt")), "a process that measures nothing writes no source"


@pytest.mark.parametrize("name", ["diloco", "async", "acco"])
def test_published_tables_equal_the_records(scripts, published, name, tmp_path, monkeypatch):
    """With `--minutes 0` no cell starts, also with a GPU. The tables do not need the text."""
    monkeypatch.chdir(tmp_path)
    (record,) = published.glob(f"*_evidence_{name}")
    page = (ROOT / "benchmarks" / "records" / record.name / "README.md").read_text("utf-8")
    text, *others = dict.fromkeys(re.findall(r"prepared:([\w./-]+)", page))  # the folders that the page names
    domains = ["--domains", others[0]] if name == "diloco" else []
    common = ["--text", text, *domains, "--quiet", "--minutes", "0"]
    scripts[name].main([*common, "--record", str(record)])
    made = (record / "README.md").read_text("utf-8").split("## How to reproduce")[0]
    assert "## The paper's claims, here" in made
    assert made == (ROOT / "benchmarks" / "records" / record.name / "README.md").read_text("utf-8").split("## How to reproduce")[0]


def test_a_record_without_a_headline_is_refused_before_a_page_changes(b, published, tmp_path):
    """As a record of `--set`: its cells have other settings."""
    page = tmp_path / "page.md"
    page.write_text("<!-- evidence_headline:begin -->\nfigures\n<!-- evidence_headline:end -->\n")
    (record,) = published.glob("*_evidence_diloco")
    shutil.copytree(record, tmp_path / "records" / record.name)
    cells_file = tmp_path / "records" / record.name / "cells.jsonl"
    cells_file.write_text(cells_file.read_text().replace("warmup=100", "warmup=99"))
    with pytest.raises(ConfigError, match="no record of evidence_diloco has a row of the headline"):
        b.evidence_headline.main(["--docs", str(page), "--records", str(tmp_path / "records")])
    assert "figures" in page.read_text()


def test_a_later_record_that_is_not_complete_does_not_replace_a_complete_one(b, published, tmp_path, capsys):
    for record in published.iterdir():
        shutil.copytree(record, tmp_path / record.name)
    later = tmp_path / "2030-01-01_evidence_acco"
    (record,) = tmp_path.glob("*_evidence_acco")
    shutil.copytree(record, later)
    lines = (later / "cells.jsonl").read_text().splitlines(keepends=True)

    def row_of_acco():
        b.evidence_headline.main(["--records", str(tmp_path)])
        (row,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("| ACCO |"))
        return row

    complete = row_of_acco()
    (later / "cells.jsonl").write_text("".join(lines[: len(lines) // 2]))
    assert row_of_acco() == complete
    (later / "cells.jsonl").write_text("".join(lines).replace('"virtual_time_s": ', '"virtual_time_s": 1'))
    assert row_of_acco() != complete, "a later complete record does"


def test_a_headline_without_records_is_refused(b, tmp_path):
    (tmp_path / "2030-01-01_evidence_diloco").mkdir()  # as after a refused command
    with pytest.raises(ConfigError, match=r"has no record of evidence_diloco. Make it with: python benchmarks/evidence_diloco.py"):
        b.evidence_headline.main(["--records", str(tmp_path)])
    with pytest.raises(ConfigError, match="there is no such file"):
        b.evidence_headline.main(["--docs", str(tmp_path / "none.md")])
