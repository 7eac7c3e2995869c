"""A program that behaves like a server: answers, has a child, and can misbehave.

Arguments: port, then one of `good`, `dead`, `deaf` (does not answer) or `stubborn`
(answers and ignores SIGTERM).
"""

import http.server
import signal
import subprocess
import sys
import time


class Handler(http.server.BaseHTTPRequestHandler):
    """Says yes to everything."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"fine")

    def log_message(self, format: str, *arguments: object) -> None:
        """Print nothing."""


def main() -> None:
    port, behaviour = int(sys.argv[1]), sys.argv[2]
    print("INFO Starting to load model demo", flush=True)
    if behaviour == "dead":
        print("(Engine pid=7) ValueError: there is no such model", flush=True)
        print("RuntimeError: engine failed", flush=True)
        sys.exit(3)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print(f"child {child.pid}", flush=True)
    if behaviour == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if behaviour == "deaf":
        time.sleep(600)
    http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main()
