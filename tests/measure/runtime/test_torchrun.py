"""Sweeps under torchrun: one command on every node, output of rank 0 only, and resumption after a failure."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from cs_systems.record import RunRecord, read_records
from tests import forks

SCRIPT = Path(__file__).parent / "sweep_in_a_job.py"


def two_ranks(folder: Path, *names: str) -> tuple[int, str, list[RunRecord]]:
    """Return the exit status, the output and the records of a job of two ranks on this machine."""
    done = forks.torchrun(str(SCRIPT), str(folder), *names)
    return done.returncode, done.stdout, read_records(folder)[0]


@dataclass(frozen=True)
class Network:
    """Network of two nodes.

    Attributes:
        namespaces: the network namespace of each node; None: that of this process.
        interfaces: the variables that name each node's network interface.
        addresses: of each node.
        port: of the first node's rendezvous.
    """

    namespaces: Sequence[str | None]
    interfaces: list[dict[str, str]]
    addresses: list[str]
    port: int


def linked_namespaces(names: list[str], links: list[str]) -> Network | None:
    """Return two linked network namespaces, or None if they cannot be created."""

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], capture_output=True, check=True)

    if os.geteuid() != 0 or shutil.which("ip") is None:
        return None
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", links[0], "type", "veth", "peer", "name", links[1])
        for i in (0, 1):
            ip("link", "set", links[i], "netns", names[i])
            ip("-n", names[i], "addr", "add", f"10.77.0.{i + 1}/24", "dev", links[i])
            for link in ("lo", links[i]):
                ip("-n", names[i], "link", "set", link, "up")
    except subprocess.CalledProcessError:  # root in a container may lack the permission
        return None
    interfaces = [{"GLOO_SOCKET_IFNAME": link} for link in links]
    return Network(names, interfaces, ["10.77.0.1", "10.77.0.2"], 29400)


@pytest.fixture
def network() -> Iterator[Network]:
    """Yield two nodes without a common loopback device, or this machine twice if that is impossible."""
    names, links = [f"cs-{os.getpid()}-{i}" for i in (0, 1)], [f"cs{os.getpid()}v{i}" for i in (0, 1)]
    try:
        with forks.held_port() as port:
            yield linked_namespaces(names, links) or Network([None] * 2, [{}, {}], ["127.0.0.1"] * 2, port)
    finally:
        for name in names if shutil.which("ip") else ():
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def test_reserved_port_accepts_a_rendezvous_and_no_other_program() -> None:
    with forks.held_port() as port, socket.socket() as other:
        with pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        with socket.create_server(("127.0.0.1", port)), socket.create_connection(("127.0.0.1", port)):
            pass


def test_two_nodes_are_one_job(tmp_path: Path, network: Network) -> None:
    """Start two launchers with one rank each and one rendezvous port, as on two machines."""
    rendezvous = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "test"]
    cells = ["--collective", "all_reduce", "--size", "1KiB", "--world-size", "2", "1", "3", "--calls", "1"]
    command = ["-m", "cs_systems", "comm", *cells, "--warmup", "0", "--steps", "3", "--device", "cpu"]
    with ExitStack() as nodes:
        waits = []
        for i, address in enumerate(network.addresses):
            endpoint = f"{network.addresses[0]}:{network.port}"
            at = ["--rdzv-endpoint", endpoint, "--rdzv-conf", f"is_host={1 - i}", "--local-addr", address]
            words = [*forks.launcher(*rendezvous, *at), *command, "--out", str(tmp_path / str(i))]
            node = forks.started(
                *words, environment=os.environ | network.interfaces[i], namespace=network.namespaces[i]
            )
            waits.append(nodes.enter_context(node))
        done = [wait(50.0) for wait in waits]
    outputs = [node.stdout for node in done]
    assert [node.returncode for node in done] == [0, 0], done
    (written,) = tmp_path.iterdir()  # only rank 0 writes; it may be on either node
    assert sorted(map(bool, outputs)) == [False, True]
    by_ranks = {record.run_config.world_size: record for record in read_records(written)[0]}
    assert by_ranks[2].status == "ok"
    assert {row["rank"] for row in by_ranks[2].results["ranks"]} == {0, 1}
    assert by_ranks[1].status == "ok"  # started separately, like a baseline
    assert by_ranks[3].status == "unavailable"
    assert by_ranks[3].reason == "the cell needs 3 ranks, but this job has 2; start torchrun with 3 ranks"


@pytest.mark.parametrize(
    ("name", "status", "reason"),
    [
        ("rank_1_raises", "error", "rank 1 on cpu: ZeroDivisionError: the numerator was fine"),
        ("rank_1_is_killed", "killed", "rank 1 on cpu "),
        (
            "rank_1_hangs",
            "timeout",
            "rank 1 on cpu kept the others waiting for 4 s; if only slow, set timeout_s above 4, "
            "else make all ranks call the same collectives",
        ),
    ],
)
def test_cell_that_breaks_the_ranks_ends_the_job_with_its_record(
    tmp_path: Path, name: str, status: str, reason: str
) -> None:
    exit_status, output, (fine, failed) = two_ranks(tmp_path, "fine", name, "fine")
    assert exit_status != 0
    assert (fine.status, failed.status) == ("ok", status)
    assert (failed.reason or "").startswith(reason)
    assert output.splitlines()[:1] == ["0 ok"]


def test_restarted_job_resumes_and_records_the_killed_cell(tmp_path: Path) -> None:
    """Kill rank 0, which cannot write its record; the next start records the failure."""
    exit_status, _, records = two_ranks(tmp_path, "fine", "rank_0_is_killed", "fine")
    assert (exit_status != 0, [r.status for r in records]) == (True, ["ok"])
    exit_status, output, records = two_ranks(tmp_path, "fine", "rank_0_is_killed", "fine")
    assert exit_status != 0
    assert output.splitlines() == ["2 ok"]
    assert [(r.run_config.seed, r.status) for r in records] == [(0, "ok"), (1, "killed"), (2, "ok")]
    assert records[1].reason == "the job was killed while it measured this cell"


def test_equal_failure_of_all_ranks_continues_the_job(tmp_path: Path) -> None:
    exit_status, output, _ = two_ranks(tmp_path, "raises", "fine")
    assert (exit_status, output.splitlines()) == (0, ["0 error", "1 ok"])


def test_version_is_printed_once_and_ends_all_ranks() -> None:
    done = forks.torchrun("-m", "cs_systems", "--version")
    assert (done.returncode, done.stdout.count("cs-systems")) == (0, 1)
