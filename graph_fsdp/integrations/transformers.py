"""Train with the Trainer of transformers: this class takes the place of transformers' own.

::

    from graph_fsdp.integrations.transformers import Trainer   # instead of: from transformers import Trainer

    Trainer(model=model, args=TrainingArguments(…, fsdp=True, fsdp_config={…}), …).train()
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transformers
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.fsdp import register_fsdp_forward_method

from graph_fsdp.integrations.accelerate import Accelerator, adopt


class Trainer(transformers.Trainer):
    """Trains with graph_fsdp where the arguments ask for FSDP: ``fsdp=True`` and ``fsdp_config`` of
    :class:`transformers.TrainingArguments`. Without ``fsdp`` it is transformers' ``Trainer``.

    Args:
        compile_options: arguments of ``graph_fsdp.compile`` to add to the configuration or to replace what it says.
        args, kwargs: those of ``transformers.Trainer``.

    Raises:
        UnsupportedError: names a setting that graph_fsdp does not have.
    """

    def __init__(self, *args: Any, compile_options: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        self._compile_options = compile_options
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        settings = self.args.fsdp_plugin_args
        if settings is None:
            return
        adopt(self.accelerator, FullyShardedDataParallelPlugin(**settings), self._compile_options)
        self.is_fsdp_enabled = getattr(self.accelerator.state, "fsdp_plugin", None) is not None

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Compile the model where nothing was trained before; transformers' asks Accelerate for it without the
        optimizer, which Accelerate refuses with FSDP2."""
        accelerator = self.accelerator
        if self.is_fsdp_enabled and isinstance(accelerator, Accelerator) and not accelerator._models:
            assert isinstance(self.model, nn.Module)
            accelerator.prepare_for_evaluation(self.model, self.optimizer)
            if hasattr(self.model, "generate"):  # as before a training
                register_fsdp_forward_method(self.model, "generate")
        return super().evaluation_loop(*args, **kwargs)
