"""Inductor's C++ kernels of several graphs are built together."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models import GPT
from torch import Tensor, nn
from torch._inductor.async_compile import AsyncCompile, get_compile_threads
from torch._inductor.cpu_vec_isa import VecISA, valid_vec_isa_list
from torch.distributed.tensor import DTensor

import graph_fsdp
from graph_fsdp.compat.inductor import cpp as compat_cpp
from graph_fsdp.compat.inductor import probes
from graph_fsdp.compat.inductor.probes import remembered_probes

PLUS = 'extern "C" void kernel(const float* x, float* out) {{ out[0] = x[0] + {}.0f; {} }}'


def plus(number: int, more: str = "") -> compat_cpp.Kernel:
    source = "#include <torch/csrc/inductor/cpp_prefix.h>\n" + PLUS.format(number, more)
    return compat_cpp.Kernel(["const float*", "float*"], source)


def result(kernel: compat_cpp.Kernel) -> float:
    out = torch.zeros(1)
    assert kernel.function is not None
    kernel.function(torch.ones(1), out)
    return out.item()


@pytest.fixture
def libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where Inductor keeps what it builds: nothing yet."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def plain_kernels() -> Iterator[None]:
    """Kernels are built without vectors and precompiled headers, which an empty folder is long without."""
    with torch._inductor.config.patch({"cpp.vec_isa_ok": False, "cpp_cache_precompile_headers": False}):
        yield


def gradients(model: nn.Module, tokens: Tensor) -> list[Tensor]:
    model(tokens).square().mean().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def whole(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


@pytest.mark.long
def test_all_kernels_of_a_model_are_in_few_libraries_and_compute_the_same(libraries: Path) -> None:
    tokens = torch.arange(8).expand(2, 8)
    plain = GPT(depth=1)
    model = copy.deepcopy(plain)
    graph_fsdp.compile(model)
    for found, expected in zip(gradients(model, tokens), gradients(plain, tokens), strict=True):
        torch.testing.assert_close(whole(found), expected)
    kernels = sum(path.read_text().count("async_compile.cpp_pybinding(") for path in libraries.rglob("*.py"))
    built = list(libraries.rglob("*.main.so"))
    assert kernels >= 6 and len(built) <= max(1, min(get_compile_threads(), kernels // 6))


@pytest.mark.long
def test_a_process_with_other_vectors_does_not_take_what_the_cache_has(
    libraries: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compiled_graphs(capability: str | None) -> int:
        """Compile a model as a process does that is told which instructions it has; how many graphs are kept then."""
        if capability is not None:
            monkeypatch.setenv("ATEN_CPU_CAPABILITY", capability)
        else:
            monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
        torch._dynamo.reset()
        model = nn.LayerNorm(40)
        graph_fsdp.compile(model)
        model(torch.ones(2, 40))
        return len([path for path in (libraries / "fxgraph").rglob("*") if path.is_file()])

    first = compiled_graphs("default")
    assert first > 0 and compiled_graphs("default") == first, "it is in the cache"
    if valid_vec_isa_list():
        assert compiled_graphs(None) == 2 * first


@pytest.mark.usefixtures("plain_kernels")
def test_a_kernel_that_is_wrong_among_others_is_built_by_itself(
    libraries: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kernels = [plus(1), plus(2, "auto self = &::kernel; (void)self;")]  # which is not its name in a namespace
    with caplog.at_level(logging.INFO, logger="graph_fsdp"):
        compat_cpp.build(kernels)
    assert [result(kernel) for kernel in kernels] == [2.0, 3.0]
    assert "2 kernels are built one by one" in caplog.text


@pytest.mark.usefixtures("plain_kernels")
def test_equal_kernels_are_built_once_and_what_is_left_by_an_error_when_it_is_called(libraries: Path) -> None:
    scope: dict[str, Any] = {}
    with pytest.raises(KeyError), compat_cpp.built_together():
        for name in ("first", "second"):
            kernel = plus(1)
            scope[name] = AsyncCompile().cpp_pybinding(kernel.argument_types, kernel.source)
        raise KeyError
    out = torch.zeros(1)
    assert scope["first"] is scope["second"] and not list(libraries.rglob("*.main.so"))
    scope["first"](torch.ones(1), out)
    assert out.item() == 2.0


# What is remembered of a host


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The libraries that a child process has been asked to load; those can be loaded whose text says so."""
    asked: list[str] = []

    def probe(_: Any, library: str) -> bool:
        asked.append(library)
        return "loads" in Path(library).read_text()

    if not hasattr(VecISA, "_probe_load"):
        pytest.skip("torch compiles and loads in one function")
    monkeypatch.setattr(VecISA, "_probe_load", probe)
    return asked


def can_be_loaded(library: Path) -> bool:
    with remembered_probes():
        return torch._inductor.cpu_vec_isa.VecISA._probe_load(VecISA(), str(library))


def test_a_library_is_loaded_in_a_child_once_on_a_host(tmp_path: Path, tried: list[str]) -> None:
    library = tmp_path / "vectors.so"
    library.write_text("loads")
    assert can_be_loaded(library) and can_be_loaded(library) and len(tried) == 1
    with remembered_probes():
        pass
    assert torch._inductor.cpu_vec_isa.VecISA._probe_load(VecISA(), str(library)) and len(tried) == 2, (
        "Inductor's own is in its place again"
    )


def test_a_library_that_cannot_be_loaded_is_tried_each_time(tmp_path: Path, tried: list[str]) -> None:
    library = tmp_path / "vectors.so"
    library.write_text("does not")
    assert not can_be_loaded(library) and not can_be_loaded(library) and len(tried) == 2


@pytest.mark.parametrize("what", ["library", "processor", "paths", "Python", "torch", "note"])
def test_a_library_is_tried_again_where_anything_differs(
    tmp_path: Path, tried: list[str], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    library = tmp_path / "vectors.so"
    library.write_text("loads")
    assert can_be_loaded(library)
    match what:
        case "library":
            library.write_text("cannot be")
        case "processor":
            monkeypatch.setattr(probes, "processor", lambda: "avx2")
        case "paths":
            monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
        case "Python":
            monkeypatch.setattr("sys.executable", "/usr/bin/another")
        case "torch":
            monkeypatch.setattr(torch, "__version__", "2.99")
        case "note":
            Path(f"{library}.loads").write_bytes(b"\xff")
    assert can_be_loaded(library) is (what != "library") and len(tried) == 2


def test_nothing_is_remembered_of_a_processor_that_nobody_describes(
    tmp_path: Path, tried: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "processor", lambda: None)
    library = tmp_path / "vectors.so"
    library.write_text("loads")
    assert can_be_loaded(library) and can_be_loaded(library) and len(tried) == 2


def test_a_note_that_cannot_be_written_leaves_nothing(tmp_path: Path, tried: list[str]) -> None:
    library = tmp_path / "vectors.so"
    library.write_text("loads")
    Path(f"{library}.loads").mkdir()  # no file can take its place
    assert can_be_loaded(library) and can_be_loaded(library) and len(tried) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["vectors.so", "vectors.so.loads"]


def test_no_header_is_precompiled_for_kernels_that_are_built(libraries: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    headers: list[str] = []
    version = torch._inductor.codecache.get_compiler_version_info  # is asked for each header

    def counted(compiler: str) -> str:
        headers.append(compiler)
        return version(compiler)

    monkeypatch.setattr(torch._inductor.codecache, "get_compiler_version_info", counted)

    def built() -> list[float]:
        torch._inductor.codecache._precompile_header.cache_clear()  # as in another process
        kernels = [plus(1), plus(2)]
        compat_cpp.build(kernels)
        return [result(kernel) for kernel in kernels]

    assert built() == [2.0, 3.0] and len(headers) == 1
    assert built() == [2.0, 3.0] and len(headers) == 1
    (library,) = libraries.rglob("*.main.so")
    library.unlink()
    assert built() == [2.0, 3.0] and len(headers) == 1, "it is built without"
