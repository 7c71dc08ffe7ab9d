"""What Dynamo raises of code that it does not trace."""

import contextlib
import logging
from collections.abc import Iterator

import torch._subclasses.fake_tensor
from torch._dynamo.exc import BackendCompilerFailed as BackendCompilerFailed
from torch._dynamo.exc import FailOnRecompileLimitHit as FailOnRecompileLimitHit
from torch._dynamo.exc import InternalTorchDynamoError as InternalTorchDynamoError
from torch._dynamo.exc import TorchRuntimeError as TorchRuntimeError
from torch._dynamo.exc import Unsupported as Unsupported
from torch._dynamo.exc import UserError as UserError
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

# Raised where the graph may break, too. The second is of a number that only data decides.
OF_USERS = (UserError, GuardOnDataDependentSymNode)
NOT_TRACED = (Unsupported, TorchRuntimeError, InternalTorchDynamoError, *OF_USERS)


@contextlib.contextmanager
def failures_unlogged() -> Iterator[None]:
    """Leave it to the error to say which operator failed on fake tensors: torch logs it, too, with its stack."""
    log = logging.getLogger(torch._subclasses.fake_tensor.__name__)
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before
