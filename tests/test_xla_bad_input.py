"""Bad input with ``backend="xla"`` that needs no torch_xla to be found. The rest is in ``tests/xla``."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from torch import nn

import graph_fsdp
from graph_fsdp import MeshError, UnsupportedError
from graph_fsdp.xla.compile import check_parameters, check_versions, check_world_sizes
from graph_fsdp.xla.mesh import XlaMesh

PAIR = r"pip install torch==2\.9\.1 torch_xla==2\.9\.0"


@pytest.mark.parametrize(
    ("torch_version", "xla_version", "words"),
    [
        ("2.13.0", None, r"torch is 2\.13\.0 and torch_xla is not installed"),
        ("2.9.1+cpu", None, r"torch is 2\.9\.1\+cpu and torch_xla is not installed"),
        ("2.13.0", "2.9.0", r"torch is 2\.13\.0 and torch_xla is 2\.9\.0"),
        ("2.9.1", "2.8.1", r"torch is 2\.9\.1 and torch_xla is 2\.8\.1"),
    ],
)
def test_torch_xla_must_be_of_torchs_release(torch_version: str, xla_version: str | None, words: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"backend='xla'.*{words}.*{PAIR}"):
        check_versions(torch_version, xla_version)


@pytest.mark.parametrize(("torch_version", "xla_version"), [("2.9.1", "2.9.0"), ("2.9.1+cpu", "2.9.0+git1")])
def test_versions_of_one_release_pass(torch_version: str, xla_version: str) -> None:
    check_versions(torch_version, xla_version)


def test_world_sizes_must_agree() -> None:
    with pytest.raises(MeshError, match=r"counts 2 processes and XLA 1.*one process per host.*without torchrun"):
        check_world_sizes(2, 1)
    check_world_sizes(2, 2)


def test_complex128_is_refused() -> None:
    """Of which torch_xla's operators keep the real part alone."""
    p = nn.Parameter(torch.ones(2, dtype=torch.complex128))
    with pytest.raises(UnsupportedError, match=r"parameter 'filter' is complex128.*make it complex64"):
        check_parameters({p: ["filter"]}, XlaMesh(((0, 1, 2, 3),)))


def test_what_becomes_of_host_fallbacks_is_for_xla_only() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(ValueError, match=r"on_host_fallback='warn'.*backend 'eager'.*pass backend='xla'"):
        graph_fsdp.compile(model, backend="eager", on_host_fallback="warn")
    with pytest.raises(ValueError, match="must be 'error' or 'warn', got 'ignore'"):
        graph_fsdp.compile(model, backend="xla", on_host_fallback="ignore")  # type: ignore[arg-type]
    assert type(model) is nn.Linear


@pytest.mark.skipif(find_spec("torch_xla") is not None, reason="for where torch_xla is missing")
def test_without_torch_xla_nothing_is_changed() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(UnsupportedError, match=rf"backend='xla'.*torch_xla is not installed.*{PAIR}"):
        graph_fsdp.compile(model, backend="xla")
    assert type(model) is nn.Linear


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sharding": "auto"}, "sharding='auto' lets XLA divide the model and takes backend='xla'"),
        ({"sharding": "global"}, "sharding must be 'manual', 'auto' or 'replicas', got 'global'"),
        ({"shard_output": print}, "shard_output says how XLA divides outputs"),
        ({"shard_output": 3, "sharding": "auto", "backend": "xla"}, "shard_output must be a function of the output"),
    ],
)
def test_who_divides_a_model_is_refused_where_nobody_could(options: dict[str, object], words: str) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises((ValueError, TypeError), match=words):
        graph_fsdp.compile(model, **{"backend": "eager", **options})
    assert type(model) is nn.Linear
