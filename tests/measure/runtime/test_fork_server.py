"""Tests of the fork server: a forked worker has the state of a new process, and the server ends with its owner."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cs_systems import sweep
from cs_systems.config import RunConfig
from cs_systems.measure.runtime import fork_client
from cs_systems.measure.runtime.fork_client import ForkedGuardian, NoServer, server_pids
from cs_systems.measure.runtime.guardian import descendants
from cs_systems.measure.runtime.lifetime import is_running
from cs_systems.record import RunRecord
from tests.forks import own_fork_server
from tests.measure.runtime.test_survival import wait_for

pytestmark = pytest.mark.skipif(bool(fork_client.unavailable()), reason=str(fork_client.unavailable()))

REPORTS = """
import gc, os, random, resource, signal, sys, threading, warnings
import torch
def trains(config, device): return torch.nn.Linear(4, 4), torch.ones(2, 4)
def handlers():
    return {n.name: str(signal.getsignal(n)).split(" at ")[0] for n in signal.valid_signals() if hasattr(n, "name")}
class Reports:
    def __init__(self, config, device): pass
    def prepare(self): pass
    def step(self): return (("report", lambda: None),)
    def cost(self): return None
    def describe(self):
        found = dict(
            argv=[sys.argv[0], len(sys.argv)], path=sys.path, directory=os.getcwd(), handlers=handlers(),
            environment=sorted(item for item in os.environ.items() if item[0] != "PYTEST_CURRENT_TEST"),
            open=len(os.listdir("/proc/self/fd")), leads_a_session=os.getsid(0) == os.getpid(),
            limits=[resource.getrlimit(n) for n in range(10)], umask=os.umask(0o22), priority=os.nice(0),
            affinity=sorted(os.sched_getaffinity(0)), blocked=len(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
            collects=gc.isenabled(), threads=(torch.get_num_threads(), torch.get_num_interop_threads()),
            thread=threading.current_thread() is threading.main_thread(), filters=len(warnings.filters),
            streams=[(s.isatty(), s.line_buffering, s.errors) for s in (sys.stdin, sys.stdout, sys.stderr)],
            random=(random.random(), float(torch.rand(1))), compiler="torch._dynamo" in sys.modules,
            flags=str(sys.flags), cuda=torch.cuda.is_initialized(),
        )
        return {name: str(value) for name, value in found.items()} | {"pid": os.getpid()}
"""


@pytest.fixture(scope="module", autouse=True)
def new_server() -> Iterator[None]:
    """Begin with a server that has imported nothing for earlier cells."""
    with own_fork_server():
        yield


@pytest.fixture(scope="module")
def workload(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("reports") / "reports.py"
    file.write_text(REPORTS)
    return f"{file}:Reports"


def report(workload: str, **rest: Any) -> dict[str, Any]:
    (record,) = sweep([RunConfig(workload=workload, device="cpu", warmup=0, steps=1, **rest)])
    return ran(record)


def ran(record: RunRecord) -> dict[str, Any]:
    assert record.status == "ok", record.reason
    (row,) = record.results["ran"]
    return {name: value for name, value in row.items() if name not in ("seconds", "sha256")}


@pytest.fixture
def hang_up(request: pytest.FixtureRequest) -> Iterator[None]:
    """Set the starting process's handling of SIGHUP; nohup ignores it."""
    before = signal.signal(signal.SIGHUP, request.param)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hang_up")
@pytest.mark.parametrize(
    ("world_size", "hang_up"),
    [(1, signal.SIG_IGN), (1, signal.SIG_DFL), (2, signal.SIG_DFL)],  # the last two share a server with the next test
    indirect=["hang_up"],
)
def test_forked_worker_equals_a_new_process(
    world_size: int, workload: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    report(workload)  # the server runs, in another directory
    monkeypatch.chdir(tmp_path)
    forked = report(workload, world_size=world_size)
    assert len(server_pids()) == 1

    def none(*_: object) -> None:
        raise NoServer("not in this test")

    monkeypatch.setattr("cs_systems.measure.runtime.processes.fork_guardian", none)
    started = report(workload, world_size=world_size)
    assert forked.pop("pid") != started.pop("pid")
    assert forked == started
    assert str(tmp_path) in forked["directory"]
    assert forked["cuda"] == "False"


def test_one_server_serves_all_sweeps_until_inherited_state_changes_or_it_dies(
    workload: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = report(workload)
    server = fork_client._server
    monkeypatch.setenv("MASTER_PORT", "77")  # a worker does not get this
    values = {"COLUMNS": "77", "CUDA_VISIBLE_DEVICES": "77", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
        assert f"('{name}', '{value}')" in report(workload)["environment"]
    assert fork_client._server is server, "nothing reads these while it is imported"
    monkeypatch.setenv("CS_TEST_MARKER", "here")
    second = report(workload)
    assert "CS_TEST_MARKER" in second["environment"]
    assert "CS_TEST_MARKER" not in first["environment"]
    assert fork_client._server is not server
    (pid,) = filter(is_running, server_pids())
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not is_running(pid))
    replaced = report(workload)
    assert replaced["environment"] == second["environment"], "a killed server is replaced"
    assert replaced["compiler"] == "False"
    (trained,) = sweep([RunConfig(workload=f"{workload.removesuffix('Reports')}trains", device="cpu", steps=1)])
    assert trained.status == "ok", trained.reason
    assert report(workload)["compiler"] == "True", "what an optimizer imports is imported once for later workers"


def test_changes_of_inherited_state_are_found(tmp_path: Path) -> None:
    """Change each setting in a child process, so that the changes end with it."""
    program = f"""
import os, pathlib, resource
from cs_systems.measure.runtime import fork_client
file = pathlib.Path({str(tmp_path)!r}) / "a.py"
file.touch()
fork_client._PACKAGE = file.parent
def inherited(): return fork_client._inherited(dict(os.environ))
def set_limit(): resource.setrlimit(resource.RLIMIT_NOFILE, (99, 99))
for change in (
    lambda: None,
    lambda: os.umask(0o27),
    lambda: os.nice(1),
    set_limit,
    lambda: os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]),
    lambda: os.utime(file, ns=(2 * 10**18, 2 * 10**18)),
    lambda: os.environ.update(NEW="1"),
):
    before = inherited()
    change()
    after = inherited()
    print(*[name for name in before if before[name] != after[name]], sep=", ", end="; ")
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    affinity = "affinity" if len(os.sched_getaffinity(0)) > 1 else ""
    assert found == f"; umask; priority; limits; {affinity}; sources; environment; "


def test_worker_starts_without_a_server_that_cannot_start(workload: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")  # another environment needs another server
    monkeypatch.setattr("cs_systems.measure.runtime.fork_client.SERVER", [sys.executable, "-c", "raise SystemExit(1)"])
    fork_client.preload(["no_such_module"])
    assert report(workload)["pid"]
    assert not fork_client._modules, "the next server imports nothing that may have ended this one"


@pytest.mark.parametrize("number", [signal.SIGKILL, None])
def test_server_ends_with_its_owner(number: signal.Signals | None, workload: str) -> None:
    """End the owner while a child of it still holds all of its descriptors."""
    program = f"""
import os, signal, sys, time
from cs_systems import sweep
from cs_systems.config import RunConfig
[record] = sweep([RunConfig(workload={workload!r}, device="cpu", warmup=0, steps=1)])
child = os.fork()
if child == 0:
    time.sleep(600)
    os._exit(0)
print(record.status, child, flush=True)
if {number is not None}:
    time.sleep(600)
"""
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    status, child = owner.stdout.readline().split()
    assert status == "ok"
    left = descendants(owner.pid) - {int(child)}
    assert number is None or len(left) == 1, "the fork server"
    if number is not None:
        owner.send_signal(number)
    owner.wait()
    try:
        wait_for(lambda: not any(map(is_running, left)))
        assert is_running(int(child))
    finally:
        os.kill(int(child), signal.SIGKILL)
        owner.stdout.close()


def test_server_ends_with_its_owner_even_during_imports(tmp_path: Path) -> None:
    """Kill the owner long before torch is imported, which no signal or descriptor interrupts."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("import time; print('importing', flush=True); time.sleep(600)")
    program = """
import os, subprocess, sys
from cs_systems.measure.runtime.fork_client import SERVER
process = subprocess.Popen([*SERVER, "0", str(os.getpid())], stdout=sys.stdout)
print(process.pid, flush=True)
process.wait()
"""
    path = os.pathsep.join([str(tmp_path), *sys.path])
    owner = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path}
    )
    assert owner.stdout is not None
    lines = {owner.stdout.readline().strip(), owner.stdout.readline().strip()}
    assert "importing" in lines
    (pid,) = map(int, lines - {"importing"})
    owner.kill()
    owner.wait()
    wait_for(lambda: not is_running(pid))
    owner.stdout.close()


def test_server_queries_no_gpu_and_starts_no_thread() -> None:
    """Importing what workers need must not initialise CUDA, which no fork survives."""
    program = """
import gc, os
gc.disable()
os.environ["OPENBLAS_NUM_THREADS"] = "1"
import torch
def trap(name):
    def asked(*_, **__):
        raise AssertionError(f"torch.cuda.{name} while modules are imported")
    return asked
for name in ("is_available", "device_count", "init", "_lazy_init", "current_device", "get_device_properties"):
    assert hasattr(torch.cuda, name)
    setattr(torch.cuda, name, trap(name))
import cs_systems.measure.runtime.fork_server, torch._dynamo
print(len(os.listdir("/proc/self/task")), torch.cuda.is_initialized())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "1 False\n", done.stderr


def test_workers_start_as_programs_if_an_import_opens_a_gpu(
    workload: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidiactl").touch()
    (tmp_path / "opens_a_gpu.py").write_text(f"device = open({str(tmp_path / 'nvidiactl')!r})")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setattr(fork_client, "_refusal", None)
    fork_client.preload(["opens_a_gpu"])
    assert report(workload)["pid"] != report(workload)["pid"]
    assert fork_client.unavailable() == "a module has opened a GPU while it was imported, and a fork cannot use it"


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    """Open so many files that further descriptors are above those that select.select takes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip(f"a process may open {hard} files at most")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    yield
    for descriptor in opened:
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_guardian_is_waited_for_in_a_process_with_many_open_files(many_descriptors: None) -> None:
    with subprocess.Popen([sys.executable, "-IS", "-c", "input()"], stdin=subprocess.PIPE) as process:
        guardian = ForkedGuardian(process.pid)
        assert guardian.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            guardian.wait(0.01)
        process.kill()
        assert guardian.wait(20.0) == 0
        assert guardian.poll() == 0
