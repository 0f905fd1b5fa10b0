"""`weft service`: runs the server under the user's own launchd or systemd, never as root; its service file holds no secrets."""

import os
import plistlib
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from weft.cli import Show, writing
from weft.cli.client import ServerClient
from weft.errors import WeftError

NAME = "weft"
LABEL = "dev.weft.serve"
LAUNCHD_LOG = Path("~/Library/Logs/weft.log")
HANDED_ON = ("WEFT_CACHE", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE")  # a service does not see the shell's variables
MANAGER_SECONDS = 60

ABOUT = "The server as a service of your own session: launchd on macOS, systemd on Linux. Never as root."
service_command = App(name="service", help=ABOUT)


class Systemd:
    """The user's systemd instance (`systemctl --user`) as service manager; the service file is a unit file."""

    @property
    def file(self) -> Path:
        return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config", "systemd", "user", f"{NAME}.service")

    def text(self, command: list[str], environment: dict[str, str]) -> str:
        words = " ".join(_quote_for_unit(word).replace("$", "$$") for word in command)
        variables = (f"Environment={_quote_for_unit(f'{name}={value}')}\n" for name, value in environment.items())
        unit = Path(__file__).with_name("weft.service").read_text(encoding="utf-8")
        return unit.format(command=words, environment="".join(variables))

    def start(self) -> None:
        _call_manager("systemctl", "--user", "daemon-reload")
        _call_manager("systemctl", "--user", "enable", NAME)
        _call_manager("systemctl", "--user", "restart", NAME)

    def stop(self) -> None:
        _call_manager("systemctl", "--user", "disable", "--now", NAME, may_fail=True)

    def state(self) -> str:
        return _call_manager("systemctl", "--user", "is-active", NAME, may_fail=True)

    def log_end(self, lines: int) -> str:
        return _call_manager("journalctl", "--user", "--unit", NAME, "--lines", str(lines), "--no-pager", may_fail=True)


class Launchd:
    """The user's launchd session (`launchctl`) as service manager; the service file is a property list."""

    @property
    def file(self) -> Path:
        return Path.home() / "Library" / "LaunchAgents" / f"{LABEL}.plist"

    def text(self, command: list[str], environment: dict[str, str]) -> str:
        facts: dict[str, object] = {"Label": LABEL, "ProgramArguments": command, "EnvironmentVariables": environment}
        facts |= {"WorkingDirectory": str(Path.home()), "RunAtLoad": True, "KeepAlive": {"SuccessfulExit": False}}
        facts |= {"ProcessType": "Interactive"}  # others are slowed down when the machine is busy
        facts |= {"ExitTimeOut": 30, "StandardErrorPath": str(LAUNCHD_LOG.expanduser())}
        return plistlib.dumps(facts, sort_keys=False).decode()

    def start(self) -> None:
        self.stop()  # an older one
        _call_manager("launchctl", "bootstrap", f"gui/{os.getuid()}", str(self.file))

    def stop(self) -> None:
        _call_manager("launchctl", "bootout", f"gui/{os.getuid()}/{LABEL}", may_fail=True)

    def state(self) -> str:
        lines = _call_manager("launchctl", "print", f"gui/{os.getuid()}/{LABEL}", may_fail=True).splitlines()
        return next((line.strip() for line in lines if line.strip().startswith("state =")), "not loaded")

    def log_end(self, lines: int) -> str:
        return last_lines(LAUNCHD_LOG.expanduser(), lines)


@service_command.command(name="install")
def install_command(
    *arguments: Annotated[str, Parameter(allow_leading_hyphen=True, help="What `weft serve` is told.")],
    show: Annotated[Show, Parameter(help="Print the file that would be installed, and do nothing.")] = False,
) -> None:
    """Start `weft serve` now and at every login, and again when it dies. Installing again replaces it.

    Its settings are what follows, and ~/.config/weft/config.toml; that is the
    place for an API key. After the word engine it is `weft engine` instead.

    For example:
      weft service install
      weft service install engine smollm2 --listen 0.0.0.0:8500
      weft service install smollm2 --port 9000
      weft service install --print
    """
    manager = _find_manager()
    text = manager.text(_serve_command(arguments), {name: os.environ[name] for name in HANDED_ON if name in os.environ})
    if show:
        sys.stdout.write(text)
        return
    with writing(manager.file):
        manager.file.parent.mkdir(parents=True, exist_ok=True)
        manager.file.write_text(text, encoding="utf-8")
    try:
        manager.start()
    except WeftError:
        manager.file.unlink()
        raise
    sys.stdout.write(f"{manager.file} is written and weft started; it starts again at every login\n")
    if isinstance(manager, Systemd):
        sys.stdout.write("to have it without anybody logged in: loginctl enable-linger\n")


@service_command.command(name="uninstall")
def uninstall_command() -> None:
    """Stop the service and take its file away.

    For example:
      weft service uninstall
    """
    manager = _find_manager()
    if not manager.file.exists():
        raise WeftError(f"there is no {manager.file}; nothing is installed")
    manager.stop()
    manager.file.unlink()
    sys.stdout.write(f"{manager.file} is gone and weft is stopped; models and settings stay where they are\n")


@service_command.command(name="status")
def status_command() -> int:
    """Say whether the service is installed, whether it runs, and whether its server answers. Status 1 where not.

    For example:
      weft service status
    """
    manager = _find_manager()
    is_installed = manager.file.exists()
    state = manager.state() if is_installed else "not installed"
    try:
        health = ServerClient().fetch("/health", dict[str, object], 5.0)["status"]
    except (WeftError, KeyError) as error:
        health = str(error)
    sys.stdout.write(f"file    {manager.file}{'' if is_installed else ' (not there)'}\nstate   {state}\nhealth  {health}\n")
    return 0 if is_installed and health == "ready" else 1


def read_log_end(lines: int) -> str:
    """Return the last lines of the service's log; empty if no service is installed or its manager can not be asked."""
    try:
        manager = _find_manager()
        return manager.log_end(lines) if manager.file.exists() else ""
    except WeftError:
        return ""


def last_lines(file: Path, count: int) -> str:
    """Return the last `count` lines of a text file as one string; empty if the file does not exist."""
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True) if file.exists() else []
    return "".join(lines[-count:])


def _find_manager() -> Systemd | Launchd:
    if sys.platform in ("darwin", "linux"):
        return Launchd() if sys.platform == "darwin" else Systemd()
    raise WeftError(f"weft knows no service manager of {sys.platform}; run `weft serve` by what starts programs there")


def _serve_command(arguments: tuple[str, ...]) -> list[str]:
    """Return the command that the service runs; raise WeftError if `weft serve --dump-config` rejects its settings."""
    if any(argument.split("=")[0] == "--api-key" for argument in arguments):
        raise WeftError("--api-key would stand in a file that others may read; put api_key into ~/.config/weft/config.toml")
    if arguments[:1] == ("engine",):
        return [sys.executable, "-m", "weft", *arguments]
    command = [sys.executable, "-m", "weft", "serve", *arguments]
    env = {name: value for name, value in os.environ.items() if not name.startswith("WEFT_") or name in HANDED_ON}
    done = subprocess.run([*command, "--dump-config"], capture_output=True, text=True, check=False, env=env, cwd=Path.home())
    if done.returncode:
        raise WeftError(done.stderr.strip().removeprefix("weft: "))
    return command


def _quote_for_unit(word: str) -> str:
    """Quote a word for a systemd unit file where necessary, escaping backslashes, quotes and % specifiers."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return escaped if re.fullmatch(r"[\w@+=:,./%-]+", word) else f'"{escaped}"'


def _call_manager(*command: str, may_fail: bool = False) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=MANAGER_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        message = f"{command[0]} can not be asked ({error}); `weft service install --print` shows the file to install by hand"
        raise WeftError(message) from error
    if done.returncode and not may_fail:
        raise WeftError(f"`{shlex.join(command)}` failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout.strip()
