"""ssmd-server as a process on free loopback ports."""
import json
import re
import subprocess
import urllib.error
import urllib.request


class Server:
    def __init__(self, binary, *flags):
        self._process = subprocess.Popen(
            [binary, "--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0", *flags],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        line = self._process.stdout.readline()
        self.address, self.metrics = re.fullmatch(r"ssmd-server listening on (.+), metrics on (.+)\n", line).groups()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()

    def kill(self):
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()

    def url(self, path="/"):
        return f"http://{self.metrics}{path}"

    def get(self, path):
        """Status code and body."""
        try:
            with urllib.request.urlopen(self.url(path), timeout=60) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def status(self):
        return json.loads(self.get("/status.json")[1])
