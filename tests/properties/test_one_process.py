"""Random models and options in one process without a mesh: training is that of plain PyTorch."""

from __future__ import annotations

from checked import lasting, training_is_the_same

ranks = lasting(0)
test_a_step_equals_that_of_plain_pytorch = training_is_the_same(0)
