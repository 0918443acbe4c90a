"""The keys of one bus, the server configuration made from them, and users' credentials."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Self

from marlaas_api.bus_users import accounts, nkey
from marlaas_api.bus_users.nkey import KeyInvalid, KeyKind
from marlaas_api.bus_users.permissions import permissions
from marlaas_api.bus_users.tokens import credentials_text, signed
from marlaas_api.bus_users.users import BusUser, ExporterUser, RolloutUser, SandboxUser, TenantUser, TrainerUser, term

_SANDBOX_SUBSCRIPTIONS = 1000
# A client's first line carries its token, which contains its permissions; the default limit of NATS is 4 KiB.
_LINE_BYTES = 32 << 10


@dataclass(frozen=True, slots=True)
class BusKeys:
    """Seeds of the operator that the server trusts, and of each account's signing key. They allow to act as any user.

    New keys for a server that already has streams lose no data: the ids of the accounts stay (`accounts`), and only old
    credentials become invalid.
    """

    operator: str = field(repr=False)
    system: str = field(repr=False)
    platform: str = field(repr=False)
    sandboxes: str = field(repr=False)

    @classmethod
    def make(cls) -> Self:
        """Generate new keys."""
        return cls(nkey.new_seed(KeyKind.OPERATOR), *(nkey.new_seed(KeyKind.ACCOUNT) for _ in range(3)))

    def dump(self) -> dict[str, str]:
        """Return the seeds by name; all are secret."""
        return asdict(self)

    @classmethod
    def load(cls, seeds: Mapping[str, str]) -> Self:
        """Load seeds in the form of `dump`; other names are ignored. Raises KeyInvalid, whose text shows no seed."""
        missing = [one.name for one in fields(cls) if one.name not in seeds]
        if missing:
            raise KeyInvalid(
                f"the bus keys are incomplete, missing {', '.join(missing)}: delete them, and new ones are generated"
            )
        kinds = {"operator": KeyKind.OPERATOR}
        return cls(*(nkey.checked_seed(kinds.get(f.name, KeyKind.ACCOUNT), seeds[f.name].strip()) for f in fields(cls)))


def server_config(keys: BusKeys) -> str:
    """Return lines of nats-server configuration that admit only the users of these keys.

    The lines contain no secret, and the same keys give the same lines. Listen address, JetStream folder and
    `max_payload` are not included.
    """
    signing = {
        accounts.SYSTEM: keys.system,
        accounts.PLATFORM: keys.platform,
        accounts.SANDBOXES: keys.sandboxes,
    }
    tokens = {
        account: signed(accounts.account_claims(account, nkey.public_id(seed)), keys.operator)
        for account, seed in signing.items()
    }
    operator = signed(accounts.operator_claims(nkey.public_id(keys.operator)), keys.operator)
    preload = "".join(f"  {account}: {token}\n" for account, token in tokens.items())
    return (
        f"max_control_line: {_LINE_BYTES}\noperator: {operator}\nsystem_account: {accounts.SYSTEM}\n"
        f"resolver: MEMORY\nresolver_preload: {{\n{preload}}}\n"
    )


def mint(keys: BusKeys, user: BusUser, now: float) -> str:
    """Return a credentials file for a user. The text is the same for every `now` of one window (`renew_at`).

    Raises InvalidInput if a name of the user is not a DNS label.
    """
    of_tenant = isinstance(user, TenantUser)
    account, signing = (accounts.SANDBOXES, keys.sandboxes) if of_tenant else (accounts.PLATFORM, keys.platform)
    start = term(user).start(now)
    seed = nkey.derived_seed(KeyKind.USER, signing, f"{user.identity} {start}")
    may = permissions(user)
    claims = {
        "name": user.identity,
        "sub": nkey.public_id(seed),
        "iat": start,
        "exp": term(user).end(now),
        "nats": {
            "type": "user",
            "version": 2,
            "issuer_account": account,
            "pub": {"allow": list(may.publish)},
            "sub": {"allow": list(may.subscribe)},
            "subs": _SANDBOX_SUBSCRIPTIONS if of_tenant else -1,
            "data": -1,
            "payload": -1,
        },
    }
    return credentials_text(signed(claims, signing), seed)


def renew_at(user: BusUser, now: float) -> float:
    """Return the time, in unix seconds, from which `mint` returns a new text: renew the credentials then."""
    return term(user).start(now) + term(user).window_s


class CredentialIssuer:
    """Issues credentials for jobs and pools, one per user and time window.

    keys None: the bus has no users, so there are no credentials. now: returns unix seconds.
    """

    def __init__(self, keys: BusKeys | None, now: Callable[[], float]) -> None:
        self._keys = keys
        self._now = now
        self._issued: dict[BusUser, tuple[float, str]] = {}

    def of(self, user: BusUser) -> str | None:
        """Return the text of a user's credential; None without keys."""
        if self._keys is None:
            return None
        until, text = self._issued.get(user, (0.0, ""))
        now = self._now()
        if now >= until:
            until, text = self._issued[user] = renew_at(user, now), mint(self._keys, user, now)
        return text

    def sandbox(self, namespace: str, job: str, uid: str) -> str | None:
        """Return the credential of a job's sandbox."""
        return self.of(SandboxUser(namespace, job, uid))

    def exporter(self, namespace: str, job: str, uid: str) -> str | None:
        """Return the credential of a job's exporter."""
        return self.of(ExporterUser(namespace, job, uid))

    def forget_job(self, namespace: str, job: str, uid: str) -> None:
        """Drop the credentials of a deleted job."""
        for user in (SandboxUser(namespace, job, uid), ExporterUser(namespace, job, uid)):
            self._issued.pop(user, None)

    def forget_pool(self, name: str) -> None:
        """Drop the credentials of a deleted pool."""
        for user in (RolloutUser(name), TrainerUser(name)):
            self._issued.pop(user, None)

    def pool(self, name: str) -> Mapping[str, str]:
        """Return the credentials of a pool's workers, by role; empty without keys."""
        texts = {"rollout": self.of(RolloutUser(name)), "trainer": self.of(TrainerUser(name))}
        return {role: text for role, text in texts.items() if text is not None}
