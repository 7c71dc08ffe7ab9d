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

from graph_fsdp.integrations.accelerate import adopt


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
