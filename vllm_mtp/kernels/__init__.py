"""Rollback of rejected draft tokens: metadata and KV payload.

``reference`` is the specification, ``triton_ops`` and ``native_ops`` its fast twins
with the same function names, ``dispatch`` picks one for a device.
"""
