"""What a random case consists of: a model, a mesh, options and steps, all of them plain values.

``repr`` of a case is Python that makes it again, so a failure reports itself as a command; see ``run_case.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

MeshKind = Literal["none", "shard", "replicate", "hybrid"]


@dataclass(frozen=True)
class LayerCase:
    """A layer of ``random_layers.LAYERS``; ``size`` is what it makes of it: rows of a parameter, a variant."""

    kind: str
    size: int = 1


@dataclass(frozen=True)
class ModelCase:
    """``calls``: blocks in the order of use; one may come several times, or never. ``registered``: blocks in the order
    of registration, which may name one twice. ``ties``, ``frozen``, ``ignored``: numbers that are taken modulo what
    there is to choose from. ``checkpointed``: places in ``calls``. ``outputs``: what forward returns, and how;
    ``used``: those of them, modulo, in the loss.
    """

    width: int = 4
    tokens: bool = False
    blocks: tuple[tuple[LayerCase, ...], ...] = ((LayerCase("affine"),),)
    registered: tuple[int, ...] = (0,)
    calls: tuple[int, ...] = (0,)
    residual: bool = True
    ties: tuple[int, ...] = ()
    frozen: tuple[int, ...] = ()
    ignored: tuple[int, ...] = ()
    checkpointed: tuple[int, ...] = ()
    container: Literal["tensor", "tuple", "dict", "nested", "dataclass"] = "tensor"
    outputs: tuple[str, ...] = ("x",)
    used: tuple[int, ...] = (0,)
    writes_input: bool = False
    graph_break: bool = False


@dataclass(frozen=True)
class MeshCase:
    """The first ``ranks`` of all take part; "none": one process, without a mesh. ``shape``: of "hybrid"."""

    kind: MeshKind = "shard"
    ranks: int = 2
    shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class OptionsCase:
    """Options of ``compile`` and ``default_pipeline``, as ``random_training.py`` reads them, and what a program does to
    the model, as ``random_actions.py`` does."""

    compile: dict[str, Any] = field(default_factory=dict)
    pipeline: dict[str, Any] = field(default_factory=dict)
    program: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """``rows``: of each rank, per step; with ``skewed``, rank 1 has one more than rank 0, and so on. ``microbatches``:
    backwards per step, all but the last of them without reduction if ``no_sync``. ``calls``: of the model before each
    backward. ``parts``: the model's blocks and layers are compiled, each by itself. ``evaluate``: a call under
    ``no_grad`` in between. ``input_grad``: of the inputs."""

    model: ModelCase = ModelCase()  # frozen
    mesh: MeshCase = MeshCase()
    options: OptionsCase = field(default_factory=OptionsCase)
    rows: tuple[int, ...] = (2,)
    skewed: bool = False
    microbatches: int = 1
    calls: int = 1
    parts: bool = False
    no_sync: bool = False
    evaluate: bool = False
    input_grad: bool = False
    seed: int = 0
