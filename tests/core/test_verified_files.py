from __future__ import annotations

import json
import os

import pytest

from atoll.core.errors import CheckpointError, ConfigError
from atoll.core.verified_files import (
    check_digests,
    is_verified,
    open_to_append,
    parse_json,
    read_record,
    write_digests,
    write_record,
    write_text,
)


def test_a_record_is_read_as_it_was_written_and_every_flipped_bit_is_found(tmp_path):
    path, record = tmp_path / "a.json", {"rate": 0.5, "name": "ü", "list": (1, 2), "none": None}
    write_record(path, record)
    assert read_record(path) == {**record, "list": [1, 2]}
    assert is_verified(path)
    text, changed = path.read_bytes(), 0
    for bit in range(8 * len(text)):
        at = bit // 8
        path.write_bytes(text[:at] + bytes([text[at] ^ 1 << bit % 8]) + text[at + 1 :])
        try:
            found = read_record(path)
        except ValueError:
            changed += 1
        else:  # white space
            assert found == {**record, "list": [1, 2]}
            assert is_verified(path)
    assert changed > 7 * len(text)


def test_a_record_without_a_digest_is_read_and_known_to_be_unverified(tmp_path):
    (tmp_path / "a.json").write_text('{"rate": 0.5}')
    assert read_record(tmp_path / "a.json") == {"rate": 0.5}
    assert not is_verified(tmp_path / "a.json")


@pytest.mark.parametrize("text", ["", "[1]", "null", "{", "[" * 100_000, '{"a":' * 300 + "1" + "}" * 300, "\x00" * 40])
def test_what_is_no_record_is_a_value_error(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match=r"."):
        read_record(tmp_path / "a.json")


def test_json_may_be_nested_as_deep_as_a_checkpoint_needs():
    text = "[" * 150 + "]" * 150
    assert json.dumps(parse_json(text)) == text


def test_a_record_replaces_an_old_one_in_one_step_and_a_link_is_not_followed(tmp_path):
    (tmp_path / "other").write_text("precious")
    (tmp_path / "a.json").symlink_to(tmp_path / "other")
    write_record(tmp_path / "a.json", {"a": 1})
    assert not (tmp_path / "a.json").is_symlink()
    assert (tmp_path / "other").read_text() == "precious"
    assert sorted(os.listdir(tmp_path)) == ["a.json", "other"]
    with pytest.raises(ConfigError, match=r"could not write .*a\.json"):
        write_record(tmp_path / "a.json" / "b.json", {})


def test_a_link_is_not_appended_to(tmp_path):
    (tmp_path / "other").write_text("precious")
    (tmp_path / "log").symlink_to(tmp_path / "other")
    with pytest.raises(OSError, match="symbolic links"):
        open_to_append(tmp_path / "log")
    assert (tmp_path / "other").read_text() == "precious"


def test_a_finished_folder_is_verified_file_by_file(tmp_path):
    write_text(tmp_path / "log", "events\n")
    (tmp_path / "weights.safetensors").write_bytes(b"1234")
    assert not check_digests(tmp_path)
    write_digests(tmp_path, ["log", "weights.safetensors", "absent"], result="weights.safetensors")
    assert check_digests(tmp_path)
    for name, text, message in [
        ("log", "evENTS\n", r"log was changed since the run finished.*Restore it from a copy; or remove .*digests\.json"),
        ("log", "events", "log has 6 bytes instead of 7"),
        ("weights.safetensors", "12345", "has 5 bytes instead of 4"),
        ("absent", "here", "absent was not there when the run finished. Remove it"),
        ("digests.json", "{}", r"digests\.json cannot be read \(KeyError: 'files'\)"),
    ]:
        before = (tmp_path / name).read_bytes() if (tmp_path / name).exists() else None
        (tmp_path / name).write_text(text)
        with pytest.raises(CheckpointError, match=message):
            check_digests(tmp_path)
        (tmp_path / name).unlink() if before is None else (tmp_path / name).write_bytes(before)
    (tmp_path / "weights.safetensors").rename(tmp_path / "elsewhere")
    assert not check_digests(tmp_path), "without its weights a run is not finished"
    (tmp_path / "elsewhere").rename(tmp_path / "weights.safetensors")
    (tmp_path / "log").unlink()
    with pytest.raises(CheckpointError, match="log is missing since"):
        check_digests(tmp_path)
