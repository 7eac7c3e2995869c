"""The proof kit: speculation writes what the target would, with the same chances.

The acceptance tests themselves are proved by enumeration (tests/unit/verification).
Here whole engines are compared, because most faults lie between the parts.
"""
