"""Headless Chromium for tests, spoken to over a pipe: nothing listens on a port."""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import signal
import time
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

FLAGS: Final = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
NAMES: Final = ("chromium", "chromium-browser", "google-chrome", "chrome")


def find() -> str | None:
    """The path of Chromium, where there is one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One page of a running browser."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._rest = b""
        self._session: str | None = None
        self._count = 0
        self.complaints: list[str] = []

    def open(self, url: str, *, width: int, height: int, dark: bool = False) -> None:
        """Load a page in a window of some size, and wait until it has drawn itself."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = session["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete'")
        self.finish_frames()

    def finish_frames(self) -> None:
        """Wait until what was asked for has been drawn: two frames."""
        frames = (
            "new Promise((f) => requestAnimationFrame(() => requestAnimationFrame(f)))"
        )
        self.evaluate(f"{frames}.then(() => 0)")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, or of the promise it gives."""
        answer = self.call(
            "Runtime.evaluate",
            expression=expression,
            returnByValue=True,
            awaitPromise=True,
        )
        if "exceptionDetails" in answer:
            raise AssertionError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait_for(self, expression: str, timeout_s: float = 20.0) -> None:
        """Wait until an expression is true."""
        deadline_s = time.monotonic() + timeout_s
        while not self.evaluate(expression):
            if time.monotonic() > deadline_s:
                raise AssertionError(f"never true: {expression}")
            time.sleep(0.02)

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """Move, press, release or turn the wheel: `mouseMoved`, `mousePressed`, ..."""
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)
        self.finish_frames()

    def tap(self, x: float, y: float) -> None:
        """Touch a place with a finger, and let go."""
        self.call("Emulation.setTouchEmulationEnabled", enabled=True)
        for kind, points in (("touchStart", [{"x": x, "y": y}]), ("touchEnd", [])):
            self.call("Input.dispatchTouchEvent", type=kind, touchPoints=points)
        self.finish_frames()

    def key(self, key: str, *, shift: bool = False) -> None:
        """Press and release a key."""
        for kind in ("keyDown", "keyUp"):
            modifiers = 8 if shift else 0
            self.call("Input.dispatchKeyEvent", type=kind, key=key, modifiers=modifiers)
        self.finish_frames()

    def screenshot(self, path: Path, *, whole_page: bool = False) -> None:
        """Write what the window shows, or the whole page, as PNG."""
        answer = self.call("Page.captureScreenshot", captureBeyondViewport=whole_page)
        path.write_bytes(b64decode(answer["data"]))

    def call(self, method: str, **params: Any) -> Any:
        """One command of the DevTools protocol, and its answer."""
        self._count += 1
        command = {"id": self._count, "method": method, "params": params}
        if self._session is not None and not method.startswith("Target."):
            command["sessionId"] = self._session
        os.write(self._to, json.dumps(command).encode() + b"\0")
        while True:
            message = self._read()
            if message.get("id") == self._count:
                if "error" in message:
                    raise AssertionError(f"{method}: {message['error']}")
                return message["result"]
            self._note(message)

    def _note(self, event: dict[str, Any]) -> None:
        """Remember what the page complains about."""
        params = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(params["exceptionDetails"]))
            case "Log.entryAdded":
                self.complaints.append(json.dumps(params["entry"]))
            case "Runtime.consoleAPICalled":
                self.complaints.append(json.dumps(params["args"]))
            case _:
                pass

    def _read(self, timeout_s: float = 30.0) -> dict[str, Any]:
        while b"\0" not in self._rest:
            if not select.select([self._from], [], [], timeout_s)[0]:
                raise AssertionError(f"Chromium said nothing for {timeout_s:g} s")
            more = os.read(self._from, 1 << 20)
            if not more:
                raise AssertionError("Chromium has gone")
            self._rest += more
        first, self._rest = self._rest.split(b"\0", 1)
        message: dict[str, Any] = json.loads(first)
        return message


@contextmanager
def running(program: str, profile: Path) -> Iterator[Page]:
    """A browser with a profile folder of its own, ended at the end."""
    profile.mkdir(parents=True, exist_ok=True)
    # Chromium reads commands from descriptor 3 and answers on 4; ours lie above.
    commands_out, commands_in = _pipe()
    answers_out, answers_in = _pipe()
    quiet = os.open(os.devnull, os.O_RDWR)
    actions = [
        (os.POSIX_SPAWN_DUP2, quiet, 1),
        (os.POSIX_SPAWN_DUP2, quiet, 2),
        (os.POSIX_SPAWN_DUP2, commands_out, 3),
        (os.POSIX_SPAWN_DUP2, answers_in, 4),
    ]
    argv = [program, *FLAGS, f"--user-data-dir={profile}"]
    process = os.posix_spawn(
        program, argv, os.environ, file_actions=actions, setpgroup=0
    )
    for fd in (commands_out, answers_in, quiet):
        os.close(fd)
    try:
        yield Page(commands_in, answers_out)
    finally:
        os.killpg(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(commands_in)
        os.close(answers_out)


def _pipe() -> tuple[int, int]:
    """A pipe whose descriptors leave 3 and 4 free."""
    ends = os.pipe()
    high = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
    for end in ends:
        os.close(end)
    return high[0], high[1]
