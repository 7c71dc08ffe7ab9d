"""Random numbers that all ranks of a mesh draw alike."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from graph_fsdp.mesh import Mesh


@contextlib.contextmanager
def first_ranks_random_numbers(mesh: Mesh | None, device: torch.device) -> Iterator[None]:
    """Every rank draws what the mesh's first rank draws. Afterwards the first rank's generators, and those of ranks
    that were in the same state, are where the draws have brought them, as if the model had been built there; the others
    are where they were, as all are after an error."""
    own = _random_states(device)
    states = [state.clone() for state in own]
    if mesh is not None:
        for state in states:
            sent = state.to(device)
            mesh.broadcast(sent)
            state.copy_(sent)
    keep = all(map(torch.equal, own, states))
    with mesh.turn() if mesh is not None else contextlib.nullcontext():
        _set_random_states(states, device)
        try:
            yield
        except BaseException:
            keep = False
            raise
        finally:
            if not keep:
                _set_random_states(own, device)


def _random_states(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    return states if device.type == "cpu" else [*states, torch.get_device_module(device).get_rng_state(device)]


def _set_random_states(states: Sequence[Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.get_device_module(device).set_rng_state(state, device)
