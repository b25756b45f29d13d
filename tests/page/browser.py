"""Drives headless Chromium through its DevTools pipe; nothing but Python's standard library.

Messages are JSON ended by a NUL byte, requests on the browser's descriptor 3, replies and events on 4.
"""
import base64
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
WAIT_S = 120


def find():
    """The browser's path, or None."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Page:
    """One tab. Uncaught exceptions and error messages of the page gather in `errors`."""

    def __init__(self, url, width=1128, height=900, scheme="light", scale=1):
        self.folder = tempfile.TemporaryDirectory()
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()

        def descriptors():
            keep = os.dup(from_browser)  # may be 3 itself
            os.dup2(to_browser, 3)
            os.dup2(keep, 4)

        self._process = subprocess.Popen(
            [find(), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
             "--hide-scrollbars", "--remote-debugging-pipe", "--user-data-dir=" + self.folder.name],
            preexec_fn=descriptors, close_fds=False, start_new_session=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(to_browser)
        os.close(from_browser)
        self.errors = []
        self._buffer = b""
        self._sent = 0
        self._session = None
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._call("Runtime.enable")
        self._call("Log.enable")
        self.size(width, height, scale)
        self.scheme(scheme)
        self._call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && document.body !== null")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._write)
        os.close(self._read)
        self.folder.cleanup()

    def _call(self, method, **parameters):
        self._sent += 1
        message = {"id": self._sent, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._message()
            if reply.get("id") == self._sent:
                if "error" in reply:
                    raise RuntimeError(f"{method}: {reply['error']}")
                return reply["result"]
            self._event(reply)

    def _message(self):
        end = time.monotonic() + WAIT_S
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0, end - time.monotonic()))
            data = os.read(self._read, 1 << 16) if ready else b""
            if not data:
                raise RuntimeError("the browser ended" if ready else "the browser does not answer")
            self._buffer += data
        text, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(text)

    def _event(self, event):
        parameters = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(parameters["exceptionDetails"].get("exception", {}).get("description", "exception"))
        elif event.get("method") == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.errors.append(parameters["entry"]["text"])

    def size(self, width, height, scale=1):
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale,
                   mobile=False)

    def scheme(self, name):
        """`light` or `dark`: what the operating system is said to prefer."""
        self._call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def value(self, expression):
        """The value of a JavaScript expression in the page."""
        reply = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in reply:
            raise RuntimeError(f"{expression}: {reply['exceptionDetails']}")
        return reply["result"].get("value")

    def wait(self, expression):
        """Until the expression is true; fails after WAIT_S."""
        end = time.monotonic() + WAIT_S
        while not self.value(expression):
            if time.monotonic() > end:
                raise RuntimeError(f"{expression} did not become true; the page says:\n{self.value('document.body.innerText')}")
            time.sleep(0.05)

    def shot(self, path):
        """A PNG of the whole page."""
        clip = self.value("({x: 0, y: 0, scale: 1, width: innerWidth, height: document.documentElement.scrollHeight})")
        data = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)["data"]
        with open(path, "wb") as file:
            file.write(base64.b64decode(data))
