"""`driver.py SCRIPT FILE OUT [NATS [CREDS]]`: the runner with scripted roles, telling its story as JSON lines."""

import sys
from pathlib import Path

from marlaas.local.display import choose
from marlaas.local.runner import RunRequest, run
from marlaas_api.errors import MarlaasError

script, file, out, *nats = sys.argv[1:]
roles = (sys.executable, str(Path(__file__).with_name("scripted_role.py")), script)
url, creds = (*nats, None, None)[:2]
server = {"nats": url, "creds": Path(creds) if creds else None}
request = RunRequest((file,), Path(out), again=("marlaas", "run", file), role_command=roles, **server)
display = choose(True)
try:
    sys.exit(run(request, display))
except MarlaasError as error:
    display.refused(str(error))
    sys.exit(2)
