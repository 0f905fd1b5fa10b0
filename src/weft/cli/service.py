"""`weft service`: the server as a service of the user's own session manager: launchd on macOS, systemd on Linux.

Writes one file and asks the manager to take it; never as root. What the server is told stands in that file, its secrets do not.
"""

from __future__ import annotations

import os
import plistlib
import re
import shlex
import subprocess
import sys
from abc import ABC, abstractmethod
from pathlib import Path

from weft.cli.client import ServerClient
from weft.errors import WeftError

NAME = "weft"
LABEL = "dev.weft.serve"
HANDED_ON = ("WEFT_CACHE", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE")  # a service does not see the shell's variables
MANAGER_SECONDS = 60


class Manager(ABC):
    """Who starts services here."""

    @property
    @abstractmethod
    def file(self) -> Path:
        """Where it looks for them."""

    @abstractmethod
    def text(self, command: list[str], environment: dict[str, str]) -> str:
        """What it is told of this one."""

    @abstractmethod
    def start(self) -> None:
        """Take the file, start the service now and at every login."""

    @abstractmethod
    def stop(self) -> None:
        """End the service and forget the file."""

    @abstractmethod
    def state(self) -> str:
        """One word or line on how it is."""

    @abstractmethod
    def log_end(self, lines: int) -> str:
        """The last lines it has written."""


class Systemd(Manager):
    """The user's own systemd."""

    @property
    def file(self) -> Path:
        """A unit among the user's."""
        base = os.environ.get("XDG_CONFIG_HOME")
        return (Path(base) if base else Path.home() / ".config") / "systemd" / "user" / f"{NAME}.service"

    def text(self, command: list[str], environment: dict[str, str]) -> str:
        """A unit."""
        variables = [f"Environment={_in_unit(f'{name}={value}')}" for name, value in environment.items()]
        lines = [
            "[Unit]",
            "Description=weft, an LLM inference server",
            "After=network.target",
            "",
            "[Service]",
            f"ExecStart={' '.join(_in_unit(word).replace('$', '$$') for word in command)}",
            *variables,
            "WorkingDirectory=%h",
            "Restart=on-failure",
            "RestartSec=5",
            "TimeoutStopSec=30",  # --drain-seconds, and some
            "",
            "[Install]",
            "WantedBy=default.target",
        ]
        return "\n".join(lines) + "\n"

    def start(self) -> None:
        """Enable it."""
        _ask("systemctl", "--user", "daemon-reload")
        _ask("systemctl", "--user", "enable", NAME)
        _ask("systemctl", "--user", "restart", NAME)

    def stop(self) -> None:
        """Disable it; where there is no systemd to ask, nothing runs."""
        _ask("systemctl", "--user", "disable", "--now", NAME, may_fail=True)

    def state(self) -> str:
        """What systemd calls it: active, failed …"""
        return _ask("systemctl", "--user", "is-active", NAME, may_fail=True)

    def log_end(self, lines: int) -> str:
        """From the journal."""
        return _ask("journalctl", "--user", "--unit", NAME, "--lines", str(lines), "--no-pager", may_fail=True)


class Launchd(Manager):
    """The user's own launchd."""

    log = Path("~/Library/Logs/weft.log")

    @property
    def file(self) -> Path:
        """A property list among the user's agents."""
        return Path.home() / "Library" / "LaunchAgents" / f"{LABEL}.plist"

    def text(self, command: list[str], environment: dict[str, str]) -> str:
        """A property list."""
        facts = {
            "Label": LABEL,
            "ProgramArguments": command,
            "EnvironmentVariables": environment,
            "WorkingDirectory": str(Path.home()),
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ProcessType": "Interactive",  # others are slowed down when the machine is busy
            "ExitTimeOut": 30,
            "StandardErrorPath": str(self.log.expanduser()),
        }
        return plistlib.dumps(facts, sort_keys=False).decode()

    def start(self) -> None:
        """Load it, in the place of an older one."""
        _ask("launchctl", "bootout", f"gui/{os.getuid()}/{LABEL}", may_fail=True)
        _ask("launchctl", "bootstrap", f"gui/{os.getuid()}", str(self.file))

    def stop(self) -> None:
        """Unload it."""
        _ask("launchctl", "bootout", f"gui/{os.getuid()}/{LABEL}", may_fail=True)

    def state(self) -> str:
        """The line with which launchd says it."""
        told = _ask("launchctl", "print", f"gui/{os.getuid()}/{LABEL}", may_fail=True)
        return next((line.strip() for line in told.splitlines() if line.strip().startswith("state =")), "not loaded")

    def log_end(self, lines: int) -> str:
        """From its file."""
        file = self.log.expanduser()
        return "\n".join(file.read_text(errors="replace").splitlines()[-lines:]) if file.exists() else ""


def install_command(arguments: tuple[str, ...], show: bool) -> None:
    """Write the service's file and start it, or print the file."""
    manager = _manager()
    text = manager.text(_command(arguments), {name: os.environ[name] for name in HANDED_ON if name in os.environ})
    if show:
        sys.stdout.write(text)
        return
    try:
        manager.file.parent.mkdir(parents=True, exist_ok=True)
        manager.file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise WeftError(f"{manager.file} can not be written: {error.strerror}") from error
    try:
        manager.start()
    except WeftError:
        manager.file.unlink()
        raise
    sys.stdout.write(f"{manager.file} is written and weft started; it starts again at every login\n")
    if isinstance(manager, Systemd):
        sys.stdout.write("to have it without anybody logged in: loginctl enable-linger\n")


def uninstall_command() -> None:
    """End the service and take its file away."""
    manager = _manager()
    if not manager.file.exists():
        raise WeftError(f"there is no {manager.file}; nothing is installed")
    manager.stop()
    manager.file.unlink()
    sys.stdout.write(f"{manager.file} is gone and weft is stopped; models and settings stay where they are\n")


def status_command() -> int:
    """Print whether it is installed, how it is, and whether a server answers. Gives 0 only where all three are well."""
    manager, client = _manager(), ServerClient()
    installed = manager.file.exists()
    state = manager.state() if installed else "not installed"
    try:
        answers = client.get("/health", dict[str, object], 5.0)["status"]
    except (WeftError, KeyError) as error:
        answers = str(error)
    sys.stdout.write(f"file    {manager.file}{'' if installed else ' (not there)'}\nstate   {state}\nhealth  {answers}\n")
    return 0 if installed and answers == "ready" else 1


def log_end(lines: int) -> str:
    """The last lines that the service has written; nothing where there is none."""
    try:
        manager = _manager()
        return manager.log_end(lines) if manager.file.exists() else ""
    except WeftError:
        return ""


def _manager() -> Manager:
    if sys.platform == "darwin":
        return Launchd()
    if sys.platform == "linux":
        return Systemd()
    raise WeftError(f"weft knows no service manager of {sys.platform}; run `weft serve` by what starts programs there")


def _command(arguments: tuple[str, ...]) -> list[str]:
    """What the service runs; settings that can not be are found now, not at the next login."""
    if any(argument.split("=")[0] == "--api-key" for argument in arguments):
        raise WeftError("--api-key would stand in a file that others may read; put api_key into ~/.config/weft/config.toml")
    command = [sys.executable, "-m", "weft", "serve", *arguments]
    variables = {name: value for name, value in os.environ.items() if not name.startswith("WEFT_") or name in HANDED_ON}
    tried = subprocess.run(
        [*command, "--dump-config"], capture_output=True, text=True, check=False, env=variables, cwd=Path.home()
    )
    if tried.returncode:
        raise WeftError(tried.stderr.strip().removeprefix("weft: "))
    return command


def _in_unit(word: str) -> str:
    """A word as units have it, in their quotes where it needs some; what would be a specifier is none."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return escaped if re.fullmatch(r"[\w@+=:,./%-]+", word) else f'"{escaped}"'


def _ask(*command: str, may_fail: bool = False) -> str:
    """Run a command of the service manager; what it says is told where it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=MANAGER_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        message = f"{command[0]} can not be asked ({error}); `weft service install --print` shows the file to install by hand"
        raise WeftError(message) from error
    if done.returncode and not may_fail:
        raise WeftError(f"`{shlex.join(command)}` failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout.strip()
