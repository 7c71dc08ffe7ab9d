"""Random models, meshes and options on three ranks, which are not all that there are, and on four."""

from __future__ import annotations

from checked import lasting, training_is_the_same

ranks = lasting(4)
test_a_step_equals_that_of_one_process = training_is_the_same(3, 4)
