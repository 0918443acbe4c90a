"""Users of the bus: keys, permissions and credentials (NATS JWTs). Pure, except for the generation of keys.

A server with `server_config(keys)` accepts only credentials made by `mint(keys, user, now)`. See `docs/reference/bus.md`.
"""

from marlaas_api.bus_users.keys import BusKeys as BusKeys
from marlaas_api.bus_users.keys import CredentialIssuer as CredentialIssuer
from marlaas_api.bus_users.keys import mint as mint
from marlaas_api.bus_users.keys import renew_at as renew_at
from marlaas_api.bus_users.keys import server_config as server_config
from marlaas_api.bus_users.nkey import KeyInvalid as KeyInvalid
from marlaas_api.bus_users.permissions import Permissions as Permissions
from marlaas_api.bus_users.permissions import permissions as permissions
from marlaas_api.bus_users.tokens import Credentials as Credentials
from marlaas_api.bus_users.tokens import CredentialsInvalid as CredentialsInvalid
from marlaas_api.bus_users.tokens import read_credentials as read_credentials
from marlaas_api.bus_users.users import BusUser as BusUser
from marlaas_api.bus_users.users import ExporterUser as ExporterUser
from marlaas_api.bus_users.users import OperatorUser as OperatorUser
from marlaas_api.bus_users.users import OrchestratorUser as OrchestratorUser
from marlaas_api.bus_users.users import RolloutUser as RolloutUser
from marlaas_api.bus_users.users import RunnerUser as RunnerUser
from marlaas_api.bus_users.users import SandboxUser as SandboxUser
from marlaas_api.bus_users.users import TenantUser as TenantUser
from marlaas_api.bus_users.users import TrainerUser as TrainerUser
from marlaas_api.bus_users.users import inbox_prefix as inbox_prefix
