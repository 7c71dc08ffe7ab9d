"""Keys of Inductor's cache, and its templates: less work in each process, and nothing else than torch's."""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import codecache
from torch._logging._internal import trace_log

from graph_fsdp.compat.inductor.keys import know_torch, modules_of, unlogged_keys_unprinted


@pytest.fixture
def key() -> Iterator[Any]:
    """torch's digest of its source, which this process does not know; and does as before afterwards."""
    found: Any = codecache.torch_key
    if not hasattr(found, "set"):
        pytest.skip("torch cannot be told its digest")
    found.clear()
    know_torch.cache_clear()
    yield found
    found.clear()
    know_torch.cache_clear()


def note_in(folder: Path) -> Path:
    (note,) = (folder / "graph_fsdp" / "sources").iterdir()
    return note


def know_again(key: Any, folder: Path) -> bytes:
    key.clear()
    know_torch.cache_clear()
    know_torch(folder)
    found: bytes = key()
    return found


def test_the_digest_of_torch_is_read_from_its_note(key: Any, tmp_path: Path) -> None:
    torchs = key()
    assert know_again(key, tmp_path) == torchs
    assert note_in(tmp_path).read_text() == torchs.hex()
    note_in(tmp_path).write_text("12" * 32)
    assert know_again(key, tmp_path) == bytes([0x12] * 32)


@pytest.mark.parametrize("text", ["", "12", "xy" * 32])
def test_a_note_that_is_no_digest_is_written_again(key: Any, tmp_path: Path, text: str) -> None:
    torchs = know_again(key, tmp_path)
    note_in(tmp_path).write_text(text)
    assert know_again(key, tmp_path) == torchs
    assert note_in(tmp_path).read_text() == torchs.hex()


def test_a_digest_that_is_known_stays(key: Any, tmp_path: Path) -> None:
    torchs = know_again(key, tmp_path)
    note_in(tmp_path).write_text("12" * 32)
    know_torch.cache_clear()
    know_torch(tmp_path)
    assert key() == torchs


def test_all_that_torch_reads_for_its_digest_is_looked_at(key: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read: set[str] = set()

    def opened(path: Any, mode: str) -> Any:
        read.add(str(path))
        return open(path, mode)

    monkeypatch.setattr(codecache, "open", opened, raising=False)
    key()
    looked_at = {line.rsplit(" ", 3)[0] for line in modules_of(Path(torch.__path__[0])).splitlines()}
    assert len(read) > 1000
    assert read <= looked_at


def test_a_file_that_was_changed_or_is_new_is_seen(tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    for folder in (tmp_path, inner):
        (folder / "__init__.py").write_text("1")
    found = {modules_of(tmp_path)}
    status = (inner / "__init__.py").stat()
    (inner / "__init__.py").write_text("2")
    os.utime(inner / "__init__.py", ns=(status.st_atime_ns, status.st_mtime_ns))  # as large and as old as before
    found.add(modules_of(tmp_path))
    (inner / "new.py").write_text("")
    found.add(modules_of(tmp_path))
    (inner / "new.py").unlink()
    (tmp_path / "notes.txt").write_text("no module")
    assert len(found) == 3 and modules_of(tmp_path) in found


def test_keys_are_described_where_a_log_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pickler, details = codecache.FxGraphCachePickler(torch.fx.GraphModule({}, torch.fx.Graph())), Facts()
    described = pickler.debug_lines(details)
    assert len(described) == 1
    with monkeypatch.context() as patches:
        patches.setattr(trace_log, "handlers", [logging.NullHandler()])  # TORCH_TRACE
        with unlogged_keys_unprinted():
            assert pickler.debug_lines(details) == described
    monkeypatch.setattr(trace_log, "handlers", [])
    with unlogged_keys_unprinted():
        assert pickler.debug_lines(details) == []
    level = codecache.log.level
    codecache.log.setLevel(logging.DEBUG)
    try:
        with unlogged_keys_unprinted():
            assert pickler.debug_lines(details) == described
    finally:
        codecache.log.setLevel(level)


class Facts:
    def __init__(self) -> None:
        self.phase = "forward"


TEMPLATES = """
from torch._inductor.select_algorithm import TritonTemplate
made = [template.template for template in TritonTemplate.all_templates.values()]
assert len(made) > 5 and "jinja2" not in sys.modules
import jinja2
for template in made:
    assert isinstance(template.render.__self__, jinja2.Template)
template = TritonTemplate("graph_fsdp_test", grid=None, source="{{answer}}").template
assert isinstance(template, jinja2.Template) and template.render(answer=42) == "42"
print("rendered")
"""


DECOMPOSITIONS = """
import sys
import torch
from torch._export import utils
calls = []
materialize = utils._materialize_cpp_cia_ops
utils._materialize_cpp_cia_ops = lambda: calls.append(0) or materialize()
if sys.argv[1] == "ours":
    from graph_fsdp import compat
    compat.inductor_decompositions()
else:
    import torch._inductor.lowering
from torch._inductor.decomposition import decompositions
print(len(calls), *sorted(map(str, decompositions)), "end")
"""


def run(program: str, who: str) -> list[str]:
    command = [sys.executable, "-c", program, who]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()


@pytest.fixture(scope="module")
def ours() -> list[str]:
    """What a process says that has imported decompositions as we do; it has looked at templates then, if it can."""
    return run(DECOMPOSITIONS + (TEMPLATES if importlib.util.find_spec("jinja2") else ""), "ours")


def test_templates_are_compiled_when_they_are_used(ours: list[str]) -> None:
    pytest.importorskip("jinja2")
    assert ours[-1] == "rendered"


def test_decompositions_are_those_that_torch_imports(ours: list[str]) -> None:
    found = {"ours": ours[: ours.index("end")], "torch": run(DECOMPOSITIONS, "torch")[:-1]}
    assert int(found["ours"].pop(0)) < int(found["torch"].pop(0))
    assert found["ours"] == found["torch"] and len(found["torch"]) > 500
