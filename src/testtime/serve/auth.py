"""Who may do what: bearer tokens, each with a scope and a rate, kept as hashes in a file of the service's folder.

A token is 256 random bits, so a fast hash is enough: slow ones (bcrypt, scrypt) make up for passwords that can be
guessed, and nobody guesses one of 2**256.
"""

from __future__ import annotations

import hmac
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from hashlib import sha256
from ipaddress import ip_address
from json import dumps
from math import isfinite
from pathlib import Path
from typing import Any

from testtime.errors import InputError
from testtime.serve.types import ServiceError

FILE = "tokens.json"
SCOPES = ("predict", "learn", "admin")  # each allows all that the ones before it allow
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
PREFIX = "tt_"  # for people and for scanners that look for leaked secrets
LOOK_AGAIN = 1.0  # seconds after which a change of the file is noticed at the latest


@dataclass(frozen=True)
class Token:
    """What is known of a token; the secret itself is nowhere kept."""

    name: str
    digest: str  # SHA-256 of the secret, in hexadecimal
    scope: str
    rate: float  # requests a second; 0 for any number
    created: str  # ISO time, UTC

    def allows(self, scope: str) -> bool:
        return SCOPES.index(self.scope) >= SCOPES.index(scope)


class Refusal(ServiceError):
    """A request that is not permitted; `reason` is a word for the metrics."""

    def __init__(self, status: int, reason: str, message: str, retry_after: float | None = None) -> None:
        super().__init__(status, message, retry_after)
        self.reason = reason


def read_tokens(folder: Path) -> list[Token]:
    """The tokens of a service's folder; none if there is no file of them."""
    from testtime.files import parse_json, read_bytes

    path = folder / FILE
    try:
        rows = parse_json(read_bytes(path), path, kind=list)
    except FileNotFoundError:
        return []
    except OSError as problem:
        raise InputError(f"Cannot read {path}: {problem.strerror or problem}.") from None
    try:
        tokens = [Token(**row) for row in rows]
        valid = all(token.scope in SCOPES and len(bytes.fromhex(token.digest)) == 32 for token in tokens)
        valid = valid and all(isfinite(token.rate) and token.rate >= 0 for token in tokens)
    except (TypeError, ValueError):
        valid = False
    if not valid:
        raise InputError(f"{path} is damaged. Remove it, and make new tokens with 'testtime token add'.")
    return tokens


def _write(folder: Path, tokens: list[Token]) -> None:
    from testtime.files import write_atomic

    write_atomic(folder / FILE, dumps([asdict(token) for token in tokens], indent=1) + "\n", private=True)


def add_token(folder: Path, name: str, scope: str, rate: float = 0.0) -> str:
    """Make a token and return its secret, which cannot be read again."""
    from testtime.files import locked

    if not NAME.fullmatch(name):
        raise InputError(f"Token name {name!r}: use up to 64 letters, digits, dots, dashes and underscores.")
    if scope not in SCOPES:
        raise InputError(f"Unknown scope {scope!r}. Available: {', '.join(SCOPES)}.")
    if not (isfinite(rate) and 0 <= rate <= 1e6):
        raise InputError(f"--rate {rate}: must be from 0 (no limit) to 1,000,000 requests a second.")
    with locked(folder / FILE, wait=True):
        tokens = read_tokens(folder)
        if any(token.name == name for token in tokens):
            raise InputError(f"There is a token {name!r} already. Choose another name, or revoke it first.")
        secret = PREFIX + secrets.token_urlsafe(32)
        created = datetime.now(UTC).isoformat(timespec="seconds")
        _write(folder, [*tokens, Token(name, _digest(secret).hex(), scope, rate, created)])
    return secret


def revoke_token(folder: Path, name: str) -> None:
    """Remove a token; a running service notices within a second."""
    from testtime.files import locked

    with locked(folder / FILE, wait=True):
        tokens = read_tokens(folder)
        kept = [token for token in tokens if token.name != name]
        if len(kept) == len(tokens):
            known = ", ".join(token.name for token in tokens) or "none"
            raise InputError(f"There is no token {name!r}. Tokens: {known}.")
        _write(folder, kept)


def _digest(secret: str) -> bytes:
    return sha256(secret.encode("utf-8", "surrogatepass")).digest()


def is_loopback(host: str) -> bool:
    """Whether a server bound to this host is reached from this machine alone."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def check_bind(host: str, folder: Path) -> None:
    """Refuse to listen where others can reach a service that asks for no token."""
    if not is_loopback(host) and not read_tokens(folder):
        raise InputError(
            f"--host {host} can be reached from other machines, and there is no token. Make one with 'testtime token "
            f"add NAME --scope admin --folder {folder}', or use --host 127.0.0.1."
        )


class Rates:
    """Requests a second of each token: a bucket holds those of one second, and at least one."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._buckets: dict[str, tuple[float, float]] = {}  # by digest: requests left, and when they were counted

    def spend(self, digest: str, rate: float) -> None:
        """Take one request, or raise a `Refusal`."""
        now, size = self._now(), max(1.0, rate)
        left, then = self._buckets.get(digest, (size, now))
        left = min(size, left + (now - then) * rate)
        if left < 1:
            self._buckets[digest] = left, now
            wait = (1 - left) / rate
            raise Refusal(429, "rate", f"More than {rate:g} requests a second; wait {wait:.2f} s.", wait)
        self._buckets[digest] = left - 1, now


class Gate:
    """Checks the tokens of requests. Without tokens everything is allowed, on a loopback address alone.

    Tokens that are added or revoked count within a second. A service that has seen a token never becomes open again.
    """

    def __init__(self, folder: Path, host: str, now: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._now = folder, now
        self._tokens: list[tuple[bytes, Token]] = []
        self._looked, self._stamp = now(), self._identity()
        self._take(read_tokens(folder))
        self.open = is_loopback(host) and not self._tokens

    def _take(self, tokens: list[Token]) -> None:
        self._tokens = [(bytes.fromhex(token.digest), token) for token in tokens]

    def _identity(self) -> Any:
        try:
            status = (self._folder / FILE).stat()
            return status.st_ino, status.st_mtime_ns, status.st_size
        except OSError:
            return None

    def _refresh(self) -> None:
        now = self._now()
        if now - self._looked < LOOK_AGAIN:
            return
        self._looked, stamp = now, self._identity()
        if stamp != self._stamp:
            try:
                self._take(read_tokens(self._folder))
            except InputError:
                return  # damaged: the tokens that were read last stay valid, and we look again
            self._stamp = stamp
            self.open = self.open and not self._tokens

    def identify(self, secret: str | None, scope: str) -> Token | None:
        """The token of this secret, if it allows `scope`; None on an open service. Otherwise raises a `Refusal`."""
        self._refresh()
        if self.open:
            return None
        if secret is None:
            raise Refusal(401, "no token", "A token is needed: send the header 'Authorization: Bearer TOKEN'.")
        digest, found = _digest(secret), None
        for known, token in self._tokens:  # all of them, each in constant time: the time tells nothing
            if hmac.compare_digest(known, digest):
                found = token
        if found is None:
            raise Refusal(401, "unknown token", "This token is not known; it may have been revoked.")
        if not found.allows(scope):
            raise Refusal(403, "scope", f"This needs a token with the scope {scope!r}; yours has {found.scope!r}.")
        return found


def bearer(header: str | None) -> str | None:
    """The secret in an Authorization header, if it has one."""
    kind, _, secret = (header or "").partition(" ")
    return secret.strip() or None if kind.lower() == "bearer" else None
