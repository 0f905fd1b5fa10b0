"""API keys and the tenants they stand for: names, roles and limits, read from flags and from a keys file.

A tenant is whoever a key was given to: several keys may have its name. Secrets are kept and compared as salted hashes.
"""

import hashlib
import hmac
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

import msgspec
from msgspec import Meta

from weft.config import ServerConfig, read_toml
from weft.errors import WeftError

NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
# NAME=SECRET[:admin] or SECRET[:admin]. What begins with a second "=" is the end of base64, so the whole is a secret.
_WRITTEN_KEY = re.compile(rf"(?:(?P<name>{NAME})=(?=[^=]))?(?P<secret>.+?)(?P<admin>:admin)?", re.DOTALL)
_HASH = re.compile(r"sha256:(?P<salt>(?:[0-9a-f]{2}){8,32}):(?P<digest>[0-9a-f]{64})")

KeyRole = Literal["user", "admin"]
PerMinute = Annotated[int, Meta(ge=1)]


@dataclass(frozen=True)
class RateLimit:
    """What a tenant may use in a minute; None: as much as there is."""

    requests: int | None = None
    tokens: int | None = None


@dataclass(frozen=True)
class Tenant:
    """Whom a request belongs to, and what it may see and do. The default is the only tenant of a server without keys."""

    id: str = ""  # as the engine knows it
    name: str = ""  # as logs show it
    is_admin: bool = True
    owner: str = ""  # under which its responses are stored
    scope: str = ""  # within which computed prompts are shared
    hides_texts: bool = False  # computed prompts are shared with others, so reports may not quote them
    rate: RateLimit = RateLimit()

    def may_see(self, tenant_id: str) -> bool:
        """Whether this tenant may see and cancel requests of the tenant with that id."""
        return self.is_admin or self.id == tenant_id


@dataclass(frozen=True)
class HashedKey:
    """One accepted key: the salted hash of its secret, and what is known of its tenant."""

    salt: bytes
    digest: bytes
    owner: str
    name: str
    role: KeyRole | None  # None: not named; such a key is an admin's where it is the only one
    rate: RateLimit = RateLimit()

    @classmethod
    def of_text(cls, text: str, number: int) -> Self:
        """Read NAME=SECRET[:admin] or SECRET[:admin] as written in a setting; `number` stands for a missing name."""
        name, secret, is_admin = split_key(text)
        salt, owner = os.urandom(16), owner_of(secret.encode()) if name is None else owner_of_name(name)
        role: KeyRole | None = "admin" if is_admin else None if name is None else "user"
        return cls(salt, _digest(salt, secret.encode()), owner, name or f"#{number}", role)

    def fits(self, token: bytes) -> bool:
        return hmac.compare_digest(_digest(self.salt, token), self.digest)


class KeyEntry(msgspec.Struct, forbid_unknown_fields=True):
    """A table of the keys file: one tenant, with the hashes of its keys, its role and its limits."""

    hash: str | list[str]
    role: KeyRole = "user"
    requests_per_minute: PerMinute | None = None
    tokens_per_minute: PerMinute | None = None


class Keyring:
    """The keys that a server accepts; without any, everybody is let in as one tenant. `reload` reads the keys file again."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self._keys: list[tuple[HashedKey, Tenant]] = []
        self.reload()

    def reload(self) -> None:
        """Read all keys. Raises WeftError, and the keys stay as they were, if one can not be read."""
        config, default = self.config, RateLimit(self.config.requests_per_minute, self.config.tokens_per_minute)
        keys = [HashedKey.of_text(text, number + 1) for number, text in enumerate(config.api_keys)]
        keys += [] if config.keys_file is None else read_keys_file(Path(config.keys_file).expanduser())
        roles: dict[str, KeyRole | None] = {}
        for key in keys:
            if roles.setdefault(key.name, key.role) != key.role:
                raise WeftError(f"the keys of {key.name} have different roles; give all of them the same")
        self._keys = [(key, self._tenant(key, default, is_only=len(roles) == 1)) for key in keys]

    def _tenant(self, key: HashedKey, default: RateLimit, *, is_only: bool) -> Tenant:
        tenant_id = key.owner[:16]
        rate = RateLimit(key.rate.requests or default.requests, key.rate.tokens or default.tokens)
        is_admin = key.role == "admin" or (key.role is None and is_only)
        shares = self.config.share_cache
        return Tenant(tenant_id, key.name, is_admin, key.owner, "" if shares else tenant_id, shares and not is_only, rate)

    @property
    def is_open(self) -> bool:
        """Whether no key is asked for."""
        return not self._keys

    @property
    def has_admin(self) -> bool:
        return self.is_open or any(tenant.is_admin for _, tenant in self._keys)

    def find(self, tokens: Iterable[bytes]) -> Tenant | None:
        """Return the tenant of the first of these keys that is accepted; None if none is. All keys are compared every time."""
        fitting = [tenant for token in tokens for key, tenant in self._keys if key.fits(token)]
        return fitting[0] if fitting else None

    @staticmethod
    def anybody(tokens: Iterable[bytes]) -> Tenant:
        """Return the tenant of a server without keys; what a client sends as its key is its name for its own responses."""
        return Tenant(owner=owner_of(next(iter(tokens), b"")))

    @staticmethod
    def nobody() -> Tenant:
        """Return the tenant of requests that need no key on a server that has some; it has and may do nothing."""
        return Tenant(id="-", name="-", is_admin=False, owner="-", scope="-")


def split_key(text: str) -> tuple[str | None, str, bool]:
    """Split a written key into the name, if it has one, the secret, and whether it is an admin's. Raises WeftError."""
    found = _WRITTEN_KEY.fullmatch(text.strip())
    if found is None:
        raise WeftError("an API key is empty; give one with characters in it, or none")
    return found["name"], found["secret"], found["admin"] is not None


def owner_of(secret: bytes) -> str:
    """Return a hash of a key without a name, under which its responses are stored; the key itself is never written."""
    return hashlib.blake2b(secret, digest_size=16).hexdigest()


def owner_of_name(name: str) -> str:
    """Return a hash of a tenant's name, under which its responses are stored, whatever keys it has."""
    return hashlib.blake2b(name.encode(), digest_size=16, person=b"weft tenant").hexdigest()


def hash_secret(secret: bytes, salt: bytes | None = None) -> str:
    """Return the line that stands for a secret in a keys file."""
    salt = os.urandom(16) if salt is None else salt
    return f"sha256:{salt.hex()}:{_digest(salt, secret).hex()}"


def read_keys_file(path: Path) -> list[HashedKey]:
    """Read a keys file: TOML, a table for each tenant. Raises WeftError naming the file and what is wrong in it."""
    tables = read_toml(path, f"the keys file {path}")
    keys = [key for name, table in tables.items() for key in _read_entry(path, name, table)]
    if not keys:
        raise WeftError(f"the keys file {path} has no key in it; write one with `weft keys new NAME`, or leave the setting out")
    return keys


def _read_entry(path: Path, name: str, table: object) -> Iterator[HashedKey]:
    if not re.fullmatch(NAME, name):
        raise WeftError(f"the keys file {path} has a tenant {name!r}; names have up to 64 letters, digits, dots, - and _")
    try:
        entry = msgspec.convert(table, KeyEntry)
    except msgspec.ValidationError as error:
        raise WeftError(f"the keys file {path}, tenant {name}: {error}") from None
    for text in [entry.hash] if isinstance(entry.hash, str) else entry.hash:
        if (found := _HASH.fullmatch(text)) is None:
            raise WeftError(f"the keys file {path}, tenant {name}: a hash is what `weft keys hash` prints, sha256:SALT:HASH")
        salt, digest = bytes.fromhex(found["salt"]), bytes.fromhex(found["digest"])
        rate = RateLimit(entry.requests_per_minute, entry.tokens_per_minute)
        yield HashedKey(salt, digest, owner_of_name(name), name, entry.role, rate)


def _digest(salt: bytes, secret: bytes) -> bytes:
    return hashlib.sha256(salt + secret).digest()
