"""A standby rendezvous behind a gateway of its own: islands change to it when the run's own is lost; revoked machines cannot."""

import socket
import threading
import time
from contextlib import ExitStack, closing, suppress
from dataclasses import replace

import pytest

from atoll import recipes
from atoll.core.config.overrides import override
from atoll.core.errors import ConfigError
from atoll.core.verified_files import sealed
from atoll.engines.elastic import rendezvous, standby_rendezvous as module
from atoll.engines.elastic.direct_network import DirectNetwork
from atoll.engines.elastic.gateway import Gateway
from atoll.engines.elastic.gateway_client import GatewayClient, GatewayNetwork, joiner_network
from atoll.engines.elastic.gateway_protocol import GatewayRefused, WrongGateway
from atoll.engines.elastic.launch import Joiner, fetch_join_info, find_run
from atoll.engines.elastic.rendezvous import Registry, RegistryClient, Rendezvous
from atoll.engines.elastic.run_identity import RunSecrets
from atoll.engines.elastic.snapshot_server import IslandPhase, IslandStatus, SnapshotServer, query_status
from atoll.engines.elastic.spec import Elastic, JoinInfo
from atoll.engines.elastic.standby_rendezvous import SecuredStandby, TrustedStandby, former_port
from atoll.engines.network_interfaces import free_port

HOST, LIMIT_S = "127.0.0.1", 20.0


class FirstMachine:
    """The run's own rendezvous and gateway."""

    def __init__(self, folder):
        pytest.importorskip("torchft")
        folder.mkdir()
        RunSecrets.create(folder)
        self.folder = folder
        spec = Elastic(processes=1, advertise=f"{HOST}:1")
        registry, lighthouse = (f"{HOST}:{free_port(HOST)}" for _ in range(2))
        run = spec.fitted(recipes.ALL["toy-sync"]())
        self.info = JoinInfo(run, spec, lighthouse, registry, RunSecrets.read(folder).credentials.run_id)
        self.rendezvous = Rendezvous(self.info, registry)
        ports = {"registry": int(registry.rpartition(":")[2]), "lighthouse": int(lighthouse.rpartition(":")[2])}
        self.gateway = Gateway(lambda: RunSecrets.read(folder), f"{HOST}:0", ports, lambda text: None)

    def invite(self, standby=""):
        return RunSecrets.invite(self.folder, (self.gateway.address,), standby, self.info.run_digest)

    def revoke(self, file):
        RunSecrets.revoke(self.folder, file.credentials.identity)
        self.rendezvous.set_revoked(RunSecrets.read(self.folder).revoked)

    def close(self):
        self.gateway.close()
        self.rendezvous.close()


@pytest.fixture
def first(tmp_path):
    with closing(FirstMachine(tmp_path / "run")) as one:
        yield one


@pytest.fixture
def keeper(first, tmp_path, monkeypatch):
    """The network of a machine that runs a standby, and its standby."""
    monkeypatch.setattr(module, "_FETCH_S", 0.05)
    listen = f"{HOST}:{free_port(HOST)}"
    file = first.invite(standby=listen)
    (tmp_path / "copy").mkdir()
    with ExitStack() as stack:
        network = stack.enter_context(closing(joiner_network(file, "keeper", pytest.fail)))
        standby = SecuredStandby(listen, first.info, network, file, tmp_path / "copy", lambda text: None)
        stack.callback(standby.close)
        yield network, standby


def wait_until(condition):
    deadline_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def server_of(credentials):
    """The address of a TLS server that shows this certificate."""
    server = socket.create_server((HOST, 0))

    def serve():
        with server, suppress(OSError):
            while True:
                with suppress(OSError), server.accept()[0] as connection:
                    credentials.server_context().wrap_socket(connection, server_side=True).close()

    threading.Thread(target=serve, daemon=True).start()
    return f"{HOST}:{server.getsockname()[1]}"


def test_a_standby_poses_neither_as_the_run_nor_as_another_standby_and_other_machines_pose_as_none(first):
    one, two, member = first.invite("192.0.2.1:7000"), first.invite("192.0.2.2:7000"), first.invite()
    ids = [file.credentials.identity for file in (one, two, member)]

    def error_of(address):
        with pytest.raises((OSError, ConfigError)) as caught:
            GatewayClient(lambda: member.credentials, [address], "box").open("registry", LIMIT_S)
        return caught.value

    at = server_of(one.credentials)
    assert isinstance(error_of(at), WrongGateway), "as the run's own gateway"
    assert isinstance(error_of(f"{ids[1]}@{at}"), WrongGateway), "as another standby"
    assert not isinstance(error_of(f"{ids[0]}@{at}"), WrongGateway), "its certificate is accepted, though it is no gateway"
    assert isinstance(error_of(f"{ids[2]}@{server_of(member.credentials)}"), WrongGateway), "a join file that allows no standby"


def test_later_join_files_name_the_standbys_that_are_not_revoked(first):
    one, two = first.invite("192.0.2.1:7000"), first.invite("192.0.2.2:7000")
    first.revoke(one)
    names = [f"{file.credentials.identity}@{file.standby}" for file in (one, two)]
    assert two.addresses == (first.gateway.address, names[0])
    assert first.invite().addresses == (first.gateway.address, names[1])


def test_a_joiner_with_a_join_file_trains_no_other_run_than_that_of_the_file(first):
    """A member overwrites what the run's rendezvous publishes, with other data and the right id."""
    file = first.invite()

    def found(published):
        RegistryClient(first.info.registry)._ask(lambda store: store.set("join_info", published.to_text()))
        info, network = find_run("the run", "box", None, Joiner(file), pytest.fail)
        network.close()
        return info

    assert found(first.info) == first.info
    with pytest.raises(ConfigError, match="not the Run that the join file was written for"):
        found(replace(first.info, run=override(first.info.run, ["data.examples=77"])))
    resumed = replace(first.info, spec=replace(first.info.spec, quorum_timeout_s=7.0))
    assert found(resumed) == resumed


@pytest.mark.parametrize("standby", ["x", "192.0.2.1:7000", "0123456789ab@192.0.2.1", "0123456789ab@192.0.2.1:0", "../x@box:1"])
def test_what_names_no_standby_is_refused(first, standby):
    with closing(joiner_network(first.invite(), "box", pytest.fail)) as network, pytest.raises(ConfigError, match="no standby"):
        network.place(standby)


def test_a_forgotten_standby_leaves_no_thread_and_no_client_unless_it_is_the_present_one(first):
    def threads():
        return [one for one in threading.enumerate() if one.name.startswith(("gateway streams", "forwards to"))]

    with closing(joiner_network(first.invite(), "box", pytest.fail)) as network:
        network.serve(lambda stream: stream.close())
        before, standby = {*threads()}, f"0123456789ab@{HOST}:{free_port(HOST)}"
        registry, _ = network.place(standby)
        added = {*threads()} - before
        assert len(added) == 6
        network.use(registry)
        network.forget(standby)
        assert network.place(standby)[0] == registry
        network.use(network._first[0])
        network.forget(standby)
        assert registry not in network.registries
        assert not network.reaches(registry)
        wait_until(lambda: not added.intersection(threads()))


def test_islands_change_to_the_standby_reach_each_other_through_it_and_joiners_find_the_run_there(first, keeper, monkeypatch):
    monkeypatch.setattr(rendezvous, "PROBE_S", 0.05)
    monkeypatch.setattr(rendezvous, "SWITCH_S", 0.3)
    monkeypatch.setattr(rendezvous, "_REQUEST_LIMIT_S", 0.5)
    network, standby = keeper
    run_id, late = network.run_id, first.invite()
    moves = {"keeper": [], "box": []}
    with ExitStack() as stack:
        # Its join file is as new as the keeper's, so it learns of the standby from the keeper's status.
        networks = {"keeper": network, "box": joiner_network(first.invite(), "box", pytest.fail)}
        networks["box"] = stack.enter_context(closing(GatewayNetwork(networks["box"]._client, run_id, refused=pytest.fail)))
        for name, one in networks.items():
            status = IslandStatus(name, False, one.address_of(0), IslandPhase.JOINED, run=run_id)
            status.standby = standby.name if name == "keeper" else ""
            server = stack.enter_context(closing(SnapshotServer(HOST, status.to_json, network=one)))
            one.serve(server.adopt)
            registry = stack.enter_context(closing(Registry(one, status, first=one.places(first.info))))
            registry.on_move = moves[name].append
        wait_until(lambda: len(networks["box"]._clients) == 2)
        first.close()
        wait_until(lambda: all(moves.values()))
        assert networks["box"].registry != networks["box"]._first[0]
        asked = query_status("keeper", "island:keeper", LIMIT_S, networks["box"])
        assert asked is not None
        assert asked.name == "keeper"
        joining = stack.enter_context(closing(joiner_network(late, "late", pytest.fail)))
        info, found = fetch_join_info(joining.registries, LIMIT_S, run_id, joining)
        assert info.run == first.info.run
        assert found != joining.registry, "the run's own, which is lost"
        joining.use(found)
        assert query_status("box", "island:box", LIMIT_S, joining) is not None


def test_a_standby_refuses_whom_the_run_has_revoked_also_when_it_starts_again_without_the_run(first, keeper, tmp_path):
    network, standby = keeper
    good, bad = first.invite(), first.invite()
    first.revoke(bad)
    wait_until((tmp_path / "copy" / "revoked.json").exists)

    def opened(file):
        GatewayClient(lambda: file.credentials, [standby.name], "box").open("registry", LIMIT_S).close()

    opened(good)
    with pytest.raises(GatewayRefused, match="was revoked"):
        opened(bad)
    standby.close()
    first.close()
    file = network._client.credentials()
    again = replace(good, credentials=file, standby=standby.dialled)
    with closing(SecuredStandby(standby.dialled, first.info, network, again, tmp_path / "copy", lambda text: None)):
        opened(good)
        with pytest.raises(GatewayRefused, match="was revoked"):
            opened(bad)
    (tmp_path / "copy" / "revoked.json").write_text(sealed({"revoked": ["?"]}))
    with pytest.raises(ConfigError, match=r"revoked\.json cannot be read \(ValueError: it holds no ids of join files\)"):
        SecuredStandby(standby.dialled, first.info, network, again, tmp_path / "copy", lambda text: None)


def test_islands_leave_a_standby_that_is_revoked(first, keeper):
    _, standby = keeper
    with closing(joiner_network(first.invite(), "box", pytest.fail)) as network:
        network.serve(lambda stream: pytest.fail("it is handed out"))
        wait_until(lambda: "box" in standby._gateway._islands)
        network.revoke([standby.name.partition("@")[0]])
        wait_until(lambda: "box" not in standby._gateway._islands)
        (client,) = [one for one in network._clients.values() if one is not network._client]
        with pytest.raises(WrongGateway, match="was revoked"):
            client.open("registry", LIMIT_S)
        network.check()


def test_a_standby_of_a_trusted_network_keeps_the_port_of_its_lighthouse(tmp_path):
    pytest.importorskip("torchft")
    spec = Elastic(processes=1)
    info = JoinInfo(spec.fitted(recipes.ALL["toy-sync"]()), spec, f"{HOST}:1")

    def lighthouse():
        with closing(TrustedStandby(f"{HOST}:0", info, DirectNetwork(HOST, f"{HOST}:2"), tmp_path)) as standby:
            return standby.name.partition(" ")[2]

    assert lighthouse() == lighthouse() == f"{HOST}:{former_port(tmp_path)}"
    (tmp_path / "lighthouse.json").write_text(sealed({"port": 1 << 16}))
    with pytest.raises(ConfigError, match=r"lighthouse\.json cannot be read \(ValueError: it holds no port\)\. Remove it"):
        lighthouse()
