"""Settings of server and engine, resolved once at start; docs/log.md has the measurements behind the defaults."""

import ipaddress
import math
import os
import re
import sys
import tomllib
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, Self, get_args

import msgspec

from weft.errors import WeftError

Device = Literal["cpu", "cuda", "metal"]
DraftSource = Literal["forced", "lookup", "mtp"]  # of draft tokens, which a step verifies: engine/speculation.py
DRAFT_SOURCES: tuple[DraftSource, ...] = get_args(DraftSource)

SAFE_SHARE = 0.8  # of the memory there is, for one engine
DEFAULT_ENGINE_KEY = Path("~/.config/weft/engine.key")
RESERVE_SHARE = 0.1  # of an engine's budget, for what a forward needs beside weights and rows


def read_toml(path: Path, name: str) -> dict[str, Any]:
    """Read a TOML file; `name` is what messages call it. Raises WeftError if it can not be read or is not TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise WeftError(f"{name} can not be read: {error.strerror}") from error
    except ValueError as error:
        raise WeftError(f"{name} is not TOML: {error}") from error


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Settings of one engine process, sent to it by the front as the first message."""

    model: str
    fallback: str | None = None  # served where the model can not be had
    exact: bool = False
    max_rows: int | None = None  # None: what suits the device
    memory_bytes: int | None = None  # None: a safe share of what is there
    shards: int = 1  # processes that one engine computes in, each with a slice of every layer
    memory_share: float = 1.0  # of that safe share, where several engines compute on one device
    cache_bytes: int = 0
    cache_folder: str | None = None
    cache_folder_bytes: int = 10 << 30
    cache_canary: bool = False
    speculate: tuple[DraftSource, ...] = DRAFT_SOURCES  # from where draft tokens may come; (): none are verified
    report_prefixes: bool = False  # tell the front what is cached, so that it can choose between replicas
    log_format: Literal["text", "json"] = "text"


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Batch size, prefill chunking, memory and scheduling parameters of one engine; `resolve` gives a device's defaults."""

    max_rows: int  # sequences that decode together; the others wait
    slab_tokens: int  # tokens in one slab: slots = slab_tokens / capacity, so a slab of long rows has one slot
    coarse_tokens: int | None = None  # up to here capacities are far apart, so that many rows share a slab; None: a quarter
    chunk_tokens: int  # prompt tokens of one prefill chunk; chunks end at multiples of it
    group_tokens: int = 0  # prompt tokens of several prompts' chunks in one forward while no row decodes; 0: one prompt at a time
    group_tokens_beside: int | None = None  # the most beside rows that decode, in slices; None: those of one chunk
    group_tokens_short: int | None = None  # the most where a short chunk is computed before a step; None: unsliced_tokens
    gap_factor: float = 1.5  # a prefill slice may make the time between decode steps so many steps longer
    slices_behind_step: bool = False  # their time begins when the step beside them has ended, not when it has begun
    row_cost: float = 0.0  # of one more row in a decode step, in steps of one row; 0: as good as nothing
    unsliced_tokens: int = 32  # a chunk of no more is not sliced: that would cost as much again
    width: int | None = None  # exact mode: every decode step runs at this width; None: as many rows as there are
    exact: bool = False  # an answer's bits do not depend on other requests, what was cached, or whether it was interrupted
    max_replayed_tokens: int = 256  # if not exact: emitted tokens of a resumed row that are decoded again; more are prefilled
    memory_bytes: int | None = None  # for weights, rows and cached prefixes; None: unlimited
    cache_bytes: int = 0  # for cached prefixes; 0: none are kept
    pipelined: bool = True  # build a step while the last one runs; the plain order is the oracle
    speculate: tuple[DraftSource, ...] = ()  # from where draft tokens may come; (): every step computes one token per row
    settle_first: bool = False  # settle the last step before the next is started: where starting takes as long as a step

    def __post_init__(self) -> None:
        if self.width is not None and self.width < self.max_rows:
            raise ValueError(f"width {self.width} is below max_rows {self.max_rows}: every row must fit into one step")

    @classmethod
    def resolve(cls, settings: EngineSettings, device: Device, *, is_row_invariant: bool) -> Self:
        """Return the defaults measured for a kind of device, with rows, memory, cache and exactness from `settings`.

        Where products are row-invariant (our own on CPU and CUDA) everything is exact as it is. Elsewhere exactness takes a
        constant width, which a lone request pays for, so it must be asked for.
        """
        if device == "cpu":
            config = cls(max_rows=16, slab_tokens=8192, coarse_tokens=512, chunk_tokens=128, settle_first=True, row_cost=0.2)
        else:
            config = cls(max_rows=16, slab_tokens=16384, chunk_tokens=1024)
        config = replace(config, group_tokens=config.chunk_tokens)  # no forward has more tokens than that of one long prompt
        if device == "cuda":  # a forward of few tokens takes as long as one of 256, and one of thousands fills the device
            config = replace(config, group_tokens=8192, group_tokens_beside=4096, group_tokens_short=256)
            config = replace(config, gap_factor=1.0, slices_behind_step=True)
        rows = settings.max_rows or config.max_rows
        config = replace(config, max_rows=rows, memory_bytes=settings.memory_bytes, cache_bytes=settings.cache_bytes)
        config = replace(config, speculate=settings.speculate)
        if is_row_invariant:
            return replace(config, exact=True)
        return replace(config, exact=True, width=rows) if settings.exact else config


@dataclass(frozen=True)
class ServerConfig:
    """Settings of `weft serve`: models, address, keys, limits; the string under each field is the help text of its flag."""

    models: tuple[str, ...] = ()
    """Built-in names (smollm2, tiny-hybrid), folders, .gguf files or Hugging Face ids. Default: smollm2."""
    _: KW_ONLY
    fallback: str | None = None
    """Serve this model where the one asked for can not be fetched. Without MODELS: tiny-hybrid."""
    host: str = "127.0.0.1"
    """The address to listen on. One that other machines can reach needs an API key."""
    port: int = 8400
    """The port to listen on; 0 takes any free one."""
    api_keys: tuple[str, ...] = ()
    """Ask clients for a key, as a bearer token or x-api-key: SECRET or NAME=SECRET, with :admin behind it for an admin's."""
    keys_file: str | None = None
    """A TOML file with further keys, as hashes, with roles and limits; SIGHUP has it read again."""
    share_cache: bool = False
    """Let clients with different keys share computed prompts, which lets each find out whether others sent the same."""
    requests_per_minute: int | None = None
    """Generating requests that each key may send in a minute; more are sent away with status 429."""
    tokens_per_minute: int | None = None
    """Tokens of prompts and answers that each key may use in a minute."""
    insecure: bool = False
    """Let other machines in without a key."""
    allowed_hosts: tuple[str, ...] = ()
    """Names under which clients may address the server, beside this machine's own."""
    allowed_origins: tuple[str, ...] = ()
    """Web pages that may call the server from a browser, beside those of this machine."""
    late_system: Literal["fold", "hoist"] = "fold"
    """A system message amid a conversation: fold it into its place, or hoist it to the front, which costs the cache."""
    tools_without_template: Literal["describe", "off"] = "describe"
    """Tools for a model whose chat template has no place for them: describe them in the system message, or refuse them."""
    parse_special: bool = False
    """Let control tokens that clients write into messages, such as <|im_end|>, act as such; else they are text."""
    memory: int | None = None
    """Megabytes of memory each engine may use, weights included. Default: a safe share of what is there."""
    exact: bool = False
    """On Metal, and on CUDA with experts: answers are bit-equal in any crowd, at the cost of speed. Elsewhere they always are."""
    replicas: int | str = 1
    """Engines of each model, one for each GPU; requests go where their first token comes soonest. 2-8: as many as are needed."""
    shard: int = 1
    """Divide each engine over so many processes of this machine, each with a slice of every layer and its memory."""
    engines: tuple[str, ...] = ()
    """Serve the model of these engines, HOST:PORT of `weft engine` on any machines, instead of starting engines here."""
    engine_key: str | None = None
    """The file with the key of those engines. Default: ~/.config/weft/engine.key, where it exists."""
    ray: str | None = None
    """Have Ray place the replicas on the machines of a cluster: auto (the one that runs here) or HOST:PORT of its head."""
    ray_resources: str | None = None
    """What each replica takes of its machine, as GPU=1 or CPU=4. Default: a GPU, or all cores where there is none."""
    force: bool = False
    """Let there be more replicas than devices; they divide cores and memory."""
    max_rows: int | None = None
    """Requests that each engine computes together. Default: what suits the device."""
    speculate: str = "auto"
    """Draft tokens, which change the speed and never the answer: auto (all sources), off, or some of forced,lookup,mtp."""
    cache_megabytes: int = 1024
    """Memory of each engine for prompts computed before, so that they are not computed again; 0 keeps none."""
    cache_dir: str | None = None
    """Keep computed prompts in this folder too, so that they are there after a restart."""
    cache_dir_megabytes: int = 10240
    """Room of each engine in the cache folder."""
    cache_canary: bool = False
    """When idle, compute a kept prompt again and compare."""
    max_queue: int = 256
    """Requests of each key that may wait; more are sent away with status 429."""
    max_body_bytes: int = 64 * 2**20
    """The longest request body."""
    body_seconds: float = 30.0
    """How long a request body may take to come in."""
    header_seconds: float = 10.0
    """How long the head of a request may take to come in; a new connection that says nothing for so long is closed."""
    stall_seconds: float = 60.0
    """How long a client may leave unread what it was sent before it is dropped."""
    max_connections: int = 4096
    """Connections at the same time; some of the open files allowed to the process are always kept for engines."""
    max_connections_per_address: int = 1024
    """Connections at the same time from one address. A proxy is one address."""
    tls_cert: str | None = None
    """Speak HTTPS with this certificate, a PEM file with its whole chain."""
    tls_key: str | None = None
    """The certificate's private key, a PEM file."""
    request_timeout: float | None = None
    """Seconds after which a request that is not finished ends with an error."""
    strict_params: bool = False
    """Refuse request fields that nobody knows, instead of listing them in the header x-ignored-params."""
    heartbeat_seconds: float = 10.0
    """How long a stream may be silent before it shows that it lives."""
    hang_seconds: float = 120.0
    """How long one step of an engine may take before it is replaced. Raise it where a chunk of a prompt takes longer."""
    drain_seconds: float = 5.0
    """How long running requests may go on when the server is stopped."""
    store_responses: int = 1000
    """Responses kept in weft's cache folder for clients that come back to them (previous_response_id); 0 keeps none."""
    store_days: float = 7.0
    """How long they are kept."""
    log_format: Literal["text", "json"] = "text"
    """How the log is written."""

    def engine_settings(self, model: str, fallback: str | None = None) -> EngineSettings:
        return EngineSettings(
            model=model,
            fallback=fallback,
            exact=self.exact,
            max_rows=self.max_rows,
            shards=self.shard,
            memory_bytes=self.memory and self.memory * 2**20,
            cache_bytes=self.cache_megabytes * 2**20,
            cache_folder=None if self.cache_dir is None else str(Path(self.cache_dir).expanduser()),
            cache_folder_bytes=self.cache_dir_megabytes * 2**20,
            cache_canary=self.cache_canary,
            speculate=read_draft_sources(self.speculate),
            log_format=self.log_format,
        )

    def gate_config(self, model: str) -> "GateConfig":
        """Return the settings of a gate that runs such an engine on another machine."""
        shared = {field.name: getattr(self, field.name) for field in fields(GateConfig) if field.name not in ("model", "listen")}
        return GateConfig(model, **shared)

    @property
    def replica_range(self) -> "ReplicaRange":
        return ReplicaRange.read(self.replicas)

    @property
    def engine_addresses(self) -> list[str]:
        return [part.strip() for text in self.engines for part in text.split(",") if part.strip()]

    @property
    def has_keys(self) -> bool:
        return bool(self.api_keys) or self.keys_file is not None

    def check(self) -> None:
        if not 0 <= self.port <= 65535:
            raise WeftError(f"port {self.port} must be between 0 and 65535")
        if not is_loopback(self.host) and not self.has_keys and not self.insecure:
            raise WeftError(
                f"host {self.host} can be reached from other machines and there is no API key: set one with --api-key or "
                "WEFT_API_KEY, or say --insecure if everybody there may use the server"
            )
        if not all(key.strip() for key in self.api_keys):
            raise WeftError("an API key is empty; give one with characters in it, or none")
        least: dict[str, float] = {"max_rows": 1, "cache_megabytes": 0, "max_queue": 0, "max_body_bytes": 1, "drain_seconds": 0}
        least |= {"body_seconds": 0.1, "heartbeat_seconds": 0.1, "hang_seconds": 1, "cache_dir_megabytes": 1}
        least |= {"header_seconds": 0.1, "stall_seconds": 0.1, "max_connections": 1, "max_connections_per_address": 1}
        least |= {"shard": 1, "memory": 1, "request_timeout": 0.001, "store_responses": 0, "store_days": 0.001}
        least |= {"requests_per_minute": 1, "tokens_per_minute": 1}
        for name, low in least.items():
            value = getattr(self, name)
            if value is not None and not low <= value < math.inf:
                raise WeftError(f"{name} {value} must be at least {low}")
        read_draft_sources(self.speculate)
        replicas = self.replica_range
        if (self.tls_cert is None) != (self.tls_key is None):
            raise WeftError("tls_cert and tls_key belong together: give both files for HTTPS, or neither for HTTP")
        if self.ray_resources is not None and self.ray is None:
            raise WeftError("ray_resources can not act without ray: say --ray auto, or leave it out")
        if self.ray is not None and (self.engines or not self.ray.strip()):
            raise WeftError("ray must be auto or HOST:PORT of a cluster's head, and places all engines: leave out engines")
        if self.shard > 1 and (self.cache_dir is not None or self.cache_canary or self.engines):
            raise WeftError(f"shard {self.shard} can not act with cache_dir, cache_canary or engines: leave those out")
        if self.engines and (len(self.models) > 1 or replicas.most > 1):
            raise WeftError("engines are all of one model and started by others; leave out replicas, and all models but one")
        for name, what in (("cache_dir", "folder"), ("keys_file", "file")):
            if getattr(self, name) == "":
                raise WeftError(f"{name} is empty; name a {what}, or leave it out")
        for name in ("cache_dir", "cache_canary"):
            if getattr(self, name) and not self.cache_megabytes:
                raise WeftError(f"{name} can not act while cache_megabytes 0 keeps no prompts; give them memory, or leave it out")


@dataclass(frozen=True)
class ReplicaRange:
    """How many replicas a model has at least and at most; between them its load decides."""

    least: int
    most: int

    @classmethod
    def read(cls, setting: int | str) -> "ReplicaRange":
        """Return the range that a number or LEAST-MOST names; raise WeftError if it names none."""
        found = re.fullmatch(r"([0-9]{1,6})(?:-([0-9]{1,6}))?", str(setting).strip())
        least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
        if not 1 <= least <= most:
            raise WeftError(
                f"replicas {setting!r} must be a number from 1 on, as 4, or the least and the most of them, as 2-8, in this order"
            )
        return cls(least, most)


@dataclass(frozen=True)
class GateConfig:
    """Settings of `weft engine`; the string under each field is the help text of its flag."""

    model: str
    """A built-in name, a folder, a .gguf file or a Hugging Face id."""
    _: KW_ONLY
    listen: str = "127.0.0.1:8500"
    """HOST:PORT to listen on for servers. One that other machines can reach needs an engine key."""
    engine_key: str | None = None
    """The file with the key that servers must have too. Default: ~/.config/weft/engine.key, where it exists."""
    memory: int | None = None
    """Megabytes of memory the engine may use, weights included. Default: a safe share of what is there."""
    exact: bool = False
    """On Metal, and on CUDA with experts: answers are bit-equal in any crowd, at the cost of speed. Elsewhere they always are."""
    shard: int = 1
    """Divide the engine over so many processes of this machine, each with a slice of every layer and its memory."""
    max_rows: int | None = None
    """Requests that are computed together. Default: what suits the device."""
    speculate: str = "auto"
    """Draft tokens, which change the speed and never the answer: auto (all sources), off, or some of forced,lookup,mtp."""
    cache_megabytes: int = 1024
    """Memory for prompts computed before, so that they are not computed again; 0 keeps none."""
    cache_dir: str | None = None
    """Keep computed prompts in this folder too, so that they are there after a restart."""
    hang_seconds: float = 120.0
    """How long one step may take before the engine is replaced."""
    drain_seconds: float = 5.0
    """How long answers may go on when the engine is stopped; then they go on in others."""
    log_format: Literal["text", "json"] = "text"
    """How the log is written."""

    def engine_settings(self) -> EngineSettings:
        """Return the settings of the engine process; raise WeftError if a value is out of its range."""
        shared = ("memory", "shard", "exact", "max_rows", "speculate", "cache_megabytes", "cache_dir")
        config = ServerConfig(**{name: getattr(self, name) for name in (*shared, "hang_seconds", "drain_seconds", "log_format")})
        config.check()
        return msgspec.structs.replace(config.engine_settings(self.model), report_prefixes=True)


def find_engine_key(chosen: str | None) -> Path | None:
    """Return the chosen file of the engine key, or the default one if it exists; None: there is no key."""
    if chosen is not None:
        return Path(chosen).expanduser()
    return DEFAULT_ENGINE_KEY.expanduser() if DEFAULT_ENGINE_KEY.expanduser().exists() else None


def is_loopback(host: str) -> bool:
    """Whether an address can be reached from this machine alone."""
    if host == "localhost":
        return True
    with suppress(ValueError):  # it is a name; others than this one may lead anywhere
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    return False


def read_draft_sources(speculate: str) -> tuple[DraftSource, ...]:
    """Return the draft sources that a `speculate` setting names: auto (all), off (none), or a list with commas."""
    if speculate in ("auto", "off"):
        return DRAFT_SOURCES if speculate == "auto" else ()
    named = {name.strip() for name in speculate.split(",")}
    if not named <= {*DRAFT_SOURCES}:
        raise WeftError(f"speculate {speculate!r} must be auto, off, or some of {', '.join(DRAFT_SOURCES)}, separated by commas")
    return tuple(source for source in DRAFT_SOURCES if source in named)


def cache_folder() -> Path:
    """Return the folder of converted models and stored responses: WEFT_CACHE, or `weft` in the platform's cache directory."""
    chosen = os.environ.get("WEFT_CACHE")
    return Path(chosen).expanduser().absolute() if chosen else own_folder("XDG_CACHE_HOME", "Library/Caches", ".cache")


def own_folder(variable: str, on_macos: str, elsewhere: str) -> Path:
    """Return the `weft` folder inside the one an XDG environment variable names, or inside the platform's default under home."""
    base = os.environ.get(variable) or Path.home() / (on_macos if sys.platform == "darwin" else elsewhere)
    return Path(base).expanduser().absolute() / "weft"


def available_memory_bytes() -> int | None:
    """Return how many bytes a new CPU engine may use: SAFE_SHARE of Linux's MemAvailable; None if that is not known."""
    meminfo = Path("/proc/meminfo")
    found = re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text()) if meminfo.exists() else None
    return int(int(found[1]) * 1024 * SAFE_SHARE) if found else None
