"""Models of libraries, as cases of ``benchmarks/models_compatibility.py``: each in a size that trains in a second."""
