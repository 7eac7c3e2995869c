"""Replicas of a server with `mtp_plus` behind one endpoint, by Ray Serve LLM.

``app.py`` is what a cluster runs, ``python -m examples.ray_serve`` shows it on this
machine. ``docs/ray.md`` says what happens when a replica dies or is replaced.
"""
