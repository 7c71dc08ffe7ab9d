"""The garbage collector rests from the import of this file, the first of ``conftest.py``, until the first test.

What is imported stays, and is millions of objects: walking them again and again took a sixth of the time in which a
process of the tests imports what it needs and collects the tests.
"""

import gc

gc.disable()
