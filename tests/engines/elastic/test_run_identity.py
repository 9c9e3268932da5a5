"""Secrets of a run and join files: modes, damage, versions, and what happens when two processes write at once."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from atoll.core.errors import ConfigError
from atoll.core.verified_files import sealed, unsealed
from atoll.engines.elastic import run_identity
from atoll.engines.elastic.run_identity import JoinFile, RunSecrets, run_id_of


@pytest.fixture
def join(tmp_path):
    """A join file and its path."""
    made = RunSecrets.invite(tmp_path, ("192.0.2.7:7000", "203.0.113.5:7000"))
    made.write(tmp_path / "join.json")
    return made, tmp_path / "join.json"


def test_a_run_keeps_its_id_and_no_other_run_has_it(tmp_path):
    (tmp_path / "other").mkdir()
    with ThreadPoolExecutor(8) as pool:
        ids = {*pool.map(run_id_of, [tmp_path] * 16)}
    assert len(ids) == 1
    assert run_id_of(tmp_path / "other") not in ids
    (tmp_path / "run_id").write_text("")
    with pytest.raises(ConfigError, match="a run's id looks like"):
        run_id_of(tmp_path)


def test_a_lost_run_id_is_taken_from_the_keys_so_that_join_files_stay_valid(join, tmp_path):
    made, path = join[0].credentials, tmp_path / "run_id"
    for reads in (lambda: RunSecrets.read(tmp_path).credentials.run_id, lambda: run_id_of(tmp_path)):
        path.unlink()
        assert reads() == path.read_text().strip() == made.run_id
    path.write_text("run-0123456789abcdef\n")
    with pytest.raises(ConfigError, match=f"is of {made.run_id}, .*run_id holds run-0123456789abcdef. Remove run_id if join files"):
        RunSecrets.read(tmp_path)
    path.unlink()
    (tmp_path / "secrets" / "identity.json").write_text("{}")
    with pytest.raises(ConfigError, match="Restore it from a copy, or remove it"):
        run_id_of(tmp_path)
    assert not path.exists()


def test_a_join_file_survives_its_text_and_only_its_owner_can_read_it(join):
    made, path = join
    assert JoinFile.read(path) == made
    assert path.stat().st_mode & 0o777 == 0o600
    assert not [one for one in path.parent.iterdir() if one.name.endswith(".unfinished")]
    with pytest.raises(ConfigError, match="exists already"):
        made.write(path)
    path.chmod(0o640)
    with pytest.raises(ConfigError, match=r"can be read by other users \(mode 640\)"):
        JoinFile.read(path)


def test_each_join_file_has_an_id_of_its_own_also_if_written_at_once(tmp_path):
    with ThreadPoolExecutor(4) as pool:
        made = [*pool.map(lambda _: RunSecrets.invite(tmp_path, ("a:1",)), range(8))]
    assert len({one.credentials.identity for one in made}) == 8
    assert RunSecrets.read(tmp_path).invited.keys() == {one.credentials.identity for one in made}


@pytest.mark.parametrize("read", [RunSecrets.create, RunSecrets.read, lambda folder: RunSecrets.invite(folder, ("a:1",))])
def test_keys_that_other_users_can_read_are_refused_by_a_process_that_starts(tmp_path, read):
    RunSecrets.create(tmp_path)
    run_identity._refuse_public.cache_clear()  # as in another process
    (tmp_path / "secrets" / "identity.json").chmod(0o604)
    with pytest.raises(ConfigError, match=r"can be read by other users \(mode 604\).*chmod 600"):
        read(tmp_path)


def test_a_process_that_has_read_the_keys_reads_them_again_and_warns_once_if_other_users_can_too(tmp_path):
    made, path = RunSecrets.create(tmp_path), tmp_path / "secrets" / "identity.json"
    path.chmod(0o644)
    with pytest.warns(UserWarning, match="other users have access to it: chmod 600") as warned:
        assert [RunSecrets.read(tmp_path) for _ in range(3)] == [made] * 3
    assert len(warned) == 1


def test_a_run_starts_with_keys_that_the_group_of_its_volume_can_read_and_warns(tmp_path):
    made, path = RunSecrets.create(tmp_path), tmp_path / "secrets" / "identity.json"
    path.chmod(0o660)
    run_identity._refuse_public.cache_clear()  # as in another process
    with pytest.warns(UserWarning, match="its group has access to it: chmod 600") as warned:
        assert [RunSecrets.create(tmp_path), RunSecrets.read(tmp_path)] == [made] * 2
    assert len(warned) == 1


def test_a_join_file_of_another_version_is_refused_by_name(join):
    made, path = join
    path.unlink()
    replace(made, atoll="0.0.1").write(path)
    with pytest.raises(ConfigError, match=r"is of atoll 0\.0\.1, and this is atoll"):
        JoinFile.read(path)


def test_a_join_file_of_an_earlier_format_is_refused_with_advice(join):
    path = join[1]
    path.write_text(sealed({**unsealed(path.read_text()), "format": 2}))
    with pytest.raises(ConfigError, match=r"has format 2, and this atoll reads format 3.*`atoll invite DIR`"):
        JoinFile.read(path)


def cut(text):
    return text[: len(text) // 2]


def another_authority(text):
    record = json.loads(text)
    return json.dumps({**record, "fingerprint": "0" * 64})


def no_key(text):
    record = json.loads(text)
    record["credentials"]["key"] = "none"
    return json.dumps(record)


def no_address(text):
    record = unsealed(text)
    return sealed({**record, "addresses": [*record["addresses"], "127.0.0.1:65536"]})


@pytest.mark.parametrize(
    "damage", [cut, another_authority, no_address, no_key, lambda text: "[" * 9999, lambda text: "[]", lambda text: "{}"]
)
def test_a_damaged_join_file_is_refused(join, damage):
    path = join[1]
    path.write_text(damage(path.read_text()))
    with pytest.raises(ConfigError, match="is no join file, or damaged"):
        JoinFile.read(path)


def number_as_id(text):
    return sealed({**unsealed(text), "revoked": [5]})


@pytest.mark.parametrize("damage", [cut, number_as_id, lambda text: "", lambda text: "[1]", lambda text: "{}"])
def test_damaged_secrets_are_an_error_with_advice(tmp_path, damage):
    RunSecrets.create(tmp_path)
    path = tmp_path / "secrets" / "identity.json"
    path.write_text(damage(path.read_text()))
    with pytest.raises(ConfigError, match="Restore it from a copy, or remove it"):
        RunSecrets.create(tmp_path)


def test_secrets_are_not_written_through_a_link(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    os.symlink(tmp_path / "elsewhere", tmp_path / "secrets")
    with pytest.raises(ConfigError, match="It must be a folder of yours"):
        RunSecrets.create(tmp_path)
    assert not [*(tmp_path / "elsewhere").iterdir()]
