"""Random models, meshes and options on one rank with gloo: training sharded is training."""

from __future__ import annotations

from checked import lasting, training_is_the_same

ranks = lasting(1)
test_a_step_equals_that_of_one_process = training_is_the_same(1)
