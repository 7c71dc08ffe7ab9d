"""Divide a causal language model of transformers over the dimensions of a mesh, as a training program would.

- **Stages** (``pp``): consecutive layers, one of whose stages has the embedding and one norm, head and loss. Both count
  as a layer when layers are dealt out (Llama 3's first and last stage have a layer less than the others).
- **Tensor parallelism** (``tp``): the configuration's own ``base_model_tp_plan``, in torch's styles; multi-head latent
  attention, which those plans leave out, over its heads. Activations between matrices are divided along the sequence,
  norms and embedding with them (sequence parallelism), and the logits by the vocabulary.
- **Context parallelism** (``cp``): a rank has a part of each sequence and gathers keys and values. Parts count as
  balanced (a rank has an early and a late one): attention computes half of what a mask-less one would, on every rank.
- **Experts** (``ep``): a rank has ``experts / ep``, to which tokens go, and from which they come back, by all-to-alls.
  Routing counts as balanced: each expert has room for its share of tokens. With ``tp`` each expert's matrices are
  divided further.
"""

from __future__ import annotations

import fnmatch
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from graph_fsdp.errors import UnsupportedError
from graph_fsdp.planning.dimensions import Dimensions
from graph_fsdp.planning.stages import Stage

_ATTENTION = "graph_fsdp_planned"  # as transformers knows it
_LATENT = {"self_attn.q_b_proj": "colwise", "self_attn.kv_b_proj": "colwise", "self_attn.o_proj": "rowwise"}


class CausalLM:
    """Makes the stages of a model of a transformers configuration, for ``plan_pipeline``.

    ``batch``: rows of a microbatch, of one group of ranks that share sequences; ``length``: tokens of a row.

    Raises:
        ValueError: sizes of the model or of a batch do not divide by those of the mesh.
        UnsupportedError: the model cannot be divided so.
    """

    def __init__(self, config: Any, dimensions: Dimensions, batch: int, length: int) -> None:
        self.config, self.dimensions, self.batch, self.length = config, dimensions, batch, length
        d = dimensions
        if length % (d.cp * d.tp):
            raise ValueError(f"seq: {length} tokens do not divide by cp={d.cp} times tp={d.tp}; give a multiple")
        heads = {name: getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads")}
        counts = heads | {"vocab_size": config.vocab_size, "intermediate_size": config.intermediate_size}
        for name, count in counts.items():
            if count is not None and count % d.tp:
                raise ValueError(f"mesh_shape: tp={d.tp} does not divide the model's {name}, {count}; give a divisor")
        experts = getattr(config, "num_local_experts", None)
        if d.ep > 1 and (experts is None or experts % d.ep):
            has = f"{experts} experts, which ep does not divide" if experts else "no experts"
            raise ValueError(f"mesh_shape: ep={d.ep} and the model has {has}; give a divisor of the number of experts")
        if getattr(config, "base_model_pp_plan", None) is None or config.tie_word_embeddings:
            why = "has embedding and head in common" if config.tie_word_embeddings else "names no stages"
            raise UnsupportedError(f"model: {config.model_type} {why}, and cannot be divided over stages and ranks")

    def stage(self, index: int, count: int) -> Stage:
        """Return a stage. Stages with equally many layers of each kind, embedding and head count as equal."""
        total = self.config.num_hidden_layers + 2
        if count > total - 2:
            raise ValueError(f"mesh_shape: {count} stages for {total - 2} layers; give a stage a layer, or more")
        begin, end = (max(0, min(total - 2, place * total // count - 1)) for place in (index, index + 1))
        first, last = index == 0, index == count - 1
        d = self.dimensions
        shape = self.batch, self.length // d.cp
        tokens = torch.zeros(shape, dtype=torch.long, device="meta")
        states = torch.zeros(shape[0], shape[1] // d.tp, self.config.hidden_size, device="meta", requires_grad=True)
        inputs = {"x": tokens if first else states, "positions": tokens[:1]}
        if last:
            inputs["labels"] = tokens
        dense = getattr(self.config, "first_k_dense_replace", 0)
        kinds = sum(layer < dense for layer in range(begin, end)), end - begin
        return Stage(lambda: CausalStage(self.config, range(begin, end), first, last), inputs, (first, last, *kinds))

    def parallelize(self, model: nn.Module, meshes: Mapping[str, DeviceMesh]) -> Mapping[str, Any]:
        """Divide a stage over ``meshes``, in place, and return the option ``meshes`` of ``graph_fsdp.compile``."""
        _register_attention(meshes.get("cp"))
        experts = {module for name, module in model.named_modules() if name.endswith(".experts")}
        for module in experts:
            _divide_experts(module, meshes)
        if (tp := meshes.get("tp")) is not None:
            assert isinstance(model, CausalStage)
            for layer in model.layers:
                _divide_layer(layer, tp, self._styles())
            ends: dict[str, ParallelStyle] = {"norm": SequenceParallel()} if model.labelled else {}
            if model.labelled:
                ends["head"] = ColwiseParallel(input_layouts=Shard(1))
                model.vocabulary = tp
            if model.embeds:
                ends["embedding"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
            parallelize_module(model, tp, ends)
        return {"meshes": dict.fromkeys(experts, meshes["efsdp"])} if "efsdp" in meshes and experts else {}

    def _styles(self) -> dict[str, str]:
        """Return pattern of a layer's module → the style of transformers' plan."""
        given = getattr(self.config, "base_model_tp_plan", None) or {}
        styles = {name.removeprefix("layers.*."): style for name, style in given.items()}
        if getattr(self.config, "kv_lora_rank", None):
            styles |= _LATENT
        if not any(name.startswith("self_attn.") for name in styles):
            raise UnsupportedError(
                f"mesh_shape: transformers has no tensor-parallel plan for the attention of {self.config.model_type}; "
                "leave tp out"
            )
        return styles


class CausalStage(nn.Module):
    """Runs some layers, behind the embedding in the ``first`` stage, before norm, head and loss in the ``last``."""

    def __init__(self, config: Any, layers: range, first: bool, last: bool) -> None:
        super().__init__()
        import transformers

        _register_attention(None)
        whole = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=_ATTENTION
        )
        base = whole.base_model
        embedding, stack, norm = config.base_model_pp_plan
        self.embeds, self.labelled = first, last
        self.vocabulary: DeviceMesh | None = None  # that divides the logits
        self.embedding = getattr(base, embedding) if first else None
        self.layers = nn.ModuleList(getattr(base, stack)[layers.start : layers.stop])
        self.norm: nn.Module | None = getattr(base, norm) if last else None
        self.head: nn.Module | None = whole.get_output_embeddings() if last else None
        self.rotary = base.rotary_emb

    def forward(self, x: Tensor, positions: Tensor, labels: Tensor | None = None) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        angles = self.rotary(x, position_ids=positions)
        for layer in self.layers:
            x = layer(x, attention_mask=None, position_ids=positions, position_embeddings=angles)
        if labels is None or self.norm is None or self.head is None:
            return x
        logits = self.head(self.norm(x)).flatten(0, 1)
        return cross_entropy(logits.float(), labels.flatten(), self.vocabulary)


def cross_entropy(logits: Tensor, labels: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """Return the mean cross entropy of ``[tokens, vocabulary]``; with ``mesh``, of each rank's part of the vocabulary
    (Megatron-LM, Shoeybi et al. 2019)."""
    if mesh is None:
        return F.cross_entropy(logits, labels)

    def reduced(part: Tensor, how: str) -> Tensor:
        return DTensor.from_local(part, mesh, [Partial(how)]).redistribute(placements=[Replicate()]).to_local()

    highest = reduced(logits.detach().amax(-1), "max")
    total = reduced((logits - highest[:, None]).exp().sum(-1), "sum")
    mine = labels - mesh.get_local_rank() * logits.shape[1]
    inside = (mine >= 0) & (mine < logits.shape[1])
    picked = logits.gather(1, mine.clamp(0, logits.shape[1] - 1)[:, None]).squeeze(1) * inside
    return (total.log() + highest - reduced(picked, "sum")).mean()


def _register_attention(cp: DeviceMesh | None) -> None:
    """Let transformers' models call causal attention on the keys and values of all ranks of ``cp``."""
    from transformers import AttentionInterface

    def gathered(part: Tensor) -> Tensor:
        whole = DTensor.from_local(part, cp, [Shard(2)]).redistribute(placements=[Replicate()])
        return whole.to_local(grad_placements=[Partial()])

    def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> tuple[Tensor, None]:
        if cp is not None:
            k, v = gathered(k), gathered(v)
        width = v.shape[-1]
        v = F.pad(v, (0, q.shape[-1] - width))  # as transformers does for flash attention, which takes one width
        grouped = q.shape[1] != k.shape[1]
        made = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=options["scaling"], enable_gqa=grouped)
        return made[..., :width].transpose(1, 2).contiguous(), None

    AttentionInterface.register(_ATTENTION, attention)


def _divide_layer(layer: nn.Module, tp: DeviceMesh, styles: Mapping[str, str]) -> None:
    """Divide the matrices of one layer. Its blocks (attention, perceptron) get whole sequences."""
    known: dict[str, Callable[[], ParallelStyle]] = {
        "colwise": ColwiseParallel,
        "rowwise": lambda: RowwiseParallel(output_layouts=Shard(1)),
    }
    plan: dict[str, ParallelStyle] = {}
    for name, module in layer.named_modules():
        style = next((style for pattern, style in styles.items() if fnmatch.fnmatch(name, pattern)), None)
        if style in known and isinstance(module, nn.Linear):
            plan[name] = known[style]()
    for name, child in layer.named_children():
        routed = hasattr(child, "experts")
        if any(path.startswith(f"{name}.") for path in plan):
            # Of what is replicated in a block (a router, a latent's projection) each rank needs whole gradients.
            local = routed or hasattr(child, "kv_b_proj")
            plan[name] = _whole_sequences("hidden_states" if name == "self_attn" else None, local)
        elif next(child.parameters(), None) is not None:
            plan[name] = SequenceParallel()
        if routed:
            plan |= {path: RowwiseParallel(output_layouts=Partial()) for path in plan if path.endswith("down_proj")}
    parallelize_module(layer, tp, plan)
    for child in layer.children():
        if hasattr(child, "experts"):  # these and the shared ones give parts of sums
            parallelize_module(
                child, tp, PrepareModuleOutput(output_layouts=Partial(), desired_output_layouts=Shard(1))
            )


def _whole_sequences(keyword: str | None, local: bool) -> ParallelStyle:
    given, wanted = Shard(1), Replicate()
    if keyword is None:
        return PrepareModuleInput(input_layouts=(given,), desired_input_layouts=(wanted,), use_local_output=local)
    return PrepareModuleInput(
        input_kwarg_layouts={keyword: given},
        desired_input_kwarg_layouts={keyword: wanted},
        use_local_output=local,
    )


def _divide_experts(module: Any, meshes: Mapping[str, DeviceMesh]) -> None:
    """Keep this rank's experts, and send tokens to and fro. The parameters are ``gate_up_proj`` ``[experts, 2 * inner,
    width]`` and ``down_proj`` ``[experts, width, inner]``."""
    ep, tp = meshes.get("ep"), meshes.get("tp")
    for name, dim in (("gate_up_proj", 1), ("down_proj", 2)):
        whole = getattr(module, name).detach()
        mesh = ep if ep is not None else tp
        placements = [Shard(dim)] if ep is None else [Shard(0), Shard(dim)][: ep.ndim]
        if tp is not None and mesh is not None:
            whole = distribute_tensor(whole, mesh, placements)
        elif ep is not None:  # plain: a pipeline can keep them whole between microbatches
            whole = whole[: whole.shape[0] // ep.size(0)]
        setattr(module, name, nn.Parameter(whole))
    group, ranks = ("", 1) if ep is None else (ep.get_group(0).group_name, ep.size(0))

    def forward(self: Any, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        if tp is not None:  # each rank has a part of every product: gradients are sums over them
            x = DTensor.from_local(x, tp, [Replicate()]).to_local(grad_placements=[Partial()])
        tokens, width = x.shape
        experts, count = self.num_experts, chosen.numel()
        room = -(-count // experts)
        order = chosen.flatten().argsort()
        sent = F.pad(x[order // chosen.shape[1]], (0, 0, 0, room * experts - count))
        sent = (
            _exchanged(sent, group, ranks).view(ranks, -1, room, width).transpose(0, 1).reshape(-1, ranks * room, width)
        )
        up, down = (p.to_local() if isinstance(p, DTensor) else p for p in (self.gate_up_proj, self.down_proj))
        gate, value = torch.bmm(sent, up.to(x.dtype).transpose(1, 2)).chunk(2, dim=-1)
        made = torch.bmm(self.act_fn(gate) * value, down.to(x.dtype).transpose(1, 2))
        made = made.view(-1, ranks, room, width).transpose(0, 1).reshape(-1, width)
        back = _exchanged(made, group, ranks)[order.argsort()]
        return (back.view(tokens, -1, width) * weights[..., None].to(x.dtype)).sum(1)

    module.forward = types.MethodType(forward, module)


def _exchanged(rows: Tensor, group: str, ranks: int) -> Tensor:
    """Exchange rows, an equal part with each rank of a process group; "" for none."""
    if not group:
        return rows
    split = [rows.shape[0] // ranks] * ranks
    sent = torch.ops._c10d_functional_autograd.all_to_all_single(rows, split, split, group)
    received: Tensor = torch.ops._c10d_functional.wait_tensor(sent)
    return received
