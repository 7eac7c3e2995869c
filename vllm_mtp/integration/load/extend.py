"""Gives an object that vLLM has built methods of ours.

vLLM's workers build their model runner from a class they name themselves. A subclass
with our methods in front takes the place of the object's own class: so each of them is
an ordinary override that calls ``super()``.
"""

from typing import Any


def extend(instance: Any, mixin: type) -> None:
    """Put a mixin's methods in front of those of an object's class.

    Methods that somebody has put on the object itself (a tracing agent, which has
    decorated them) are called by ours as those of the class would be.

    Args:
        instance: Built by vLLM.
        mixin: A subclass of one of its class's bases.
    """
    theirs, own = type(instance), vars(instance)
    hiding = {name: own.pop(name) for name in own.keys() & vars(mixin).keys()}
    between = type("OnTheObject", (), {n: staticmethod(f) for n, f in hiding.items()})
    instance.__class__ = type(f"MTPPlus{theirs.__name__}", (mixin, between, theirs), {})
