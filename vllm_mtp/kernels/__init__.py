"""Rollback of rejected draft tokens (metadata, KV payload) and greedy verification.

``reference`` is the specification, ``triton_ops`` and ``native_ops`` its fast twins
with the same function names, ``dispatch`` picks one for a device.
"""
