"""`weft keys`: makes API keys for a keys file, and the hashes of secrets for it. Secrets are never taken from a command line."""

import getpass
import secrets
import sys
from typing import Annotated

from cyclopts import App, Parameter

from weft.cli import Switch
from weft.errors import WeftError
from weft.serving.tenants import hash_secret, split_key

MIN_SECRET = 20  # characters; from the hash of a shorter one it can be guessed

keys_command = App(name="keys", help="Make API keys for the keys file of `weft serve --keys-file`.")

TenantName = Annotated[str, Parameter(help="The tenant's name.")]
IsAdmin = Annotated[Switch, Parameter(name="--admin", help="Give the key an admin's role.")]


@keys_command.command(name="new")
def make_key(name: TenantName, /, *, admin: IsAdmin = False) -> None:
    """Make a key: the lines for the keys file go to stdout, the secret to stderr, once.

    For example:
      weft keys new anna >> keys.toml
    """
    secret = f"weft-{secrets.token_urlsafe(32)}"
    if split_key(f"{name}={secret}")[0] != name:
        raise WeftError(f"name {name!r} can not be a tenant's; take up to 64 letters, digits, dots, - and _")
    role = 'role = "admin"\n' if admin else ""
    sys.stdout.write(f'["{name}"]\nhash = "{hash_secret(secret.encode())}"\n{role}')
    sys.stderr.write(f"The key of {name}, shown this once: {secret}\n")


@keys_command.command(name="hash")
def hash_key() -> None:
    """Print the hash of a secret, which is read from stdin, or asked for at a terminal.

    For example:
      weft keys hash < secret.txt
    """
    secret = (getpass.getpass("Secret: ") if sys.stdin.isatty() else sys.stdin.read()).strip()
    if len(secret) < MIN_SECRET:
        raise WeftError(f"the secret has {len(secret)} characters and could be guessed from its hash; take {MIN_SECRET} or more")
    sys.stdout.write(hash_secret(secret.encode()) + "\n")
