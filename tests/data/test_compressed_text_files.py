"""Compressed files are read as if they were not, and never in part."""

from __future__ import annotations

import gzip
import lzma
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from atoll.core.errors import DataError
from atoll.data.compressed_text_files import find_files, open_file, read_text

TEXT = "".join(f"line {n * 7919 % 1000}: {'é' * (n % 5)}\n" for n in range(3000)).encode()
PACK: dict[str, Callable[[bytes], bytes]] = {
    ".xz": lzma.compress,
    ".gz": gzip.compress,
    ".zst": zstandard.ZstdCompressor(write_checksum=True).compress,
}

each_format = pytest.mark.parametrize("suffix", PACK)


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


@each_format
def test_a_compressed_file_reads_like_the_plain_one(tmp_path: Path, suffix: str):
    with open_file(write(tmp_path / f"a.txt{suffix}", PACK[suffix](TEXT))) as file:
        assert list(file) == TEXT.splitlines(keepends=True)


@each_format
def test_concatenated_compressed_files_are_read_to_the_end(tmp_path: Path, suffix: str):
    assert read_text(write(tmp_path / f"a{suffix}", PACK[suffix](TEXT) + PACK[suffix](b"more"))) == (TEXT + b"more").decode()


@each_format
@pytest.mark.parametrize("kept", [0.1, 0.5, 0.9])
def test_a_file_that_was_cut_short_is_refused(tmp_path: Path, suffix: str, kept: float):
    packed = PACK[suffix](TEXT)
    path = write(tmp_path / f"a{suffix}", packed[: int(kept * len(packed))])
    with pytest.raises(DataError, match=rf"a{suffix} is a damaged or cut-short {suffix} file"):
        read_text(path)


@each_format
def test_a_damaged_file_is_refused(tmp_path: Path, suffix: str):
    packed = bytearray(PACK[suffix](TEXT))
    packed[len(packed) // 2] ^= 0xFF
    with pytest.raises(DataError, match="damaged"):
        read_text(write(tmp_path / f"a{suffix}", bytes(packed)))


@each_format
def test_a_file_that_only_has_the_suffix_is_refused(tmp_path: Path, suffix: str):
    with pytest.raises(DataError, match="damaged"):
        read_text(write(tmp_path / f"a{suffix}", b"just some plain text"))


def test_a_missing_file_is_refused(tmp_path: Path):
    with pytest.raises(DataError, match=r"could not read .*nowhere.txt"):
        read_text(tmp_path / "nowhere.txt")


def test_files_that_a_kernel_shows_are_refused_also_behind_a_link(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    assert find_files(str(tmp_path))[1] == [tmp_path / "a.txt"]
    (tmp_path / "b.txt").symlink_to("/proc/self/environ")
    for path in (tmp_path, tmp_path / "*.txt", tmp_path / "b.txt", "/proc", "/proc/self/environ", "/sys/kernel"):
        with pytest.raises(DataError, match=r"belongs to /(proc|sys), where the kernel shows its own state"):
            find_files(str(path))
