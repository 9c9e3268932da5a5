"""The page "Two sites over the internet", typed literally in network namespaces: a public machine, and a site behind NAT."""

import json
import os
import re
import signal
import subprocess
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from atoll.core.events import Attended, Leased
from atoll.telemetry.event_log import read_events
from atoll.testing import network_namespaces
from tests.machines import Machine, with_settings

PAGE = Path(__file__).parents[3] / "docs" / "two_sites.md"
PATIENCE_S = 180.0
SMALL = (
    "model.hidden=8",
    "data.examples=512",
    "data.dimensions=16",
    "data.clusters_per_class=1",
    "data.eval_examples=128",
    "algorithm.inner_steps=2",
    "train.steps=20000",
    "train.warm_start_steps=0",
    "train.batch_size=8",
    "cluster.step_time_s=[1.0]",
    "engine.step_delay=0.1",
    "keep.evaluate_every=10000",
)


UNAVAILABLE = network_namespaces.unavailable_reason(nat=True)
NO_NAMESPACES = network_namespaces.unavailable_reason()
pytestmark = pytest.mark.slow
with_nat = pytest.mark.skipif(UNAVAILABLE is not None, reason=str(UNAVAILABLE))


def page_commands():
    """The first three commands of the page: run, invite, join."""
    blocks = re.findall(r"```sh\n(.*?)\n```", PAGE.read_text(), flags=re.DOTALL)
    return blocks[:3]


def page_lines(*starts):
    """The commands of the page that begin so."""
    return [re.search(rf"^{re.escape(start)}.*$", PAGE.read_text(), flags=re.MULTILINE)[0] for start in starts]


def tool(*words):
    subprocess.run([network_namespaces._found(words[0]), *words[1:]], check=True)


def events(folder, kind):
    log = folder / "events.jsonl"
    return [event for event in read_events(log) if isinstance(event, kind)] if log.exists() else []


def until(condition, what, process, *logs):
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        told = [path.read_text()[-3000:] for path in logs if path.exists()]
        assert process.poll() is None, f"it ended before there was {what}: {told}"
        assert time.monotonic() < deadline_s, f"there was never {what}: {told}"
        time.sleep(0.05)


def rendezvous_of(folder):
    """The process of the gateway."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = path.read_bytes().decode(errors="replace").split("\0")
            if words[1:4] == ["-m", "atoll", "rendezvous"] and Path(os.readlink(path.parent / "cwd")) == folder.parent:
                return int(path.parent.name)
    raise AssertionError("there is no rendezvous")


def participating(folder):
    found = events(folder, Attended)
    return found[-1].participating if found else 0


@with_nat
def test_the_first_machine_cannot_send_and_the_run_goes_on_over_a_second_public_address_until_it_can_again(tmp_path):
    """The others see what they would see if it had lost its power for good."""
    run, _, join = page_commands()
    invite_standby, stand_by, invite = page_lines(
        "atoll invite run --standby", "atoll run --join site-c.json", "atoll invite run --out site-b.json"
    )
    small = " ".join(f"--set '{setting}'" for setting in SMALL)
    with network_namespaces.site_behind_nat() as (public, second, behind):
        here, keeper, there = (
            Machine(one, tmp_path / name) for one, name in ((public, "here"), (second, "keeper"), (behind, "there"))
        )
        folder, copy = here.folder / "run", keeper.folder / "copy"
        logs = [here.folder / "run.log", keeper.folder / "keeper.log", there.folder / "join.log"]
        one_island = run.replace("--processes 2", "--processes 1")  # the others are the majority
        with here.started(f"{one_island} {small}", "run.log") as process:
            until(lambda: participating(folder) == 1, "a commit of one island", process, *logs)
            here.typed(f"{invite_standby} && {invite}")
            for machine, name in ((keeper, "site-c.json"), (there, "site-b.json")):
                (machine.folder / name).write_bytes((here.folder / name).read_bytes())
                (machine.folder / name).chmod(0o600)
            with keeper.started(stand_by, "keeper.log") as keeping, there.started(join, "join.log"):
                until(lambda: participating(folder) == 3, "a commit of three", process, *logs)
                assert keeper.listening() == {29400}, "one open port"
                seen = len(events(folder, Attended))
                until(lambda: len(events(folder, Attended)) > seen + 5, "further commits", process, *logs)
                public.drop_packets()  # it still receives, and no connection is closed
                lost = events(folder, Attended)[-1].round
                later = lambda: [one for one in events(copy, Attended) if one.round > lost + 1]  # noqa: E731
                until(lambda: len(later()) > 5, "commits over the second address", keeping, *logs)
                assert {one.participating for one in later()[:5]} == {2}
                with there.started(join, "again.log"):
                    until(lambda: participating(copy) == 3, "a commit with a new joiner", keeping, there.folder / "again.log")
                until(lambda: events(folder, Attended)[-1].round <= lost + 1, "a side of the first machine that waits", process)
                public.shape(None)
                again = lambda: [one for one in events(folder, Attended) if one.round > lost + 1 and one.participating == 3]  # noqa: E731
                until(again, "commits of all three, over the first address", process, *logs)
    assert "waits: " in logs[0].read_text(), "the first machine is the smaller side"


@with_nat
def test_a_first_machine_behind_a_router_is_joined_at_the_address_that_it_advertises(tmp_path):
    _, invite, join = page_commands()
    run = re.search(r"^atoll run .*engine\.advertise.*$", PAGE.read_text(), flags=re.MULTILINE)[0]
    address, port = re.search(r"engine\.advertise=([0-9.]+):(\d+)", run).groups()
    with network_namespaces.site_behind_nat() as (public, _, behind):
        router = ["ip", "netns", "exec", behind.name.removesuffix("site") + "router", network_namespaces._found("nft")]
        tool("ip", "-n", router[3], "addr", "add", f"{address}/32", "dev", "outside")
        tool("ip", "-n", public.name, "route", "add", address, "via", "203.0.113.9")
        tool(*router, "add chain ip nat forwarded { type nat hook prerouting priority -100 ; }")
        tool(*router, f"add rule ip nat forwarded ip daddr {address} tcp dport {port} dnat to {behind.address}:{port}")
        tool(*router, f"add rule ip filter forward oifname inside tcp dport {port} accept")
        here, there = Machine(behind, tmp_path / "here"), Machine(public, tmp_path / "there")
        folder, logs = here.folder / "run", [here.folder / "run.log", there.folder / "join.log"]
        with here.started(with_settings(f"{run} --out run", SMALL), "run.log") as process:
            until(lambda: participating(folder) == 2, "a commit of two islands", process, *logs)
            here.typed(invite)
            (there.folder / "site-b.json").write_bytes((here.folder / "site-b.json").read_bytes())
            (there.folder / "site-b.json").chmod(0o600)
            with there.started(join, "join.log"):
                until(lambda: participating(folder) == 3, "a commit with the other site", process, *logs)
                assert here.listening() == {int(port)}, "one open port"
                assert not there.listening()


@pytest.mark.skipif(NO_NAMESPACES is not None, reason=str(NO_NAMESPACES))
def test_machines_of_one_vpn_join_by_address_in_a_trusted_network(tmp_path):
    """The tunnel is a plain link here: what a VPN encrypts is not tested."""
    run, join = page_lines("atoll run toy-sync --elastic --processes 2 --set engine.listen=10.8.0.1", "atoll run --join 10.8.0.1")
    with network_namespaces.linked_pair() as machines:
        for number, machine in enumerate(machines, 1):
            tool("ip", "-n", machine.name, "addr", "add", f"10.8.0.{number}/24", "dev", machine.device)
        here, there = (Machine(one, tmp_path / name) for one, name in zip(machines, ("here", "there"), strict=True))
        folder, logs = here.folder / "run", [here.folder / "run.log", there.folder / "join.log"]
        with here.started(with_settings(f"{run} --out run", SMALL), "run.log") as process:
            until(lambda: participating(folder) == 2, "a commit of two islands", process, *logs)
            with there.started(join, "join.log"):
                until(lambda: participating(folder) == 3, "a commit of both machines", process, *logs)
        assert "every machine that reaches the ports of 10.8.0.1 can read, replace and stop this run" in logs[0].read_text()


@with_nat
def test_a_site_behind_nat_joins_by_dialling_out_is_killed_and_rejoins(tmp_path):
    run, invite, join = page_commands()
    with network_namespaces.site_behind_nat() as (public, _, behind):
        here, there = Machine(public, tmp_path / "here"), Machine(behind, tmp_path / "there")
        folder = here.folder / "run"
        logs = [here.folder / "run.log", *(folder / "logs" / f"{name}.log" for name in ("island-0000", "lighthouse"))]
        with here.started(with_settings(run, SMALL), "run.log") as process:
            until(lambda: participating(folder) == 2, "a commit of two islands", process, *logs)
            here.typed(invite)
            assert here.listening() == {29400}, "one open port"
            content = (here.folder / "site-b.json").read_bytes()
            (there.folder / "site-b.json").write_bytes(content)
            assert "chmod 600" in there.typed(join, code=2)
            (there.folder / "site-b.json").chmod(0o600)
            with there.started(join, "join.log") as joiner:
                until(
                    lambda: participating(folder) == 3,
                    "a commit with the site behind NAT",
                    process,
                    there.folder / "join.log",
                    *logs,
                )
                assert not there.listening(), "no open port behind NAT"
                os.kill(rendezvous_of(folder), signal.SIGKILL)
                seen = len(events(folder, Attended))
                again = lambda: any(one.participating == 3 for one in events(folder, Attended)[seen + 3 :])  # noqa: E731
                until(again, "a commit of three after the gateway was killed", process, there.folder / "join.log", *logs)
                os.killpg(joiner.pid, signal.SIGKILL)
                until(lambda: participating(folder) == 2, "a commit without it", process, *logs)
            with there.started(join, "again.log") as joiner:
                until(lambda: participating(folder) == 3, "a commit with it again", process, there.folder / "again.log", *logs)
                identity = json.loads(content)["credentials"]["identity"]
                here.typed(f"atoll invite run --revoke {identity}")
                assert joiner.wait(PATIENCE_S) == 2
                assert f"the join file {identity} was revoked" in (there.folder / "again.log").read_text()
                until(lambda: participating(folder) == 2, "a commit without the revoked one", process, *logs)
            process.send_signal(signal.SIGINT)
            assert process.wait(PATIENCE_S) == 130, logs[0].read_text()
    units = Counter(tuple(unit[1:]) for event in events(folder, Leased) for unit in event.delivered)
    assert set(units.values()) == {1}, "every unit of data is in exactly one commit"
    assert not any("torchft::" in path.read_text() for path in (logs[0], *there.folder.glob("*.log")))
    joined = "".join(path.read_text() for path in there.folder.glob("atoll-*.log"))
    digests = [set(re.findall(r"committed (round \d+ of epoch \d+ as \w+)", text)) for text in (logs[1].read_text(), joined)]
    assert digests[1], "the site behind NAT committed"
    assert digests[1] <= digests[0], "with the same bits"
