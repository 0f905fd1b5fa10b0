"""What only admins may do: the check, and the audit log of what was done and what was refused."""

import logging

from starlette.requests import Request

from weft.api.problems import BorderError
from weft.log import log_action
from weft.serving.tenants import Tenant


def tenant_of(request: Request) -> Tenant:
    """Return the tenant that `Guard` found for a request."""
    tenant: Tenant = request.state.tenant
    return tenant


def require_admin(request: Request, action: str, subject: str = "-") -> None:
    """Log an admin's action, or log and raise that it is refused (BorderError, 403) to a tenant that is none."""
    is_allowed = tenant_of(request).is_admin
    note_action(request, action, subject, "allowed" if is_allowed else "refused")
    if not is_allowed:
        message = f"{action} needs the key of an admin; the server's operator gives out such keys (NAME=SECRET:admin)."
        raise BorderError(403, "admin_required", message)


def note_action(request: Request, action: str, subject: str, outcome: str) -> None:
    """Write an action to the audit log: who, from where, what, and the outcome."""
    address, level = request.client, logging.WARNING if outcome == "refused" else logging.INFO
    fields = {"action": action, "subject": subject, "outcome": outcome, "tenant": tenant_of(request).name or "-"}
    fields |= {"client": f"{address.host}:{address.port}" if address else "-", "id": request.state.request_id}
    log_action(fields, level)
