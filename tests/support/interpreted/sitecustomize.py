"""With this folder on ``PYTHONPATH`` every process has Model Runner V2, interpreted.

Python imports a module of this name when it starts. So engines and servers that are
processes of their own are interpreted, too:

    PYTHONPATH=tests/support/interpreted:. vllm-mtp verify --requests 1000 ...

With ``MTP_PLUS_TESTS_VERIFY_ADAPTIVELY=1`` the device leaves draft tokens out, too.
"""

import os

from tests.support import adaptive_verification
from tests.support.v2_interpreter import install

install()
if os.environ.get(adaptive_verification.VARIABLE):
    adaptive_verification.allow()
