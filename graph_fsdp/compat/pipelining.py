"""What pipeline stages take from torch; apart, because the import takes long and few need it."""

from torch.distributed.pipelining._backward import stage_backward as stage_backward
