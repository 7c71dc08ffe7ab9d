"""A forward call becomes programs: Dynamo, AOTAutograd, recompilation, and what ranks agree on."""
