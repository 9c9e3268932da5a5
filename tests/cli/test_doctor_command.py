"""`atoll doctor` says on one screen what a machine has, what two machines differ in, and what to do."""

import re
import socket
import threading
import time
from types import SimpleNamespace

import pytest

from atoll.cli import doctor_command
from atoll.cli.doctor_command import Finding, compared, examine, local_findings, network_findings, unreached
from atoll.core.errors import ConfigError
from atoll.engines.machine_check import OtherMachine
from atoll.testing import network_namespaces
from tests.machines import Machine, until_said

UNAVAILABLE = network_namespaces.unavailable_reason()
SMALL = ("data.examples=512", "data.dimensions=16", "data.clusters_per_class=1", "data.eval_examples=128")
HERE = [Finding("atoll", "0.1.0"), Finding("Python", "3.11.7"), Finding("torch", "2.13.0+cpu"), Finding("data", "demo: abc")]


def other(back="", skew_s=0.1, **facts):
    return OtherMachine("192.0.2.7:29500", {one.what: one.here for one in HERE} | facts, skew_s, 0.001, back)


def advice(findings):
    return [one.advice for one in findings if one.advice]


def test_one_machine_is_described_on_one_screen_and_told_what_comes_next(capsys):
    assert not examine(None, None, "toy-sync", SMALL)
    screen = capsys.readouterr().out.splitlines()
    assert len(screen) <= 24
    for what in ("atoll", "Python", "torch", "CUDA", "extras", "interfaces", "free disk", "data"):
        assert any(line.split()[:2] == what.split()[:2] or line.split()[:1] == [what] for line in screen if line), what
    assert screen[-1].startswith(
        "What to do: nothing. To check the network to another machine: `atoll doctor --listen HOST:PORT` there"
    )


def test_a_full_disk_and_unreadable_data_are_problems(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor_command.shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 20))
    found = advice(local_findings("demo-diloco", [f"data.corpus=files:{tmp_path / 'nowhere'}"]))
    assert len(found) == 3
    assert "Free some space in this folder, where runs are written: 1.05 MB are left." in found
    assert "nowhere" in found[-1]


def test_machines_that_agree_need_nothing_done():
    assert advice([*compared(HERE, other()), *network_findings(other())]) == []
    patched = other(Python="3.11.2", torch="2.13.1+cu128")
    assert advice(compared(HERE, patched)) == [], "the same text and the same formats"


@pytest.mark.parametrize(
    ("what", "there", "says"),
    [
        ("atoll", "0.2.0", "Install the same atoll on both: this machine has 0.1.0, the other 0.2.0."),
        ("Python", "3.12.1", "Install the same Python on both"),
        ("torch", "2.8.0", "Install the same torch on both"),
        ("data", "demo: def", "The data differ (demo: abc here, demo: def there)"),
    ],
)
def test_what_machines_differ_in_is_advised_on(what, there, says):
    (found,) = advice(compared(HERE, other(**{what: there})))
    assert found.startswith(says)


ALL_EXTRAS = "plot, torchft, ray"


@pytest.mark.parametrize(
    ("here", "there", "back", "says"),
    [
        (ALL_EXTRAS, ALL_EXTRAS, "", "can run --engine processes, elastic and ray together."),
        (ALL_EXTRAS, "ray; not installed: torchft", "", "processes and ray together. elastic needs the extra torchft on both."),
        ("none; not installed: ray, torchft", ALL_EXTRAS, "", "can run --engine processes together. elastic needs"),
        (ALL_EXTRAS, ALL_EXTRAS, None, "can run --engine elastic together. --engine processes and ray connect both ways."),
        (ALL_EXTRAS, "", None, "nothing. --engine processes and ray connect both ways. elastic needs"),
    ],
)
def test_only_engines_whose_extras_both_machines_have_are_promised(monkeypatch, capsys, here, there, back, says):
    monkeypatch.setattr(doctor_command, "local_findings", lambda *given: [*HERE, Finding("extras", here)])
    asked = {}

    def ask(address, facts, listen):
        asked.update(facts)
        return other(back, extras=there)

    monkeypatch.setattr(doctor_command, "ask_machine", ask)
    assert not examine("192.0.2.7:29500", None, "toy-sync", SMALL)
    assert says in capsys.readouterr().out.splitlines()[-1]
    assert asked["extras"] == here


def test_a_one_way_network_and_wrong_clocks_are_advised_on():
    found = advice(network_findings(other(back="192.0.2.2:5: timed out", skew_s=-90.0)))
    assert "cannot connect here (192.0.2.2:5: timed out)" in found[0]
    assert "An elastic run needs one way only" in found[0]
    assert "clock is 90.00 s behind" in found[1]


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (socket.gaierror(-2, "Name or service not known"), "first.example is not known here"),
        (
            ConnectionRefusedError(111, "Connection refused"),
            "nothing listens there: on the other machine run `atoll doctor --listen",
        ),
        (TimeoutError("timed out"), "no firewall blocks the port"),
        (ValueError("it sent a line that is no JSON"), "Another program answers at first.example:29500"),
    ],
)
def test_why_a_machine_is_not_reached_decides_what_to_do(error, says):
    assert says in unreached("first.example:29500", error).advice


def test_a_name_that_is_this_machine_itself_is_pointed_out(monkeypatch):
    monkeypatch.setattr(doctor_command.socket, "gethostbyname", lambda name: "127.0.0.1")
    found = unreached("first.example:29500", ConnectionRefusedError(111, "Connection refused")).advice
    assert found.startswith("first.example is 127.0.0.1 here, which is this machine itself: correct its line in /etc/hosts")


@pytest.mark.parametrize(
    "address", ["first.example", ":29500", "first.example:0", "first.example:99999", "first.example:http", "a b@h:1"]
)
def test_an_address_is_host_and_port(address):
    with pytest.raises(ConfigError, match="it is WORD@HOST:PORT"):
        examine(address, None, "toy-sync", SMALL)


def test_one_machine_asks_another(capsys):
    def answer():
        examine(None, "127.0.0.1:0", "toy-sync", SMALL)

    thread = threading.Thread(target=answer)
    thread.start()
    heard = ""
    deadline_s = time.monotonic() + 60
    while "on the other machine: atoll doctor" not in heard:
        assert thread.is_alive(), heard
        assert time.monotonic() < deadline_s, heard
        heard += capsys.readouterr().err
    thread_address = re.search(r"atoll doctor (\S+)", heard)[1]
    examine(thread_address, "127.0.0.1:0", "toy-sync", SMALL)
    thread.join()
    out = capsys.readouterr().out
    assert out.count("the other machine") >= 2
    assert out.count("These machines can run --engine processes, elastic and ray together.") == 2


@pytest.mark.slow
@pytest.mark.skipif(UNAVAILABLE is not None, reason=str(UNAVAILABLE))
def test_two_machines_check_each_other_as_the_page_says(tmp_path):
    with network_namespaces.linked_pair() as (first, second):
        one = Machine(first, tmp_path / "one", "first.example", ["127.0.0.1 first.example"])
        two = Machine(second, tmp_path / "two", "second.example", ["127.0.0.1 second.example", f"{first.address} first.example"])
        refused = two.typed("atoll doctor first.example:29500", code=1)
        assert "nothing listens there: on the other machine run `atoll doctor --listen" in refused
        with one.started("atoll doctor --listen 10.77.0.1:29500", "screen") as answers:
            word = re.search(r"atoll doctor (\w+)@10\.77\.0\.1:29500", until_said(answers, "@10.77.0.1:29500"))[1]
            said = two.typed(f"atoll doctor {word}@first.example:29500 --listen 10.77.0.2:0")
            assert answers.wait(60) == 0, answers.log.read_text()
            for text in (said, answers.log.read_text()):
                assert re.search(r"machine +(first|second)\.example, Linux \S+ +(first|second)\.example, Linux", text)
                assert "isle" in text
                assert "What to do: nothing." in text
        assert one.listening() == two.listening() == set()
        assert "127.0.0.1" in two.typed("atoll doctor second.example:29500", code=1)
