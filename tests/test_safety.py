"""Safe by default: nothing that is read is run, nothing that is kept can be read by others, nothing listens.

The first part reads the source, the others try what an attacker would.
"""

from __future__ import annotations

import ast
import json
import os
import pickle
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import run_ranks
from models import MLP

import graph_fsdp
from graph_fsdp import CheckpointError
from graph_fsdp.checkpoint import save
from graph_fsdp.runtime.backends.inductor import divide, own_folder

ROOT = Path(__file__).parents[1]
SOURCES = sorted(
    path for folder in ("graph_fsdp", "passes", "runtime", "examples") for path in (ROOT / folder).rglob("*.py")
)


# What the source calls


def calls() -> Iterator[tuple[str, str, ast.Call]]:
    """(file, function as written, call)."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                yield str(path.relative_to(ROOT)), ast.unparse(node.func), node


def keyword(call: ast.Call, name: str) -> Any:
    return next((ast.unparse(k.value) for k in call.keywords if k.arg == name), None)


def test_the_source_is_found() -> None:
    assert len(SOURCES) > 100 and len({file for file, _, _ in calls()}) > 100


def test_nothing_is_unpickled_but_descriptions_of_checkpoints_of_known_classes() -> None:
    modules = ("pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "yaml")
    imports = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            imports |= {str(path.relative_to(ROOT)) for name in names if name.split(".")[0] in modules}
    assert imports == {"graph_fsdp/checkpoint/metadata.py"}
    unpickled = [
        (file, name) for file, name, _ in calls() if name in ("pickle.load", "pickle.loads", "pickle.Unpickler")
    ]
    assert unpickled == []


def test_torch_load_has_weights_only() -> None:
    loads = [(file, keyword(call, "weights_only")) for file, name, call in calls() if name == "torch.load"]
    assert loads and all(value == "True" for _, value in loads), loads
    numpy = [(file, keyword(call, "allow_pickle")) for file, name, call in calls() if name in ("np.load", "numpy.load")]
    assert all(value in (None, "False") for _, value in numpy), numpy


def test_only_programs_made_here_are_executed() -> None:
    executed = {file for file, name, _ in calls() if name in ("exec", "eval", "os.system", "subprocess.run")}
    assert executed == {"runtime/executor.py"}


def test_a_monitor_alone_opens_a_socket() -> None:
    """On the port that it is given."""
    opened = [
        (file, name)
        for file, name, _ in calls()
        if name.rpartition(".")[2] in ("socket", "listen", "TCPStore", "create_server")
        or name.endswith(("TCPServer", "HTTPServer"))
    ]
    assert opened == [("graph_fsdp/monitoring/outputs.py", "MetricsHTTPServer")]


# Files of an attacker


class Payload:
    """Unpickled without care, it leaves a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


@pytest.fixture
def trap(tmp_path: Path) -> Iterator[Path]:
    """The file of a payload, which really leaves it; no reader must."""
    trap = tmp_path / "was run"
    pickle.loads(pickle.dumps(Payload(trap)))
    assert trap.exists()
    trap.unlink()
    yield trap
    assert not trap.exists(), "what a file said was run"


def saved(path: Path) -> Path:
    model = graph_fsdp.compile(MLP(), backend="eager")
    return save(path, model, extra={"step": 1}).path


def test_a_description_of_a_checkpoint_with_a_payload(tmp_path: Path, trap: Path) -> None:
    path = saved(tmp_path / "step_1")
    (path / ".metadata").write_bytes(pickle.dumps(Payload(trap)))
    (path / "checksums.json").unlink()  # an attacker would make them right
    with pytest.raises(CheckpointError, match=r"asks for (pathlib|builtins)"):
        graph_fsdp.checkpoint.load(path, graph_fsdp.compile(MLP(), backend="eager"))


def test_values_of_a_checkpoint_with_a_payload(tmp_path: Path, trap: Path) -> None:
    """What is no tensor lies in the data files, as torch.save writes it."""
    path = saved(tmp_path / "step_1")
    (path / "checksums.json").unlink()
    from graph_fsdp.checkpoint.metadata import Checkpoint

    opened = Checkpoint.open(path)
    index = next(index for index in opened.metadata.storage_data if index.fqn == "extra.structure")
    torch.save(Payload(trap), tmp_path / "payload.pt")
    payload = (tmp_path / "payload.pt").read_bytes()
    info = opened.metadata.storage_data[index]
    data = path / info.relative_path
    info.offset, info.length = data.stat().st_size, len(payload)
    data.write_bytes(data.read_bytes() + payload)
    (path / ".metadata").write_bytes(pickle.dumps(opened.metadata))
    with pytest.raises(CheckpointError, match="cannot be read"):
        graph_fsdp.checkpoint.load(path, graph_fsdp.compile(MLP(), backend="eager"))


def test_a_profile_with_a_payload(tmp_path: Path, trap: Path) -> None:
    (tmp_path / "profile.json").write_bytes(pickle.dumps(Payload(trap)))
    with pytest.raises(ValueError, match="is not a saved profile"):
        graph_fsdp.Profile.load(tmp_path / "profile.json")


def test_weights_with_a_payload(tmp_path: Path, trap: Path) -> None:
    pytest.importorskip("safetensors")
    torch.save(Payload(trap), tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError):
        graph_fsdp.checkpoint.load_safetensors(
            graph_fsdp.compile(MLP(), backend="eager"), tmp_path / "model.safetensors"
        )


def test_a_model_to_plan_with_a_payload(tmp_path: Path, trap: Path) -> None:
    from graph_fsdp.cli.main import main

    (tmp_path / "config.json").write_bytes(pickle.dumps(Payload(trap)))
    assert main(["plan", str(tmp_path / "config.json"), "--mesh", "2", "--hardware", "h100"]) == 2


def test_text_of_a_model_does_not_become_a_part_of_the_page(tmp_path: Path) -> None:
    """Names of classes and lines of source are shown in the browser."""

    class Named(MLP):
        pass

    Named.__name__ = Named.__qualname__ = "<script>alert(1)</script>"
    model = graph_fsdp.compile(Named(), backend="eager")
    model(torch.ones(4, 16)).sum().backward()
    graph_fsdp.inspect(model).save(tmp_path / "report.html")
    assert "<script>alert(1)" not in (tmp_path / "report.html").read_text()


# What is left on the disk


def modes(folder: Path) -> set[int]:
    """Of all that is in a folder, and of itself, without what others must not do."""
    return {stat.S_IMODE(path.stat().st_mode) & 0o077 for path in (folder, *folder.rglob("*"))}


@pytest.fixture
def anything_goes() -> Iterator[None]:
    """Files of this process can be read and written by everyone, unless it says otherwise."""
    before = os.umask(0)
    yield
    os.umask(before)


def test_checkpoints_are_the_users(tmp_path: Path, anything_goes: None) -> None:
    assert modes(saved(tmp_path / "step_1")) == {0}


def test_locks_are_the_users(tmp_path: Path, anything_goes: None) -> None:
    seen: list[set[int]] = []
    folder = tmp_path / "graph_fsdp"
    divide([("task", lambda: seen.append(modes(folder)))], folder)
    assert seen == [{0}]


COMPILE = """
import torch
from torch._inductor import config
import graph_fsdp
config.cpp_cache_precompile_headers = config.cpp.vec_isa_ok = False  # which take longer than the model
model = graph_fsdp.compile(torch.nn.Sequential(torch.nn.Linear(16, 4), torch.nn.Tanh()), backend="inductor")
with torch.no_grad():
    model(torch.ones(4, 16))
"""


def compile_with(temporary: Path) -> subprocess.CompletedProcess[str]:
    """A process that finds no caches, whose umask lets everyone write."""
    environment = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": str(ROOT / "tests"), "OMP_NUM_THREADS": "1"}
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
    return subprocess.run(
        [sys.executable, "-c", COMPILE], env=environment, umask=0, capture_output=True, text=True, timeout=600
    )


@pytest.mark.long
def test_the_default_cache_of_compiled_code_is_the_users(tmp_path: Path) -> None:
    done = compile_with(tmp_path)
    assert done.returncode == 0, done.stderr
    (cache,) = tmp_path.glob("torchinductor_*")
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert list(cache.rglob("*.so")), "kernels are in it, and in no other place"


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root may make another user's folder")
def test_a_cache_that_another_user_has_made_is_refused(tmp_path: Path) -> None:
    own_folder(tmp_path / "mine")
    os.chown(tmp_path / "mine", 12345, 12345)
    with pytest.raises(PermissionError, match=r"belongs to user 12345.*TORCHINDUCTOR_CACHE_DIR"):
        own_folder(tmp_path / "mine")


def test_a_cache_that_is_open_to_others_is_closed(tmp_path: Path, anything_goes: None) -> None:
    (tmp_path / "cache").mkdir()
    own_folder(tmp_path / "cache")
    assert stat.S_IMODE((tmp_path / "cache").stat().st_mode) == 0o700


# Ports


def listening() -> set[str]:
    """Local addresses at which this process accepts connections, as the kernel has them."""
    own = {os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if _is_open(name)}
    found = set()
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        if not os.path.exists(table):
            continue
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                found.add(fields[1])
    return found


def _is_open(name: str) -> bool:
    return os.path.islink(f"/proc/self/fd/{name}")


linux = pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's tables")


@linux
def test_a_listening_socket_would_be_found() -> None:
    before = listening()
    with socket.create_server(("127.0.0.1", 0)):
        assert len(listening() - before) == 1


@linux
def test_a_process_alone_listens_nowhere(tmp_path: Path) -> None:
    before = listening()
    model = graph_fsdp.compile(MLP(), backend="eager")
    with graph_fsdp.monitor(model, path=tmp_path / "metrics.prom"):
        model(torch.ones(4, 16)).sum().backward()
    report = graph_fsdp.inspect(model)
    report.save(tmp_path / "report.html")
    save(tmp_path / "step_1", model)
    assert listening() == before


@linux
def test_a_monitor_with_a_port_listens_to_this_machine_alone() -> None:
    before = listening()
    with graph_fsdp.monitor(graph_fsdp.compile(MLP(), backend="eager"), port=0) as watch:
        assert watch.address is not None
        (opened,) = listening() - before
        address, _, port = opened.rpartition(":")
        assert (address, int(port, 16)) == ("0100007F", watch.address[1])
    assert listening() == before


def listen_on_ranks() -> tuple[list[str], list[str]]:
    dist.barrier()
    before = listening()
    model = graph_fsdp.compile(MLP(), backend="eager")
    for _ in range(3):
        model(torch.ones(4, 16)).sum().backward()
    return sorted(before), sorted(listening())


@linux
def test_ranks_listen_where_their_process_group_does_and_nowhere_else() -> None:
    for before, after in run_ranks(listen_on_ranks, 2):
        assert after == before


def test_a_saved_report_is_no_program(tmp_path: Path) -> None:
    """Traces are JSON."""
    model = graph_fsdp.compile(MLP(), backend="eager")
    model(torch.ones(4, 16)).sum().backward()
    graph_fsdp.inspect(model).save_trace(tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text())
