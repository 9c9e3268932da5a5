"""Datasets of the Hugging Face library, on disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from atoll.core.errors import DataError
from atoll.data.document_sources import HubSpec, open_corpus

datasets = pytest.importorskip("datasets")

ROWS = [{"text": f"document {n}", "body": f"body {n}"} for n in range(5)]


def texts(spec: str) -> list[str]:
    return [document.text for document in open_corpus(spec)]


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def test_a_dataset_saved_to_disk_is_read(tmp_path: Path):
    datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "saved"))
    assert texts(f"hf:{tmp_path}/saved") == [row["text"] for row in ROWS]
    assert texts(f"hf:{tmp_path}/saved#body") == [row["body"] for row in ROWS]


def test_a_split_of_a_saved_dictionary_is_read(tmp_path: Path):
    both = datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list(ROWS[:2])})
    both.save_to_disk(str(tmp_path / "saved"))
    assert len(texts(f"hf:{tmp_path}/saved")) == 5
    assert texts(f"hf:{tmp_path}/saved:test#body") == ["body 0", "body 1"]
    with pytest.raises(DataError, match=r"no split 'dev'; it has train, test"):
        texts(f"hf:{tmp_path}/saved:dev")


def test_a_json_file_and_a_folder_with_it_are_streamed(jsonl: Path):
    assert texts(f"hf:{jsonl}") == [row["text"] for row in ROWS]
    assert texts(f"hf:{jsonl.parent}:train") == [row["text"] for row in ROWS]


def test_the_corpus_can_be_read_again_with_the_same_names(jsonl: Path):
    corpus = open_corpus(f"hf:{jsonl}")
    assert list(corpus) == list(corpus)
    assert next(iter(corpus)).name == "train#0"


def test_a_missing_field_is_refused_with_the_fields_there_are(jsonl: Path):
    with pytest.raises(DataError, match=r"no field 'content'; it has text, body"):
        texts(f"hf:{jsonl}#content")


def test_a_field_without_text_is_refused(tmp_path: Path):
    datasets.Dataset.from_list([{"text": 3}]).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(DataError, match="'text' holds int"):
        texts(f"hf:{tmp_path}/saved")


def test_a_kind_of_file_that_the_library_does_not_read_is_refused(tmp_path: Path):
    (tmp_path / "a.pdf").write_bytes(b"%PDF")
    with pytest.raises(DataError, match=r"a.pdf is a .pdf file; .json, .jsonl"):
        texts(f"hf:{tmp_path}/a.pdf")


def test_a_folder_without_data_raises_a_data_error(tmp_path: Path):
    with pytest.raises(DataError, match="could not be opened"):
        texts(f"hf:{tmp_path}")


def test_a_damaged_row_raises_a_data_error(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "ok"}\n{"text": \n')
    with pytest.raises(DataError, match=rf"hf:{path}"):
        texts(f"hf:{path}")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("c4", ("c4", None, "train", "text")),
        ("allenai/c4@en:validation#body", ("allenai/c4", "en", "validation", "body")),
        ("./a folder/x.jsonl#body", ("./a folder/x.jsonl", None, "train", "body")),
    ],
)
def test_a_spec_is_read_from_the_right(given: str, expected: tuple[str, str | None, str, str]):
    spec = HubSpec.parse(given)
    assert (spec.name, spec.configuration, spec.split, spec.field) == expected


def test_a_spec_without_a_name_is_refused():
    with pytest.raises(DataError, match="names no dataset"):
        HubSpec.parse("#text")
