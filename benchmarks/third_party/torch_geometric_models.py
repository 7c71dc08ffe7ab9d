"""Graph neural networks of PyTorch Geometric: two layers of each kind, on a small random graph."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch_geometric.nn as layers
from torch import Tensor, nn

from third_party.case import Case, Inputs, mean_square

NODES, EDGES, FEATURES, WIDTH, OF_EDGE, RELATIONS = 12, 30, 8, 16, 3, 3

# What a layer is given beside its sizes, and the argument that takes what is known of edges.
LAYERS: dict[str, tuple[dict[str, Any], str]] = {
    "GCNConv": ({}, "edge_weight"),
    "SAGEConv": ({}, ""),
    "GATConv": ({"heads": 2, "concat": False}, ""),
    "GATv2Conv": ({"edge_dim": OF_EDGE}, "edge_attr"),
    "TransformerConv": ({"edge_dim": OF_EDGE}, "edge_attr"),
    "ChebConv": ({"K": 3}, ""),
    "ARMAConv": ({}, ""),
    "MFConv": ({}, ""),
    "GENConv": ({}, ""),
    "RGCNConv": ({"num_relations": RELATIONS}, "edge_type"),
}


class Network(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        settings, self.of_edges = LAYERS[name]
        layer = functools.partial(getattr(layers, name), **settings)
        self.first, self.second, self.head = layer(FEATURES, WIDTH), layer(WIDTH, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, edges: Tensor, known: Tensor) -> Tensor:
        given = {self.of_edges: known} if self.of_edges else {}
        x = self.first(x, edges, **given).relu()
        x = self.second(x, edges, **given).relu()
        pooled: Tensor = self.head(layers.global_mean_pool(x, torch.arange(NODES) // (NODES // 2), 2))
        return pooled


class Pooled(nn.Module):
    """Half of the nodes are kept, those with the highest scores."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = layers.GraphConv(FEATURES, WIDTH), layers.GraphConv(WIDTH, WIDTH)
        self.pool, self.head = layers.TopKPooling(WIDTH, ratio=0.5), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, edges: Tensor, known: Tensor) -> Tensor:
        x, edges, _, graph, _, _ = self.pool(self.first(x, edges).relu(), edges, None, torch.arange(NODES) // 6)
        pooled: Tensor = self.head(layers.global_max_pool(self.second(x, edges), graph, 2))
        return pooled


def graph(of_edges: str) -> Inputs:
    known = {"edge_weight": torch.rand(EDGES), "edge_type": torch.randint(RELATIONS, (EDGES,))}
    return {
        "x": torch.randn(NODES, FEATURES),
        "edges": torch.randint(NODES, (2, EDGES)),
        "known": known.get(of_edges, torch.randn(EDGES, OF_EDGE)),
    }


def cases() -> list[Case]:
    found = [("TopKPooling", Pooled, "")]
    found += [(name, functools.partial(Network, name), of_edges) for name, (_, of_edges) in LAYERS.items()]
    return [
        Case("torch_geometric", name, build, functools.partial(graph, of_edges), mean_square)
        for name, build, of_edges in found
    ]
