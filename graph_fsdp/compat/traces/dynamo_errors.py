"""What Dynamo raises of code that it does not trace."""

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
