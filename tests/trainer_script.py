"""Trains with the Trainer of transformers on each rank of a launch. ``--own`` trains with Accelerate's own FSDP2."""

import argparse
import json
from pathlib import Path

import torch
import transformers
from accelerate import DistributedType, FullyShardedDataParallelPlugin, PartialState
from accelerate_script import LENGTH, VOCABULARY, make_model

from graph_fsdp.integrations.transformers import Trainer


class OwnTrainer(transformers.Trainer):
    """On the CPU Accelerate ignores an FSDP configuration; this one does not."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        for state in (self.accelerator.state, PartialState()):
            state.distributed_type = DistributedType.FSDP
        self.accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
        self.is_fsdp_enabled = True


def make_dataset() -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(VOCABULARY, (64, LENGTH), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in tokens]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--own", action="store_true")
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--evaluate", action="store_true", help="before the first step, with an optimizer made already")
    args = parser.parse_args()
    settings = transformers.TrainingArguments(
        output_dir=str(args.out / "run"),
        use_cpu=True,
        fsdp=True,
        fsdp_config={"version": 2, "state_dict_type": "FULL_STATE_DICT"},
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=args.steps,
        save_steps=3,
        logging_steps=1,
        learning_rate=1e-2,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    dataset = make_dataset()
    options = {} if args.own else {"compile_options": {"backend": "eager"}}
    trainer = (OwnTrainer if args.own else Trainer)(make_model(), settings, train_dataset=dataset, **options)
    evaluation = None
    if args.evaluate:
        trainer.create_optimizer()
        evaluation = trainer.evaluate(dataset)["eval_loss"]
    trainer.train(resume_from_checkpoint=str(args.resume) if args.resume else None)
    trainer.save_model(str(args.out / "saved"))
    if trainer.is_world_process_zero():
        history = [entry for entry in trainer.state.log_history if "loss" in entry]
        facts = {
            "losses": [entry["loss"] for entry in history],
            "norms": [entry["grad_norm"] for entry in history],
            "evaluation": evaluation,
            "compiled": any("GraphFSDP" in base.__name__ for base in type(trainer.model).__mro__),
        }
        (args.out / "facts.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
