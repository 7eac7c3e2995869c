"""Build script. Metadata lives in pyproject.toml; native extensions register here."""

from setuptools import setup

setup()
