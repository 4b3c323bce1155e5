"""What is checked before anything starts: of one machine, of each node, and of how the nodes fit together."""

from pdserve.preflight.files import check_router as check_router
from pdserve.preflight.secrets import ENGINE_KEY as ENGINE_KEY
from pdserve.preflight.secrets import resolve_secrets as resolve_secrets
