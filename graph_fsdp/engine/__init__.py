"""The engine makes programs of forward calls: Dynamo, AOTAutograd, recompilation, and what ranks agree on."""
