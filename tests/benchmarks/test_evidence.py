"""The papers' claims on a GPU, in miniature on the CPU: cells, seeds, time that runs out, and going on. And what is published."""

import json
import re
import shutil
from pathlib import Path

import pytest

from atoll.data.prepare import prepare
from atoll.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    prepare("stdlib", "bytes", folder / "prepared", limit_bytes=150_000)
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
    alone, lost = ("cluster.islands=1",), ("cluster.drop_probability=0.5",)
    longer = (*alone, "train.steps=32")
    assert seeds == [
        *(("demo-ddp", (), seed) for seed in (0, 1)),
        *(("demo-ddp", alone, seed) for seed in (0, 1)),
        ("demo-ddp", longer, 0),
        *(("demo-diloco", (), seed) for seed in (0, 1)),
        ("demo-diloco", lost, 0),
    ]
    said = capsys.readouterr().out
    assert "[DiLoCo] - [one worker] = " in said
    assert "(one seed): Losing half of the deltas" in said
    assert "Rows of one seed, where they train the same model on the same text" in said
    assert "rows have not been run yet" in said
    assert (tmp_path / "record" / "plot.png").exists()
    assert sum(line.endswith(" s") for line in (tmp_path / "record" / "log.txt").read_text().splitlines()) == len(found)
    scripts["diloco"].main([*common, "--only", "headline"])
    assert len(cells(tmp_path / "record")) == len(found), "what is there is not made again"
    assert "## Deltas that get lost" in (tmp_path / "record" / "README.md").read_text(), "and is told whatever is chosen"


def test_when_time_is_up_no_cell_begins_and_the_next_call_goes_on(scripts, text, tmp_path, capsys):
    common = ["--text", str(text), "--quick", "--quiet", "--seeds", "0", "--record", str(tmp_path / "record"), "--only", "methods"]
    scripts["acco"].main([*common, "--minutes", "0"])
    assert not (tmp_path / "record" / "cells.jsonl").exists()
    assert "give the same command again" in capsys.readouterr().out
    scripts["acco"].main(common)
    assert len(cells(tmp_path / "record")) == 9
    assert "ACCO ends within 0.02 of DDP" in capsys.readouterr().out


def test_settings_of_the_gpu_are_understood(scripts, text):
    for script in scripts.values():
        plan = script.plan(False)
        for group in script.groups(plan):
            for row in group.rows.values():
                run = row.run(0)
                on_gpu = group.name != "line"  # virtual time needs none
                assert (run.train.device, run.train.compile) == (("cuda", True) if on_gpu else ("cpu", False))
                large = on_gpu and run.train.batch_size > plan.batch_size  # one island's batch fills a device
                assert run.train.together == ("apart" if large else "stacked" if on_gpu else "auto")


def test_rows_with_one_seed_are_judged_by_what_the_headline_scatters(b):
    spread = b.spread
    figures = [spread.Sample((1.0, 2.0, 3.0)), spread.Sample((2.0, 3.0, 4.0))]
    assert spread.scatter(figures).std == pytest.approx(0.0), "rows that differ by the same in every seed do not scatter"
    assert spread.scatter(figures[:1]) is None
    found = spread.Scatter(0.1, 2).about([(1.0, 5.0), (-1.0, 4.0)])
    assert (found.value, found.high) == (1.0, pytest.approx(1.0 + 4.303 * 0.1 * 2**0.5))
    assert spread.Scatter(0.1, 2).resolution == pytest.approx(4.303 * 0.1 * 2**0.5)


def test_a_record_goes_on_with_its_own_text_alone(scripts, text, tmp_path):
    common = ["--quick", "--quiet", "--minutes", "0", "--record", str(tmp_path / "record")]
    nothing = tmp_path / "nothing"
    with pytest.raises(ConfigError, match=r"--text .*nothing: this is no prepared text"):
        scripts["acco"].main(["--text", str(nothing), *common])
    scripts["acco"].main(["--text", str(text), *common])
    known = json.loads((tmp_path / "record" / "text.json").read_text())
    assert known["text"]["train"]["tokens"] > 0
    assert "corpus" not in known["text"], "where the text lay is nobody's concern"
    scripts["acco"].main(["--text", str(nothing), *common])  # tables can be made without the text
    prepare("stdlib", "bytes", tmp_path / "other", limit_bytes=90_000)
    with pytest.raises(ConfigError, match="holds another text than the record"):
        scripts["acco"].main(["--text", str(tmp_path / "other"), *common])


def outcome(b, loss, time_s=1.0, seeds=3):
    """A row that ended alike in all its seeds."""
    figures = {"tokens": 100, "warm_start_tokens": 0, "sent_bytes_per_island": 5, "virtual_time_s": time_s}
    summaries = tuple({"val_loss": loss + seed / 100, **figures} for seed in range(seeds))
    return b.cells.Outcome(b.cells.Row(recipe="demo-ddp", settings=("train.steps=4",)), summaries)


def test_a_page_has_losses_and_differences_and_the_record_all_the_rest(b):
    outcomes = {name: outcome(b, loss) for name, loss in {"one": 2.0, "two": 3.0, b.groups.DEFAULT: 2.0}.items()}
    group = b.groups.Group(name="x", title="X", note="Why.", rows={name: outcomes[name].row for name in ("one", "two")})
    whole, brief = b.groups.table(group, outcomes), b.groups.brief_table(group, outcomes)
    assert "| two | `train.steps=4` | 3.0100 ± 0.0100 | 3.0000 to 3.0200 | default | +1.0000" in whole
    assert brief.splitlines()[4] == "| row | val loss | minus default | tokens | sent | virtual time |"
    assert "| two | 3.0100 ± 0.0100 | +1.0000 [+1.0000, +1.0000] | 100 | 5 B | " in brief


def test_a_page_names_what_each_row_is_compared_with_where_that_differs(b):
    outcomes = {name: outcome(b, loss, seeds=1) for name, loss in {"a": 1.0, "b": 2.0, "c": 4.0, b.groups.DEFAULT: 1.0}.items()}
    rows = {name: outcomes[name].row for name in "abc"}
    group = b.groups.Group(name="x", title="X", note="", rows=rows, against={"b": "a", "c": "b"})
    brief = b.groups.brief_table(group, outcomes)
    assert "| a | 1.0000 † | - |" in brief
    assert "| b | 2.0000 † | +1.0000 to a |" in brief
    assert "| c | 4.0000 † | +2.0000 to b |" in brief
    assert "1.0000 | - | - |" in b.groups.table(group, outcomes), "a single seed has no range"


def test_lines_are_told_in_seconds_an_update_and_where_hiding_pays(b):
    acco = b.evidence_acco
    plan = acco.plan(True)  # lines of 1 and of 100 Mbit/s, 3 updates
    times = {"1 Mbit/s": (30.0, 60.0), "100 Mbit/s": (6.0, 3.0)}
    outcomes = {}
    for line, (ddp, hidden) in times.items():
        outcomes |= {f"DDP, {line}": outcome(b, 1.0, ddp, seeds=1), f"ACCO, {line}": outcome(b, 1.0, hidden, seeds=1)}
    table = next(group for group in acco.groups(plan) if group.name == "line").drawn(outcomes)
    assert "| 1 Mbit/s | 10.000 | - | 20.000 | - | - | 2.000 |" in table
    assert "| 100 Mbit/s | 2.000 | - | 1.000 | - | - | 0.500 |" in table
    (told,) = acco.timed(plan, outcomes)
    assert told.startswith(
        "**holds here**: ACCO takes less virtual time than DDP over 100 Mbit/s. It is least over 100 Mbit/s: 0.5"
    )
    assert told.endswith("Over 1 Mbit/s it takes more: it exchanges twice an update.")
    slower = {label: one for label, one in outcomes.items() if label.endswith(" 1 Mbit/s")}
    assert acco.timed(plan, slower) == ["**does not hold here**: ACCO takes less virtual time than DDP."]
    assert acco.timed(plan, {}) == []


def marked(page, name):
    return re.search(rf"<!-- {name}:begin -->\n(.*?)<!-- {name}:end -->", page.read_text("utf-8"), re.DOTALL).group(1).strip()


@pytest.fixture(scope="module")
def published(b, tmp_path_factory):
    """The newest records' cells, under the names that their Runs have now: a setting that was added since changes none."""
    folder = tmp_path_factory.mktemp("records")
    for name in ("diloco", "async", "acco"):
        newest = sorted((ROOT / "benchmarks" / "records").glob(f"*_evidence_{name}"))[-1]
        (folder / newest.name).mkdir()
        for cell in cells(newest):
            row = b.cells.Row(recipe=cell["recipe"], settings=tuple(cell["settings"]))
            with (folder / newest.name / "cells.jsonl").open("a") as file:
                file.write(json.dumps({**cell, "key": b.cells.key_of(row.run(cell["seed"]))}) + "\n")
        shutil.copy(newest / "text.json", folder / newest.name)
    return folder


def test_the_published_headline_is_what_the_records_hold(b, published, tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("<!-- evidence_headline:begin -->\n<!-- evidence_headline:end -->\n")
    b.evidence_headline.main(["--docs", str(page), "--records", str(published)])
    made = marked(page, "evidence_headline")
    assert capsys.readouterr().out.strip() == made
    assert "±" in made
    assert made == marked(ROOT / "README.md", "evidence_headline") == marked(ROOT / "docs" / "evidence.md", "evidence_headline")
    assert not list(published.glob("*/source.txt")), "who only reads leaves no trace"


@pytest.mark.parametrize("name", ["diloco", "async", "acco"])
def test_published_tables_are_what_the_records_hold(scripts, published, name, tmp_path, monkeypatch):
    """Nothing is begun, since time is up: also where there is a GPU. The text is not there, which tables do not need."""
    monkeypatch.chdir(tmp_path)
    (record,) = published.glob(f"*_evidence_{name}")
    page = tmp_path / "page.md"
    page.write_text(f"<!-- evidence_{name}:begin -->\n<!-- evidence_{name}:end -->\n")
    domains = ["--domains", "prepared/domains"] if name == "diloco" else []
    common = ["--text", "prepared/wiki", *domains, "--quiet", "--minutes", "0"]
    scripts[name].main([*common, "--record", str(record), "--docs", str(page)])
    made = (record / "README.md").read_text("utf-8").split("## Again")[0]
    assert "## The paper's claims, here" in made
    assert made == (ROOT / "benchmarks" / "records" / record.name / "README.md").read_text("utf-8").split("## Again")[0]
    tables = [line for line in marked(page, f"evidence_{name}").splitlines() if line.startswith(("|", "- **"))]
    assert tables == [
        line for line in marked(ROOT / "docs" / "evidence.md", f"evidence_{name}").splitlines() if line.startswith(("|", "- **"))
    ]


def test_a_headline_without_records_says_how_to_make_them(b, tmp_path):
    with pytest.raises(ConfigError, match=r"has no record of evidence_diloco. Make it with: python benchmarks/evidence_diloco.py"):
        b.evidence_headline.main(["--records", str(tmp_path)])
    with pytest.raises(ConfigError, match="there is no such file"):
        b.evidence_headline.main(["--docs", str(tmp_path / "none.md")])
