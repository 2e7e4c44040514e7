"""The audit of a trained model along both axes: measurements and ablations of one run."""

from twoaxis.audit.result import Audit
from twoaxis.audit.run import audit_model, audit_run, read_audit

__all__ = ["Audit", "audit_model", "audit_run", "read_audit"]
