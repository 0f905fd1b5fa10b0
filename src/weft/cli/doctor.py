"""`weft doctor`: checks versions, settings, disk, port, device and memory here, and tries requests on a server of its own."""

import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import msgspec
from cyclopts import Parameter
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from rich.console import Console
from rich.filesize import decimal
from rich.text import Text

from weft import __version__
from weft.cli import Switch, writing
from weft.cli.client import ServerClient
from weft.cli.service_unit import last_lines, read_log_end
from weft.config import cache_folder
from weft.errors import RequestError, WeftError

if TYPE_CHECKING:
    from weft.engine.budget import MemoryBudget

MODEL = "tiny-hybrid"
STYLES = {"ok": "green", "slow": "yellow", "differs": "yellow", "wrong": "bold red"}
ROOM_BYTES = 1_000_000_000  # the default model takes 0.7 GB while it is fetched and converted
LOG_LINES = 300
SECRET = re.compile("KEY|TOKEN|SECRET|PASSWORD")  # in the name of a variable
START_SECONDS = 120.0
ASK_SECONDS = 60.0
SLOW_TOKENS = 40.0  # a second, of a model of 12 M parameters: one old core does hundreds
STORY, STORY_GOES_ON = "Once upon a time", ", there was"  # the greedy continuation on every device
RUN_AGAIN = "run again; if it stays, report it with the file of --bundle"
CHECK_HELP = "Load this model and check that batched = alone, cached = cold and so on; prints a report for an issue."
EXACT_HELP = "With --check: as `weft serve --exact` computes."
BUNDLE_HELP = "Write report, settings, versions and the end of the logs to this zip, without keys or prompts."


class Finding(NamedTuple):
    """The grade of one check, what was found, and advice; `str` gives its line of the report."""

    grade: Literal["ok", "slow", "differs", "wrong"]  # differs: what is not promised
    what: str
    found: str
    advice: str = ""

    def __str__(self) -> str:
        return f"{self.grade:<7} {self.what:<12} {self.found}{f'; {self.advice}' if self.advice else ''}"


def doctor_command(
    *,
    check: Annotated[str | None, Parameter(help=CHECK_HELP)] = None,
    exact: Annotated[Switch, Parameter(help=EXACT_HELP)] = False,
    bundle: Annotated[Path | None, Parameter(help=BUNDLE_HELP)] = None,
) -> int:
    """Look whether all is well here: versions, settings, disk, device, memory, and a small server tried out.

    Each line is ok, slow or wrong, and says what to do. Status 1 where something is
    wrong. Nothing is fetched; the model tried is the one that comes with weft.

    With --check a model of yours is tried instead, in a minute or a few: whether its
    answers are the same alone and in a batch, with cached prompts, with drafts and
    after an interruption, token by token and bit by bit, and how fast each is.

    For example:
      weft doctor
      weft doctor --check smollm2
      weft doctor --bundle report.zip
    """
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    if check is not None:
        from weft.cli.doctor_check import check_model

        return check_model(console, check, exact=exact)
    findings = []
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        for finding in examine(log):
            print_finding(console, finding)
            findings.append(finding)
        if bundle is not None:
            write_bundle(bundle, findings, log)
            console.print(f"{bundle} has this report, settings, versions and the end of the logs; no keys, no prompts")
    return 1 if any(finding.grade == "wrong" for finding in findings) else 0


def print_finding(console: Console, finding: Finding) -> None:
    """Print a finding as a line of the report, its grade in colour."""
    console.print(Text.assemble((finding.grade, STYLES[finding.grade]), str(finding).removeprefix(finding.grade)))


def examine(log: Path) -> Iterator[Finding]:
    """Run all checks, cheap ones first, and yield their findings; the log of the server started for them is written to `log`."""
    yield check_versions()
    yield _check_settings()
    yield _check_disk(cache_folder())
    yield _check_port()
    yield from _check_device()
    yield from check_server(log)


def check_versions() -> Finding:
    """Compare the versions of the packages that weft needs with the ranges that it names."""
    installed = _installed_versions()
    found = [f"{name} {installed.get(name, 'missing')}" for name in ("mlx", "mlx-lm", "llguidance")]
    words = ", ".join([f"weft {__version__}, Python {platform.python_version()}", *found])
    return _judge_versions(words, importlib.metadata.requires("weft") or [], installed)


def _judge_versions(words: str, requirements: list[str], installed: dict[str, str]) -> Finding:
    """Grade installed versions by the ranges that weft's own metadata names, for the packages that it needs on this platform."""
    needed = [need for need in map(Requirement, requirements) if need.marker is None or need.marker.evaluate({"extra": ""})]
    by_name = {canonicalize_name(name): version for name, version in installed.items()}
    outside = [need for need in needed if not _is_within(need, by_name.get(canonicalize_name(need.name)))]
    if outside:
        ranges = " and ".join(f"{need.name}{need.specifier}" for need in outside)
        return Finding("wrong", "versions", words, f"weft needs {ranges}: install it with pip")
    return Finding("ok", "versions", words)


def _is_within(need: Requirement, version: str | None) -> bool:
    return version is not None and need.specifier.contains(version, prereleases=True)


def _installed_versions() -> dict[str, str]:
    packages = reversed([*importlib.metadata.distributions()])  # of two with one name the first is the one that is imported
    return {name: package.version for package in packages if (name := package.metadata["Name"])}  # None: half removed


def _check_settings() -> Finding:
    done = _dump_config()
    if done.returncode:
        return Finding("wrong", "settings", done.stderr.strip().removeprefix("weft: "), "`weft serve` says the same")
    table = tomllib.loads(done.stdout)["serve"]
    keys = f"{len(table['api_key'])} API keys" if table["api_key"] else "no API key"
    models = ", ".join(table["models"]) or "the default model"
    return Finding("ok", "settings", f"{models} at {table['host']}:{table['port']}, {keys}")


def _dump_config() -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "weft", "serve", "--dump-config"], capture_output=True, text=True, check=False)


def _check_disk(folder: Path) -> Finding:
    there = next(place for place in (folder, *folder.parents) if place.exists())
    if not os.access(there, os.W_OK):
        return Finding("wrong", "disk", f"{there} can not be written", "set WEFT_CACHE to a folder that can")
    free = shutil.disk_usage(there).free
    found = f"{decimal(free)} free in {folder}"
    if free < ROOM_BYTES:
        return Finding("wrong", "disk", found, f"models need {decimal(ROOM_BYTES)} and more; set WEFT_CACHE to another disk")
    return Finding("ok", "disk", found)


def _check_port() -> Finding:
    client = ServerClient()
    try:
        status = client.fetch("/v1/status", dict[str, object], 5.0)
    except RequestError as error:
        return Finding("wrong", "port", f"{client.url}: {error}", "set WEFT_API_KEY to the server's key")
    except WeftError as error:
        if "no server answers" in str(error):
            return Finding("ok", "port", f"{client.url} is free")
        return Finding("wrong", "port", str(error), "end it, or serve elsewhere with --port")
    return Finding("ok", "port", f"{client.url} is weft {status.get('version')}, up for {status.get('uptime_seconds')} s")


def _check_device() -> Iterator[Finding]:
    """Load a model in this process and yield findings on device, BLAS, gated delta and memory, or why it can not be loaded."""
    try:
        from weft.llm import BLAS, LLM  # binds the BLAS, so it comes before whoever else imports mlx

        from weft.engine.budget import MemoryBudget  # isort: skip
        from weft.engine.process import missing_operations, safe_memory  # isort: skip

        llm = LLM(MODEL)
    except (ImportError, OSError, RuntimeError, WeftError) as error:
        yield Finding("wrong", "device", f"{MODEL} can not be loaded: {error}", "reinstall weft, and mlx with it")
        return
    machine = f"{platform.system()} {platform.release()} {platform.machine()}, {os.cpu_count()} cores"
    yield Finding("ok", "device", f"{machine}, MLX on {llm.device}")
    yield _judge_products(BLAS.name, BLAS.threads, BLAS.warning)
    if llm.device == "cpu":
        yield _judge_operations(missing_operations())
    adapter = llm.engine.adapter
    yield _judge_gated_delta(llm.device, adapter.gated_delta_modules)
    budget = MemoryBudget(adapter.row_bytes, adapter.weights_bytes, safe_memory())
    yield _judge_memory(budget, llm.engine.limits.context_length, llm.config.max_rows)


def _judge_products(name: str, threads: int | None, warning: str | None) -> Finding:
    if name == "none":
        return Finding("ok", "products", "MLX's own on this device")
    if name == "weft+openblas":
        return Finding("ok", "products", f"weft's sgemm in front of OpenBLAS, {threads} threads")
    if name == "openblas":
        advice = "reinstall weft with a C compiler present: small batches would be faster, and exact"
        return Finding("slow", "products", f"OpenBLAS alone, {threads} threads", advice)
    return Finding("slow", "products", warning or "MLX's reference BLAS", "" if warning else "reinstall weft")


def _judge_operations(missing: str | None) -> Finding:
    if missing is None:
        return Finding("ok", "operations", "weft's own in MLX's graph: fused layers, packed weights")
    reason, _, advice = missing.rpartition(": ")
    return Finding("slow", "operations", f"mlx's own, several times slower: {reason}", advice)


def _judge_gated_delta(device: str, modules: list[str]) -> Finding:
    if modules:
        return Finding("ok", "gated delta", f"weft's, in chunks, on {device} ({', '.join(modules)})")
    if device == "metal":
        return Finding("ok", "gated delta", "mlx-lm's Metal kernel")
    return Finding("slow", "gated delta", "mlx-lm's loop over tokens", "install the mlx-lm that weft names")


def _judge_memory(budget: "MemoryBudget", context: int, max_rows: int) -> Finding:
    row = budget.bytes_of(context)
    words = f"{MODEL}: weights {decimal(budget.weights_bytes)}, a row of {context:,} tokens {decimal(row)}"
    if budget.budget_bytes is None or budget.room_bytes is None:
        return Finding("ok", "memory", f"{words}; how much there is is not known here", "set --memory")
    fitting = budget.room_bytes // row
    words = f"--memory would be {budget.budget_bytes >> 20:,} (MiB); {words}, {fitting:,} fit, {max_rows} run together"
    if fitting:
        return Finding("ok", "memory", words)
    return Finding("wrong", "memory", words, "end other programs: not even this model has room")


def write_bundle(file: Path, findings: list[Finding], log: Path) -> None:
    """Write a zip with report, settings, versions and last log lines, secrets masked; raise WeftError if that fails."""
    found = _installed_versions()
    packages = "".join(f"{name}=={found[name]}\n" for name in sorted(found, key=str.lower))
    texts = {
        "report.txt": "".join(f"{finding}\n" for finding in findings),
        "config.toml": _dump_config().stdout,
        "versions.txt": f"Python {sys.version}\n{platform.platform()}\n{packages}",
        "log.txt": last_lines(log, LOG_LINES),
        "service-log.txt": read_log_end(LOG_LINES),
    }
    with writing(file), zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in texts.items():
            archive.writestr(name, without_secrets(text))


def without_secrets(text: str) -> str:
    """Return the text with the values of secret-looking environment variables (*KEY*, *TOKEN*, …) masked by asterisks."""
    secrets = {value for name, value in os.environ.items() if SECRET.search(name.upper())}
    for secret in {part.strip() for value in secrets for part in (value, *value.split(","))}:
        if len(secret) > 3:  # shorter ones are in any text
            text = text.replace(secret, "********")
    return text


def check_server(log: Path) -> Iterator[Finding]:
    """Start a server for testing and yield findings on its start and on each request tried; its log is written to `log`."""
    try:
        with own_server(log) as (client, seconds):
            yield Finding("ok", "server", f"{MODEL} was served after {seconds:.1f} s")
            for what, check in SERVER_CHECKS.items():
                yield run_check(what, check, client)
    except WeftError as error:
        yield Finding("wrong", "server", str(error), "see the log in a --bundle, and run `weft serve tiny-hybrid` yourself")


@contextmanager
def own_server(log: Path) -> Iterator[tuple[ServerClient, float]]:
    """Context manager that runs a server on a free port without the user's settings; yields its client and start-up seconds."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WEFT_") or name == "WEFT_CACHE"}
    with tempfile.TemporaryDirectory() as folder, log.open("wb") as errors:
        Path(folder, "empty.toml").touch()
        command = [sys.executable, "-m", "weft", "serve", MODEL, "--port=0", "--store-responses=0", "--config=empty.toml"]
        start = time.monotonic()
        with subprocess.Popen(command, stdout=errors, stderr=errors, env=environment, cwd=folder) as process:
            try:
                yield _until_ready(process, log, start + START_SECONDS), time.monotonic() - start
            finally:
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(15)
                process.kill()  # where it has not ended by itself


def _until_ready(process: subprocess.Popen[bytes], log: Path, deadline: float) -> ServerClient:
    while time.monotonic() < deadline:
        text = log.read_text(encoding="utf-8", errors="replace")
        if process.poll() is not None:
            last = text.strip().splitlines()[-1:] or ["without a word"]
            raise WeftError(f"the server ended with status {process.returncode}: {last[0]}")
        if found := re.search(r"listens at (http://\S+)", text):
            client = ServerClient(found[1], key="none")
            with suppress(WeftError):
                client.fetch("/health", msgspec.Raw, ASK_SECONDS)  # says 503 while it loads
                return client
        time.sleep(0.05)
    raise WeftError(f"the server was not ready after {START_SECONDS:.0f} s")


def run_check(what: str, check: Callable[[ServerClient], Finding], client: ServerClient) -> Finding:
    """Run one check against a server and return its finding; an error or a malformed answer gives a finding graded wrong."""
    try:
        return check(client)
    except (WeftError, ValueError, LookupError, TypeError) as error:
        return Finding("wrong", what, f"{type(error).__name__}: {error}", RUN_AGAIN)


def _check_generation(client: ServerClient) -> Finding:
    body = {"model": MODEL, "prompt": STORY, "max_tokens": 48, "temperature": 0, "ignore_eos": True}
    answer = client.fetch("/v1/completions", dict[str, Any], ASK_SECONDS, body)
    text, speed = answer["choices"][0]["text"], answer["timings"]["predicted_per_second"]
    if not text.startswith(STORY_GOES_ON):
        advice = "the numbers are not the model's; reinstall mlx, and look at the line `products`"
        return Finding("wrong", "generation", f"{STORY!r} went on with {text[:40]!r}", advice)
    found = f"{answer['usage']['completion_tokens']} tokens, {speed:.0f} tokens/s"
    if speed < SLOW_TOKENS:
        return Finding("slow", "generation", found, "look at the line `products`, and at what else runs on this machine")
    return Finding("ok", "generation", found)


def _check_schema(client: ServerClient) -> Finding:
    schema = _strict_object(name={"type": "string", "maxLength": 12}, legs={"type": "integer", "minimum": 0, "maximum": 8})
    form = {"type": "json_schema", "json_schema": {"name": "animal", "schema": schema, "strict": True}}
    message = _chat(client, "Tell me of an animal.", response_format=form)["choices"][0]["message"]
    animal = json.loads(message["content"])
    if animal.keys() != {"name", "legs"} or type(animal["name"]) is not str or animal["legs"] not in range(9):
        raise ValueError(f"{message['content']!r} does not fit the schema")
    return Finding("ok", "schema", f"strict: {json.dumps(animal)}")


def _check_cache(client: ServerClient) -> Finding:
    question = " ".join(f"Number {number} is a dog." for number in range(60)) + " Which is a dog?"
    first, second = (_chat(client, question, max_tokens=1)["usage"] for _ in range(2))
    cached = second["prompt_tokens_details"]["cached_tokens"]
    found = f"{cached} of {second['prompt_tokens']} prompt tokens were known the second time"
    is_known = first["prompt_tokens"] == second["prompt_tokens"] and cached
    return Finding("ok", "cache", found) if is_known else Finding("wrong", "cache", found, RUN_AGAIN)


def _check_tool_call(client: ServerClient) -> Finding:
    parameters = _strict_object(file={"type": "string", "enum": ["one", "two"]})
    tool = {"type": "function", "function": {"name": "look", "parameters": parameters, "strict": True}}
    choice = {"type": "function", "function": {"name": "look"}}
    answer = _chat(client, "Look into a file.", tools=[tool], tool_choice=choice)
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
    if name != "look" or arguments not in ({"file": "one"}, {"file": "two"}):
        raise ValueError(f"{call['function']} is not the call that was forced")
    return Finding("ok", "tool call", f"{name}({json.dumps(arguments)})")


def _strict_object(**properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def _chat(client: ServerClient, question: str, **more: Any) -> dict[str, Any]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 200}
    return client.fetch("/v1/chat/completions", dict[str, Any], ASK_SECONDS, {**body, "reasoning_effort": "none", **more})


SERVER_CHECKS = {"generation": _check_generation, "schema": _check_schema, "cache": _check_cache, "tool call": _check_tool_call}
