"""The Trainer of transformers, with ours in its place, beside the same with Accelerate's own FSDP2."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as dist
import trainer_script
import transformers
from accelerate.state import AcceleratorState
from accelerate_script import VOCABULARY, make_model
from launch import run_ranks
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers.trainer_pt_utils import LabelSmoother

from graph_fsdp.compat import fake_process_group
from graph_fsdp.integrations.transformers import Trainer

Generated: TypeAlias = list[list[torch.Tensor]]  # before a training and after, of each model
SMOOTHING = 0.1
CHECKPOINT = Path("run") / "checkpoint-3"


def begin_anew() -> None:
    torch._dynamo.reset()
    AcceleratorState._reset_state(reset_partial_state=True)


def trained(folder: str, runs: dict[str, list[str]]) -> dict[str, dict[str, Any]]:
    """On a rank: the script with each of these arguments, one after the other; what each writes about itself."""
    torch.set_num_threads(1)
    os.environ["ACCELERATE_USE_CPU"] = "true"  # not by the launch: the rank would be a new process
    for name, arguments in runs.items():
        begin_anew()
        out = Path(folder) / name
        out.mkdir(exist_ok=True)
        sys.argv = ["trainer_script.py", "--out", str(out), *arguments]
        trainer_script.main()
    dist.barrier()
    return {name: json.loads((Path(folder) / name / "facts.json").read_text()) for name in runs}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trainer")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> dict[str, dict[str, Any]]:
    runs = {"theirs": ["--own"], "ours": [], "resumed": ["--resume", str(folder / "theirs" / CHECKPOINT)]}
    return run_ranks(trained, 2, str(folder), runs, backend=None)[0]


@pytest.mark.long
def test_losses_are_those_of_accelerates_fsdp2(ranks: dict[str, dict[str, Any]]) -> None:
    ours, theirs = ranks["ours"], ranks["theirs"]
    assert ours["compiled"] and not theirs["compiled"]
    assert len(ours["losses"]) == 6
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-6)
    assert ours["norms"] == pytest.approx(theirs["norms"], rel=1e-6)


@pytest.mark.long
def test_a_checkpoint_of_accelerates_fsdp2_is_resumed(folder: Path, ranks: dict[str, dict[str, Any]]) -> None:
    assert ranks["resumed"]["losses"] == pytest.approx(ranks["theirs"]["losses"], rel=1e-6)
    loaded = type(make_model()).from_pretrained(folder / "resumed" / "saved")
    expected = type(make_model()).from_pretrained(folder / "theirs" / "saved")
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], value, rtol=1e-4, atol=1e-6)


def two_steps_and_others(folder: str, runs: dict[str, list[str]]) -> tuple[dict[str, Any], Generated, float]:
    """On a rank: all, in one launch, as imports take longer than each."""
    return trained(folder, runs), [generated(folder, make) for make in (seq2seq, speech)], loss_of_smooth_labels(folder)


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[dict[str, Any], Generated, float]]:
    runs = {"own": ["--steps", "2", "--own"], "ours": ["--steps", "2", "--evaluate"]}
    folder = tmp_path_factory.mktemp("two_steps")
    return run_ranks(two_steps_and_others, 2, str(folder), runs, backend=None)


def test_two_steps_after_an_evaluation_are_those_of_accelerates_fsdp2(two_steps: Any) -> None:
    """Without an evaluation before, six are: see above."""
    ours, own = two_steps[0][0]["ours"], two_steps[0][0]["own"]
    rows = torch.stack([row["input_ids"] for row in trainer_script.make_dataset()])
    with torch.no_grad():
        loss = make_model()(rows, labels=rows).loss
    assert ours["evaluation"] == pytest.approx(loss.item(), rel=1e-5)
    assert ours["compiled"] and not own["compiled"] and len(ours["losses"]) == 2
    assert ours["losses"] == pytest.approx(own["losses"], rel=1e-6), "the optimizer steps the shards"
    assert ours["norms"] == pytest.approx(own["norms"], rel=1e-6)


def loss_of_smooth_labels(folder: str) -> float:
    """On a rank: of an evaluation."""
    begin_anew()
    settings = transformers.TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        fsdp=True,
        fsdp_config={"version": 2},
        label_smoothing_factor=SMOOTHING,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(make_model(), settings, compile_options={"backend": "eager"})
    return float(trainer.evaluate(trainer_script.make_dataset())["eval_loss"])


def test_smooth_labels_are_shifted(two_steps: Any) -> None:
    """The Trainer finds out by what the model calls itself whether they are."""
    rows = torch.stack([row["input_ids"] for row in trainer_script.make_dataset()])
    model = make_model()
    with torch.no_grad():
        smoother = LabelSmoother(epsilon=SMOOTHING)
        expected, other = (smoother(model(rows), rows, shift_labels=shift).item() for shift in (True, False))
    with fake_process_group(2):
        assert repr(fully_shard(make_model())).startswith("FSDPLlamaForCausalLM("), "no name the Trainer knows"
    losses = [loss for _, _, loss in two_steps]
    assert losses == pytest.approx([expected, expected], rel=1e-5) and expected != pytest.approx(other, rel=1e-3)


def seq2seq() -> transformers.T5ForConditionalGeneration:
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, dropout_rate=0.0
    )
    config.decoder_start_token_id = 0
    return transformers.T5ForConditionalGeneration(config)


class Speech(transformers.WhisperForConditionalGeneration):
    """Code as it comes with weights, outside of transformers. Whisper's ``generate`` calls the encoder by itself."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return super().generate(*args, **kwargs)


def speech() -> Speech:
    torch.manual_seed(0)
    layers = {"encoder_layers": 1, "encoder_ffn_dim": 32, "decoder_layers": 1, "decoder_ffn_dim": 32}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "d_model": 16, "num_mel_bins": 8}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY, max_source_positions=8, max_target_positions=16, begin_suppress_tokens=None,
        **layers, **heads, **tokens,
    )  # fmt: skip
    return Speech(config)


def rows_of(model: torch.nn.Module) -> list[dict[str, torch.Tensor]]:
    rows = trainer_script.make_dataset()[:8]
    if not isinstance(model, Speech):
        return rows
    generator = torch.Generator().manual_seed(0)
    return [{"input_features": torch.randn(8, 16, generator=generator), "labels": row["labels"]} for row in rows]


class Seq2SeqTrainer(Trainer, transformers.Seq2SeqTrainer):
    """As docs/accelerate.md has it."""


def generated(folder: str, make: Callable[[], torch.nn.Module]) -> list[torch.Tensor]:
    """On a rank: what is predicted before a training, as a plain model generates it, and after."""
    begin_anew()
    model = make()
    rows = rows_of(model)
    settings = transformers.Seq2SeqTrainingArguments(
        output_dir=folder,
        use_cpu=True,
        fsdp=True,
        fsdp_config={"version": 2},
        max_steps=1,
        predict_with_generate=True,
        generation_max_length=3,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    options: Any = {"train_dataset": rows, "eval_dataset": rows, "compile_options": {"backend": "eager"}}
    trainer = Seq2SeqTrainer(model, settings, **options)
    before = trainer.predict(rows).predictions
    trainer.train()
    after = trainer.predict(rows).predictions
    assert all(isinstance(p, DTensor) for p in trainer.model.parameters())
    return [torch.from_numpy(before), torch.from_numpy(after)]


@pytest.mark.parametrize(("number", "make"), [(0, seq2seq), (1, speech)])
def test_an_encoder_and_a_decoder_generate_before_and_after_a_training(two_steps: Any, number: int, make: Any) -> None:
    (before, after), other = (generations[number] for _, generations, _ in two_steps)
    model = make()
    name = "input_ids" if make is seq2seq else "input_features"
    rows = torch.stack([row[name] for row in rows_of(model)])
    expected = model.generate(rows, max_length=3, do_sample=False)
    assert torch.equal(before[:, : expected.shape[1]], expected) and not before[:, expected.shape[1] :].any()
    assert torch.equal(before, other[0]) and torch.equal(after, other[1])
