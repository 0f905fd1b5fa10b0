"""Keys and the tenants they stand for: how they are written, what they may do, and that they stay secret."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.config import ServerConfig
from weft.errors import WeftError
from weft.serving.tenants import Keyring, RateLimit, Tenant, hash_secret, split_key

ANNA, BEN = b"anna-secret", b"ben-secret"


def keyring(*keys: str, **settings: object) -> Keyring:
    return Keyring(ServerConfig(api_keys=keys, **settings))  # type: ignore[arg-type]


def tenant(keys: Keyring, *tokens: bytes) -> Tenant:
    found = keys.find(tokens)
    assert found is not None
    return found


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "keys.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("secret", (None, "secret", False)),
        ("secret:admin", (None, "secret", True)),
        ("anna=secret", ("anna", "secret", False)),
        ("anna=secret:admin", ("anna", "secret", True)),
        ("anna=se=cr:et", ("anna", "se=cr:et", False)),
        ("YWJj=", (None, "YWJj=", False)),  # base64
        ("YWJjZA==", (None, "YWJjZA==", False)),
        (" secret ", (None, "secret", False)),
        (":admin", (None, ":admin", False)),
    ],
)
def test_a_key_is_a_secret_with_a_name_before_it_and_a_role_behind_it(text: str, parts: tuple[str | None, str, bool]) -> None:
    assert split_key(text) == parts


def test_a_blank_key_is_refused() -> None:
    with pytest.raises(WeftError, match="empty"):
        ServerConfig(api_keys=("fine", "  ")).check()
    with pytest.raises(WeftError, match="empty"):
        keyring("  ")


def test_a_tenant_has_the_name_and_the_role_of_its_key() -> None:
    keys = keyring("anna=anna-secret:admin", "ben=ben-secret")

    assert (tenant(keys, ANNA).name, tenant(keys, ANNA).is_admin) == ("anna", True)
    assert (tenant(keys, BEN).name, tenant(keys, BEN).is_admin) == ("ben", False)
    assert keys.find([b"anna", b"anna-secret:admin", b""]) is None


def test_two_keys_with_one_name_are_one_tenant() -> None:
    keys = keyring("anna=old", "anna=new", "ben=ben-secret")

    assert tenant(keys, b"old") == tenant(keys, b"new") != tenant(keys, BEN)
    with pytest.raises(WeftError, match="anna have different roles"):
        keyring("anna=old", "anna=new:admin")


def test_tenants_share_neither_prompts_nor_responses() -> None:
    keys = keyring("anna=anna-secret", "ben=ben-secret", "nameless")
    found = [tenant(keys, secret) for secret in (ANNA, BEN, b"nameless")]

    for parts in ([one.id for one in found], [one.owner for one in found], [one.scope for one in found]):
        assert len({*parts, ""}) == 4


def test_sharing_prompts_must_be_asked_for_and_then_nothing_is_quoted() -> None:
    keys = keyring("anna=anna-secret", "ben=ben-secret", share_cache=True)

    assert tenant(keys, ANNA).scope == tenant(keys, BEN).scope == ""
    assert tenant(keys, ANNA).hides_texts
    assert not tenant(keyring("anna=anna-secret", share_cache=True), ANNA).hides_texts  # there is nobody else


def test_a_tenant_sees_itself_and_an_admin_everybody() -> None:
    keys = keyring("anna=anna-secret:admin", "ben=ben-secret")
    anna, ben = tenant(keys, ANNA), tenant(keys, BEN)

    assert ben.may_see(ben.id)
    assert not ben.may_see(anna.id)
    assert not ben.may_see("")
    assert anna.may_see(ben.id)


def test_without_keys_everybody_is_one_tenant_that_may_do_everything() -> None:
    keys = keyring()
    one, other = keys.anybody([b"mine"]), keys.anybody([])

    assert keys.is_open
    assert keys.has_admin
    assert one.is_admin
    assert one.may_see(other.id)
    assert one.scope == other.scope == ""
    assert one.owner != other.owner


def test_the_only_key_may_do_everything_and_of_several_only_those_that_say_so() -> None:
    assert tenant(keyring("secret"), b"secret").is_admin
    assert not tenant(keyring("anna=anna-secret"), ANNA).is_admin
    several = keyring("one", "two", "three:admin")
    assert [tenant(several, secret).is_admin for secret in (b"one", b"two", b"three")] == [False, False, True]
    assert not keyring("one", "two").has_admin


def test_who_needs_no_key_is_nobody() -> None:
    nobody = keyring("one", "two").nobody()

    assert not nobody.is_admin
    assert not nobody.may_see("")


def test_nothing_that_may_be_printed_has_a_secret_in_it() -> None:
    keys = keyring("anna=anna-secret:admin", "nameless-secret")

    shown = repr(keys._keys)
    assert "anna" in shown
    assert "anna-secret" not in shown
    assert "nameless-secret" not in shown


class TestKeysFile:
    def test_it_has_hashes_roles_and_limits(self, tmp_path: Path) -> None:
        text = f"""
[anna]
hash = "{hash_secret(ANNA)}"
role = "admin"

[ben]
hash = ["{hash_secret(BEN)}", "{hash_secret(b"ben-new")}"]
requests_per_minute = 5
"""
        keys = keyring(keys_file=written(tmp_path, text), requests_per_minute=60, tokens_per_minute=1000)

        assert tenant(keys, ANNA).is_admin
        assert tenant(keys, ANNA).rate == RateLimit(60, 1000)
        assert tenant(keys, BEN) == tenant(keys, b"ben-new")
        assert tenant(keys, BEN).rate == RateLimit(5, 1000)
        assert "anna-secret" not in text
        assert hash_secret(ANNA) != hash_secret(ANNA)  # salted

    def test_a_name_is_the_same_tenant_in_the_file_and_in_the_flag(self, tmp_path: Path) -> None:
        keys = keyring("anna=by-flag", keys_file=written(tmp_path, f'[anna]\nhash = "{hash_secret(ANNA)}"'))

        assert tenant(keys, ANNA).id == tenant(keys, b"by-flag").id

    def test_it_can_be_read_again(self, tmp_path: Path) -> None:
        file = written(tmp_path, f'[anna]\nhash = "{hash_secret(ANNA)}"')
        keys = keyring(keys_file=file)
        before = tenant(keys, ANNA)
        written(tmp_path, f'[anna]\nhash = "{hash_secret(b"changed")}"\n[ben]\nhash = "{hash_secret(BEN)}"')
        keys.reload()

        assert keys.find([ANNA]) is None
        assert tenant(keys, b"changed").owner == before.owner  # its responses are still its own
        assert tenant(keys, BEN).name == "ben"

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("", "has no key in it"),
            ("[anna", "is not TOML"),
            ('[anna]\nhash = "secret"', "`weft keys hash` prints"),
            ("[anna]\n", "tenant anna: .*hash"),
            ('["an na"]\nhash = "x"', "a tenant 'an na'"),
            (f'[anna]\nhash = "{hash_secret(ANNA)}"\nrole = "root"', "tenant anna: .*role"),
            (f'[anna]\nhash = "{hash_secret(ANNA)}"\nadmin = true', "tenant anna: .*admin"),
            (f'[anna]\nhash = "{hash_secret(ANNA)}"\ntokens_per_minute = 0', "tenant anna: .*tokens_per_minute"),
        ],
    )
    def test_what_is_wrong_in_it_is_said_and_the_keys_stay_as_they_were(self, tmp_path: Path, text: str, words: str) -> None:
        file = written(tmp_path, f'[anna]\nhash = "{hash_secret(ANNA)}"')
        keys = keyring(keys_file=file)
        written(tmp_path, text)

        with pytest.raises(WeftError, match=words):
            keys.reload()
        assert tenant(keys, ANNA).name == "anna"

    def test_one_that_is_not_there_is_an_error_and_not_an_open_door(self, tmp_path: Path) -> None:
        with pytest.raises(WeftError, match="can not be read"):
            keyring(keys_file=str(tmp_path / "absent"))
