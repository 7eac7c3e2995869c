"""Imported before vLLM: garbage is not collected while that is imported.

There is hardly any among so many modules, and looking for it takes a fifth of the time.
"""

import gc

gc.disable()
